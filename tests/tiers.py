"""Select the tests of a run: `make test` runs few, FULL=1 more, and WEEKLY=1 all.

The usual run leaves out tests marked `full`, and only the weekly run has all tests marked `weekly`. A test marked
`cases(usual=3, full=10)` has that many of its cases in these runs, evenly spread. Several `parametrize` decorators on
one test make a product: the usual run has each value once, and FULL has every two values together. A FULL run also has
one slice of the weekly tests, which the commit's hash chooses, so that all of them run over time.
"""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from collections.abc import Iterable
from enum import IntEnum
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# A slice ends when it has taken SLICE_SECONDS of a process; the tests that remain are skipped.
SLICES = 24
SLICE_SECONDS = 300


class Tier(IntEnum):
    """A kind of run. Its number is the strength of the covering that products are thinned to; weekly runs have all."""

    USUAL = 1
    FULL = 2
    WEEKLY = 3


# The marks that this file knows, and their arguments.
MARKS = {"full": set(), "cases": {"usual", "full"}, "weekly": {"in_slices"}}


def tier() -> Tier:
    """Return the kind of run that the environment variables WEEKLY and FULL ask for."""
    if os.environ.get("WEEKLY"):
        return Tier.WEEKLY
    return Tier.FULL if os.environ.get("FULL") else Tier.USUAL


def covering(rows: Iterable[tuple], strength: int = 2) -> list[int]:
    """Return the places of few rows in which every combination of `strength` values is that is in any row.

    Greedy: takes the first row with the most combinations that are still missing. The same rows give the same result.

    Args:
        rows: tuples of equal length. Values are compared by identity: they need not be hashable, and 0 is not False.
        strength: of how many columns the values are combined; 1 has each value in a row.
    """
    rows = list(rows)
    columns: list[dict[int, int]] = [{} for _ in rows[0]] if rows else []
    numbered = [
        [seen.setdefault(id(value), len(seen)) for value, seen in zip(row, columns, strict=True)] for row in rows
    ]
    meetings = {
        at: set(combinations(enumerate(numbers), min(strength, len(numbers)))) for at, numbers in enumerate(numbered)
    }
    missing, chosen = set().union(*meetings.values()), []
    while missing:
        best = max(meetings, key=lambda at: len(meetings[at] & missing))
        chosen.append(best)
        missing -= meetings.pop(best)
    return sorted(chosen)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs with FULL=1 or WEEKLY=1")
    config.addinivalue_line("markers", "cases(usual=None, full=None): how many cases these runs have; None: all")
    config.addinivalue_line("markers", "weekly(in_slices=True): runs with WEEKLY=1, and in one slice of FULL=1")


def pytest_report_header() -> str:
    now, number = tier(), slice_number()
    of_slice = (
        f", with slice {number} of {SLICES} of the weekly tests" if now is Tier.FULL and number is not None else ""
    )
    return f"run: {now.name.lower()}{of_slice}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of longer runs, unless the command line names them, and put those of the slice last."""
    now, named = tier(), _named(config)
    for item in items:
        _check_marks(item)
    if now is Tier.WEEKLY:
        return
    kept = [item for _, same in groupby(items, _function) for item in _thinned(list(same), now)]
    kept += [item for item in items if f"{item.nodeid}[".startswith(named) and item not in kept]
    ids = {item.nodeid for item in kept}
    if now is Tier.FULL:
        number = slice_number()
        for item in items:
            if item.nodeid not in ids and number is not None and _slice_of(item) == number:
                item.stash[IN_SLICE] = True
                kept.append(item)
        ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = kept


def _named(config: pytest.Config) -> tuple[str, ...]:
    """Return how the ids of the tests begin that the command line names, as path::test or path::test[case]."""
    found = []
    for argument in config.args:
        path, colons, rest = argument.partition("::")
        if colons:
            path = os.path.relpath(config.invocation_params.dir / path, config.rootpath).replace(os.sep, "/")
            found.append(f"{path}::{rest}[")
    return tuple(found)


def _check_marks(item: pytest.Item) -> None:
    """Raise pytest.UsageError for an argument that a mark does not have: it would change nothing."""
    for mark in item.iter_markers():
        known = MARKS.get(mark.name)
        if known is not None and (mark.args or not mark.kwargs.keys() <= known):
            options = f"takes {' and '.join(sorted(known))}" if known else "takes no arguments"
            raise pytest.UsageError(f"{item.nodeid}: {mark.name}{mark.args or mark.kwargs}, but this mark {options}")


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _slice_of(item: pytest.Item) -> int | None:
    """Return which slice a weekly test is in; None if it is too long for any."""
    weekly = item.get_closest_marker("weekly")
    if weekly and not weekly.kwargs.get("in_slices", True):
        return None
    return zlib.crc32(item.nodeid.encode()) % SLICES


def _limit(item: pytest.Item, now: Tier) -> int | None:
    """Return how many cases of this test's function are in a run at most; None if its marks do not say."""
    if item.get_closest_marker("weekly") or (now is Tier.USUAL and item.get_closest_marker("full")):
        return 0
    cases = item.get_closest_marker("cases")
    return cases.kwargs.get(now.name.lower()) if cases else None


def _thinned(items: list[pytest.Item], now: Tier) -> list[pytest.Item]:
    """Return the tests of one function that are in a run: a covering of its parameters, or as many as its marks say."""
    kept = _covered([item for item in items if _limit(item, now) != 0], now)
    limit = _limit(kept[0], now) if kept else None
    return kept if limit is None else _spread(kept, limit)


def _spread(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _covered(items: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Return a covering of a product. The arguments of one `parametrize` are one dimension: a list of cases stays."""
    indices = [item.callspec.indices for item in items if hasattr(item, "callspec")]
    if not indices or len(indices) < len(items) or len({tuple(each) for each in indices}) > 1:
        return items
    columns = dict.fromkeys(tuple(each[name] for each in indices) for name in indices[0])
    return items if len(columns) < 2 else [items[at] for at in covering(zip(*columns, strict=True), strength)]


# --- the slice of the weekly run ---

IN_SLICE = pytest.StashKey[bool]()
_spent = 0.0


def slice_number() -> int | None:
    """Return which slice this commit runs: SLICE of the environment, or the commit's hash; None outside of git."""
    given = os.environ.get("SLICE")
    if given:
        if not given.isdecimal():
            raise pytest.UsageError(f"SLICE={given!r}, but slices have numbers; pass one from 0 to {SLICES - 1}")
        return int(given) % SLICES
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return int(done.stdout[:8], 16) % SLICES if done.returncode == 0 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _spent
    start = time.monotonic()
    result = yield
    if item.stash.get(IN_SLICE, False):
        _spent += time.monotonic() - start
    return result


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.stash.get(IN_SLICE, False) and _spent > SLICE_SECONDS:
        pytest.skip(f"the {SLICE_SECONDS} seconds of the weekly slice are over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and item.stash.get(IN_SLICE, False):
        report.sections.append(("a weekly test", f"again: WEEKLY=1 python -m pytest '{item.nodeid}'"))
    return report
