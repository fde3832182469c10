"""Pairwise testing: few tests that combine every two values of a test's independent dimensions.

Most faults appear when two particular values are combined (Kuhn, Wallace and Gallo 2004). FULL runs have every pair of
values, usual runs each value at least once, and weekly runs all combinations: see tiers.py.
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
    """Return a mark that parametrizes a test with these dimensions.

    Args:
        where: a function of one value of each dimension that returns whether this combination is allowed.
        strength: 2 combines every two values in FULL runs; 1 has each value at least once.
        dimensions: the values of each dimension. If it is a mapping, its keys name the tests. If a dimension is empty
            (for example, the machine has no such backend), pytest skips the test.

    Raises:
        ValueError: if no combination is allowed.

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
        raise ValueError(f"`where` allows no combination of {', '.join(dimensions)}; allow at least one")
    # Compare by id: values need not be hashable, and 0 == False.
    keys = [tuple(id(value) for _, value in row) for row in rows]
    usual = covering(keys, Tier.USUAL)
    full = set(covering(keys, strength, usual))
    left_out = {
        at: pytest.mark.full if at in full else pytest.mark.weekly for at in range(len(rows)) if at not in usual
    }
    cases = [
        pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row), marks=left_out.get(at, ()))
        for at, row in enumerate(rows)
        if at in full or tier() > Tier.USUAL  # a slice of the weekly tests may contain any row
    ]
    return pytest.mark.parametrize(tuple(dimensions), cases)
