"""Dimensions of a test's cases, as one mark: see tiers.py for the combinations that each run has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from tiers import covering, is_full


def pairwise(
    where: Callable[..., bool] | None = None, *, strength: int = 2, **dimensions: Iterable | Mapping[str, Any]
):
    """Return a mark that parametrizes a test with these dimensions.

    Args:
        where: a function of one value of each dimension that returns whether this combination is allowed.
        strength: 2 combines every two values in FULL runs; 1 has each value at least once.
        dimensions: the values of each dimension. If it is a mapping, its keys name the tests. If a dimension is empty
            (for example, the machine has no such backend), pytest skips the test.

    Example:
        >>> pairwise(size={"small": 1, "large": 9}, sign="+-", turned=(True, False)).args[1][0].id
        'small-+-True'
    """
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for values in dimensions.values()
    ]
    rows = [row for row in product(*named) if where is None or where(*(value for _, value in row))]
    # Compare by id: values need not be hashable, and 0 == False.
    keys = [tuple(id(value) for _, value in row) for row in rows]
    chosen = covering(keys, 1)
    if is_full():
        chosen = covering(keys, strength, chosen)
    cases = [
        pytest.param(*(value for _, value in rows[at]), id="-".join(name for name, _ in rows[at]))
        for at in sorted(chosen)
    ]
    return pytest.mark.parametrize(tuple(dimensions), cases)
