"""Select the tests of a run: `make test` runs few, FULL=1 more, and WEEKLY=1 all.

The usual run leaves out tests marked `full`, and only the weekly run has all tests marked `weekly`. A test marked
`cases(usual=3, full=10)` has that many of its cases in these runs, evenly spread. Several `parametrize` decorators on
one test make a product: FULL has every two values together, and the usual run has each value at least once. The usual
run is a subset of FULL. A FULL run also has one slice of the weekly tests, which the commit's hash chooses, so that all
of them run over time.
"""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import combinations
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


def tier() -> Tier:
    """Return the kind of run that the environment variables WEEKLY and FULL ask for. WEEKLY includes FULL."""
    for name in ("WEEKLY", "FULL"):
        value = os.environ.get(name, "")
        if value not in ("", "1"):
            raise pytest.UsageError(f"{name}={value!r}; pass {name}=1, or leave it out")
        if value:
            return Tier[name]
    return Tier.USUAL


def covering(rows: Sequence[tuple], strength: int = 2, start: Iterable[int] = ()) -> list[int]:
    """Return the indices of few rows that contain every combination of `strength` values that occurs in any row.

    Greedy: takes the first row with the most combinations that are still missing. The same rows give the same result.

    Args:
        rows: tuples of equal length, of values that are hashable.
        strength: of how many columns the values are combined; 1 has each value in a row.
        start: places of rows to include in any case.
    """
    meetings = {at: set(combinations(enumerate(row), min(strength, len(row)))) for at, row in enumerate(rows)}
    chosen = list(start)
    missing = set().union(*meetings.values()).difference(*(meetings.pop(at) for at in chosen))
    while missing:
        best = max(meetings, key=lambda at: len(meetings[at] & missing))
        chosen.append(best)
        missing -= meetings.pop(best)
    return sorted(chosen)


def rows_of(now: Tier, rows: Sequence[tuple], strength: int = Tier.FULL) -> list[int]:
    """Return the indices of the rows of a product that are in a run.

    Args:
        rows: see `covering`.
        strength: of the covering that FULL has.
    """
    if now is Tier.WEEKLY:
        return list(range(len(rows)))
    usual = covering(rows, Tier.USUAL)
    return usual if now is Tier.USUAL else covering(rows, strength, usual)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs with FULL=1 or WEEKLY=1")
    config.addinivalue_line("markers", "cases(usual=None, full=None): how many cases these runs have; None: all")
    config.addinivalue_line("markers", "weekly(in_slices=True): runs with WEEKLY=1, and in a slice of FULL=1")


