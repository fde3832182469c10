"""Dimensions of a test that are independent: every two of their values meet, in few tests.

Most faults show where two values meet (Kuhn, Wallace and Gallo 2004). FULL runs have these tests, usual runs each value
at least once, and weekly runs all combinations: see tiers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from tiers import Tier, covering, tier


def pairwise(
    where: Callable[..., bool] | None = None, *, strength: int = 2, **dimensions: Iterable | Mapping[str, Any]
):
    """Return a mark that gives a test these dimensions as its arguments.

    Args:
        where: takes one value of each dimension; says whether they may come together.
        strength: 1 where no two values of different dimensions have to meet in a FULL run either.
        dimensions: the values of each; of a mapping its values, and its keys name the tests. Of none, such as
            the backends of a machine that has no such backend, pytest skips the test.

    Raises:
        ValueError: if no values may come together.

    Example:
        >>> pairwise(size={"small": 1, "large": 9}, sign="+-", turned=(True, False)).args[1][0].id
        'small-+-True'
    """
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for values in dimensions.values()
    ]
    rows = [row for row in product(*named) if where is None or where(*(value for _, value in row))]
    if not rows and all(named):
        raise ValueError(f"there is no combination of {', '.join(dimensions)} that may come together")
    # Values need not be hashable, and 0 is not False.
    keys = [tuple(id(value) for _, value in row) for row in rows]
    usual = covering(keys, Tier.USUAL)
    full = set(covering(keys, strength, usual))
    left_out = {
        at: pytest.mark.full if at in full else pytest.mark.weekly for at in range(len(rows)) if at not in usual
    }
    cases = [
        pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row), marks=left_out.get(at, ()))
        for at, row in enumerate(rows)
        if at in full or tier() > Tier.USUAL  # a slice of the weekly tests may have any of them
    ]
    return pytest.mark.parametrize(tuple(dimensions), cases)
