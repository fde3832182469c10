"""Dimensions of a test that are independent: every two values of every two of them meet, in few tests.

Most faults show where two values meet (Kuhn, Wallace and Gallo 2004). Where the environment variable FULL is set and
not empty, it is all combinations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def is_full() -> bool:
    """Whether all is to be tested, however long it takes."""
    return bool(os.environ.get("FULL"))


def covering(rows: Iterable[tuple], strength: int = 2) -> list[tuple]:
    """Of these rows a few in which every two values meet that do in any row; of strength 1, in which each value is.

    Greedily: always the first row in which most values meet that have not met yet. The same rows give the same few.
    """
    rows = list(rows)
    # By place, as values need not be hashable, and equal ones (0 and False) are not the same.
    places: list[list[Any]] = [[] for _ in rows[0]] if rows else []
    meetings = {}
    for at, row in enumerate(rows):
        numbers = [number(value, known) for value, known in zip(row, places, strict=True)]
        meetings[at] = set(combinations(enumerate(numbers), min(strength, len(row))))
    left, chosen = set().union(*meetings.values()), []
    while left:
        best = max(meetings, key=lambda at: len(meetings[at] & left))
        chosen.append(best)
        left -= meetings.pop(best)
    return [rows[at] for at in sorted(chosen)]


def number(value: Any, known: list[Any]) -> int:
    """Which of the known objects it is; a new one becomes known."""
    for i, other in enumerate(known):
        if other is value:
            return i
    known.append(value)
    return len(known) - 1


def pairwise(
    where: Callable[..., bool] | None = None, *, strength: int = 2, **dimensions: Iterable | Mapping[str, Any]
):
    """A mark for a test whose arguments are these dimensions.

    Args:
        where: takes one value of each dimension; says whether they may come together.
        strength: 1 where no two values of different dimensions have to meet: each value is in one test at least.
        dimensions: the values of each; of a mapping its values, and its keys name the tests.

    Example:
        >>> pairwise(size={"small": 1, "large": 9}, sign="+-", turned=(True, False)).args[1][0].id
        'small-+-True'
    """
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for values in dimensions.values()
    ]
    # The pairs of names and values are one object each: by which they are told apart.
    rows = [row for row in product(*named) if where is None or where(*(value for _, value in row))]
    if not is_full():
        rows = covering(rows, strength)
    cases = [pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row)) for row in rows]
    return pytest.mark.parametrize(tuple(dimensions), cases)