def pytest_report_header() -> str:
    now = tier()
    if now is not Tier.FULL:
        return f"run: {now.name.lower()}"
    number = slice_number()
    if number is None:
        return "run: full, without a slice of the weekly tests: git does not tell a commit; SLICE=0 to 23 chooses one"
    return f"run: full, with slice {number % SLICES} of {SLICES} of the weekly tests (SLICE={number})"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of longer runs, unless the command line names them, and put those of the slice last."""
    for item in items:
        _check_marks(item)
    now, named = tier(), _named(config)
    if now is Tier.WEEKLY:
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    chosen = {item.nodeid for same in functions.values() for item in _thinned(same, now)}
    chosen |= {item.nodeid for item in items if f"{item.nodeid}[".startswith(named)}
    kept = [item for item in items if item.nodeid in chosen]
    if now is Tier.FULL:
        part = _slice([item for item in items if item.nodeid not in chosen])
        for item in part:
            item.stash[IN_SLICE] = True
        kept += part
    ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = kept


def _named(config: pytest.Config) -> tuple[str, ...]:
    """Return how the ids of the tests begin that the command line names, as path::name or path::name[case]."""
    found = []
    for argument in config.args:
        path, colons, rest = argument.partition("::")
        if colons:
            path = os.path.relpath(config.invocation_params.dir / path, config.rootpath).replace(os.sep, "/")
            found += [f"{path}::{rest}[", f"{path}::{rest}::"]  # of a function, and of a class
    return tuple(found)


def _check_marks(item: pytest.Item) -> None:
    """Raise pytest.UsageError for a mark whose arguments are invalid or would be ignored."""
    for mark in item.iter_markers():
        problem = None
        if mark.name == "full" and (mark.args or mark.kwargs):
            problem = "takes no arguments"
        if mark.name == "weekly" and (mark.args or mark.kwargs not in ({}, {"in_slices": False})):
            problem = "takes in_slices=False or nothing"
        if mark.name == "cases":
            usual, full = mark.kwargs.get("usual", 0), mark.kwargs.get("full", 1 << 30)
            known = not mark.args and mark.kwargs and mark.kwargs.keys() <= {"usual", "full"}
            if not (known and type(usual) is type(full) is int and 0 <= usual <= full > 0):
                problem = "takes usual= and full=, of which usual is not more and full not 0"
        if problem:
            raise pytest.UsageError(f"{item.nodeid}: {mark.name}{mark.args or mark.kwargs}, but this mark {problem}")


def _thinned(items: list[pytest.Item], now: Tier) -> list[pytest.Item]:
    """Return the tests of one function that a run has: a covering of its parameters, or as many as its marks say."""
    items = [item for item in items if not item.get_closest_marker("weekly")]
    usual = _covered([item for item in items if not item.get_closest_marker("full")], Tier.USUAL)
    full = _limited(_covered(items, Tier.FULL, usual), "full")
    return full if now is Tier.FULL else _limited([item for item in full if item in usual], "usual")


def _limited(items: list[pytest.Item], run: str) -> list[pytest.Item]:
    """Return as many tests as their mark `cases` allows, evenly spread."""
    mark = items[0].get_closest_marker("cases") if items else None
    count = min(mark.kwargs.get(run, len(items)), len(items)) if mark else len(items)
    return [items[i * len(items) // count] for i in range(count)]


def _covered(items: list[pytest.Item], strength: int, start: Collection[pytest.Item] = ()) -> list[pytest.Item]:
    """Return a covering of a product, without tests that are skipped.

    The arguments of one `parametrize` are one dimension: a list of cases is not thinned.
    """
    able = [item for item in items if not _is_skipped(item)]
    rows = [_values(item) for item in able if hasattr(item, "callspec")]
    if len(rows) < len(able) or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return items
    return [able[at] for at in covering(rows, strength, [at for at, item in enumerate(able) if item in start])]


def _values(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates of a test in the product of its function: one for each `parametrize` mark.

    The parameters of fixtures are one more, together. A coordinate is the identity of values, which need not be
    hashable.
    """
    parameters, dimensions = item.callspec.params, []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        dimensions.append([name.strip() for name in names.split(",")] if isinstance(names, str) else list(names))
    others = [name for name in parameters if not any(name in names for names in dimensions)]
    return tuple(tuple(id(parameters[name]) for name in names) for names in (*dimensions, others) if names)


def _is_skipped(item: pytest.Item) -> bool:
    conditions = (mark.args[0] if mark.args else True for mark in item.iter_markers() if mark.name == "skipif")
    return item.get_closest_marker("skip") is not None or any(one is True for one in conditions)


# --- the slice of the weekly run ---

IN_SLICE = pytest.StashKey[bool]()
_spent = 0.0


def slice_number() -> int | None:
    """Return the number that chooses a slice: SLICE of the environment, or of the commit; None outside of git."""
    given = os.environ.get("SLICE")
    if given:
        if not given.isdecimal():
            raise pytest.UsageError(f"SLICE={given!r}, but slices have numbers; pass one from 0 to {SLICES - 1}")
        return int(given)
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return int(done.stdout[:4], 16) if done.returncode == 0 else None


def _slice(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the commit's slice. Commits begin at different tests, as its time may end before the last."""
    number = slice_number()
    if number is None:
        return []
    part = [
        item
        for item in items
        if zlib.crc32(item.nodeid.encode()) % SLICES == number % SLICES
        and all(mark.kwargs.get("in_slices", True) for mark in item.iter_markers() if mark.name == "weekly")
    ]
    start = number // SLICES % max(len(part), 1)
    return part[start:] + part[:start]


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
