"""A selection of tests: `make test` runs few of them, FULL=1 more.

Tests marked `full` run only with FULL=1. Several `parametrize` decorators on one test make a product, of which a run
has a part: the usual run has each value at least once, FULL every two values together, because most faults appear when
two particular values are combined (Kuhn, Wallace and Gallo 2004). A test marked `cases(usual=3, full=10)` has at most
that many cases in these runs. Tests that the command line names by `::` always run.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest
from _pytest.skipping import evaluate_skip_marks


def is_full() -> bool:
    return os.environ.get("FULL") == "1"


def covering(rows: Sequence[tuple], strength: int = 2, start: Iterable[int] = ()) -> list[int]:
    """Return the indices of few rows that contain every combination of `strength` values that occurs in any row.

    The search is greedy: it takes the row with the most missing combinations, and in a tie the row with the values
    that have been taken least often.

    Args:
        rows: tuples of equal length with hashable values.
        strength: the number of columns to combine; with 1, each value occurs in a row.
        start: indices of rows to include in any case.
    """
    left = {at: set(combinations(enumerate(row), min(strength, len(row)))) for at, row in enumerate(rows)}
    missing, chosen, taken = set().union(*left.values()), [], Counter()

    def take(at: int) -> None:
        chosen.append(at)
        missing.difference_update(left.pop(at))
        taken.update(enumerate(rows[at]))

    for at in start:
        take(at)
    while missing:
        take(max(left, key=lambda at: (len(left[at] & missing), -sum(taken[one] for one in enumerate(rows[at])))))
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs with FULL=1")
    config.addinivalue_line("markers", "cases(usual, full): how many cases these runs have at most")


def pytest_report_header() -> str:
    return f"run: {'full' if is_full() else 'usual'}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    ids = {item.nodeid for same in functions.values() for item in selected(same)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = [item for item in items if item.nodeid in ids]


def selected(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of one function in this run; those of the usual run are also in FULL."""
    mark = items[0].get_closest_marker("cases")
    given = mark.kwargs if mark else {}
    full = given.get("full")
    usual = given.get("usual", full)
    quick = part([item for item in items if not item.get_closest_marker("full")], 1, usual)
    return part(items, 2, full, quick) if is_full() else quick


def part(
    items: list[pytest.Item], strength: int, most: int | None, start: Sequence[pytest.Item] = ()
) -> list[pytest.Item]:
    """Return a covering of a product without skipped tests, or all tests of a list of cases.

    Args:
        items: tests of one function.
        strength: the strength of the covering.
        most: the maximal number of tests, which are spread evenly.
        start: tests to include in any case.
    """
    rest = [item for item in items if item not in start]
    count = len(rest) if most is None else min(max(most - len(start), 0), len(rest))
    spread = [rest[i * len(rest) // count] for i in range(count)]
    in_turn = dict.fromkeys([*start, *spread, *rest])  # a covering prefers the first of equally good tests
    able = [item for item in in_turn if hasattr(item, "callspec") and not evaluate_skip_marks(item)]
    rows = [tuple(item.callspec._idlist) for item in able]
    if not rows or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return [*start, *spread]
    chosen = covering(rows, strength, [at for at, item in enumerate(able) if item in start])
    return [able[at] for at in chosen[:most]]
