"""A selection of the tests of a run: `make test` runs few, FULL=1 more, and WEEKLY=1 all.

The usual run leaves out tests marked `full`, and only the weekly run has all tests marked `weekly`. A test marked
`cases(usual=3, full=10)` has that many of its cases in these runs, evenly spread. Several `parametrize` decorators on
one test make a product: FULL combines every two values, and the usual run has each value at least once. The usual run
is a subset of FULL. A FULL run also has one slice of the weekly tests, chosen by the commit's hash, so that all of them
run over time.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

ROOT = Path(__file__).parents[1]
# After SLICE_SECONDS in a process, the remaining tests of the slice are skipped.
SLICES = 24
SLICE_SECONDS = 300


# The error in a test's marks.
PROBLEM = pytest.StashKey[str]()


class Tier(IntEnum):
    """A kind of run. Its number is the strength of the covering that products are reduced to; weekly runs have all."""

    USUAL = 1
    FULL = 2
    WEEKLY = 3


def tier() -> Tier:
    """Return the kind of run that the environment variables WEEKLY and FULL select. WEEKLY includes FULL."""
    for name in ("WEEKLY", "FULL"):
        value = os.environ.get(name, "")
        if value not in ("", "1"):
            raise pytest.UsageError(f"{name}={value!r}; pass {name}=1, or leave it out")
        if value:
            return Tier[name]
    return Tier.USUAL


def covering(rows: Sequence[tuple], strength: int = 2, start: Iterable[int] = ()) -> list[int]:
    """Return the indices of few rows that contain every combination of `strength` values that occurs in any row.

    The search is greedy and deterministic: it takes the row with the most missing combinations, and in a tie the row
    with the values that have been taken least often.

    Args:
        rows: tuples of equal length with hashable values.
        strength: the number of columns to combine; with 1, each value occurs in a row.
        start: indices of rows to include in any case.

    Returns:
        The indices in the order of choice, those of `start` first.
    """
    meetings = {at: set(combinations(enumerate(row), min(strength, len(row)))) for at, row in enumerate(rows)}
    missing, chosen, taken = set().union(*meetings.values()), [], Counter()

    def take(at: int) -> None:
        chosen.append(at)
        missing.difference_update(meetings.pop(at))
        taken.update(enumerate(rows[at]))

    for at in start:
        take(at)
    while missing:
        take(
            max(meetings, key=lambda at: (len(meetings[at] & missing), -sum(taken[one] for one in enumerate(rows[at]))))
        )
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: runs with FULL=1 or WEEKLY=1")
    config.addinivalue_line("markers", "cases(usual, full): how many cases these runs have at most")
    config.addinivalue_line("markers", "weekly(in_slices=True): runs with WEEKLY=1, and in a slice of FULL=1")
    if tier() is Tier.FULL:
        slice_number()
    elif os.environ.get("SLICE"):
        raise pytest.UsageError("SLICE chooses a part of the weekly tests for FULL=1; add FULL=1, or leave SLICE out")


def pytest_report_header() -> str:
    now = tier()
    if now is not Tier.FULL:
        return f"run: {now.name.lower()}"
    number = slice_number()
    if number is None:
        return "run: full, without a slice of the weekly tests: git reports no commit; SLICE=0 to 23 chooses a slice"
    return f"run: full, with slice {number % SLICES} of {SLICES} of the weekly tests (SLICE={number})"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of longer runs, unless the command line names them, and put those of the slice last."""
    for item in items:
        if problem := _problem(item):
            item.stash[PROBLEM] = f"{item.nodeid}: {problem}"
    now, named = tier(), _named(config)
    if now is Tier.WEEKLY:
        return
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    chosen = {item.nodeid for same in functions.values() for item in _thinned(same, now)}
    chosen |= {item.nodeid for item in items if PROBLEM in item.stash or f"{item.nodeid}[".startswith(named)}
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
    """Return the prefixes of the ids of tests that the command line names as path::name or path::name[case]."""
    found = []
    for argument in config.args:
        path, colons, rest = argument.partition("::")
        if colons:
            path = os.path.relpath(config.invocation_params.dir / path, config.rootpath).replace(os.sep, "/")
            found += [f"{path}::{rest}[", f"{path}::{rest}::"]  # prefixes for a function and for a class
    return tuple(found)


def _problem(item: pytest.Item) -> str | None:
    """Return a message if the arguments of a test's marks are invalid or would be ignored; otherwise None."""
    of_case = item.callspec.marks if hasattr(item, "callspec") else []
    of_function = [mark for mark in item.iter_markers() if mark not in of_case]
    names = [mark.name for mark in of_function]
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
                problem = "takes usual= and full= with 0 <= usual <= full and full > 0"
            elif mark in of_case or names.count("cases") > 1:
                problem = "belongs on a function, once"
            elif "weekly" in names or ("full" in names and "usual" in mark.kwargs):
                problem = "changes nothing beside weekly, and usual= nothing beside full"
        if problem:
            return f"{mark.name}{mark.args or mark.kwargs}, but this mark {problem}"
    return None


def _thinned(items: list[pytest.Item], now: Tier) -> list[pytest.Item]:
    """Return one function's tests in a run: a covering of its parameters, with at most as many as its marks allow."""
    mark = items[0].get_closest_marker("cases")
    limits = mark.kwargs if mark and PROBLEM not in items[0].stash else {}
    items = [item for item in items if not item.get_closest_marker("weekly")]
    usual = [item for item in items if not item.get_closest_marker("full")]
    usual = _chosen(usual, Tier.USUAL, limits.get("usual", limits.get("full")))
    return usual if now is Tier.USUAL else _chosen(items, Tier.FULL, limits.get("full"), usual)


def _chosen(
    items: list[pytest.Item], strength: int, most: int | None, start: Sequence[pytest.Item] = ()
) -> list[pytest.Item]:
    """Return a covering of a product without skipped tests, or all tests of a list of cases.

    Each `parametrize` is one dimension; a list of cases has only one.

    Args:
        items: tests of one function.
        strength: the strength of the covering.
        most: the maximal number of tests, which are spread evenly.
        start: tests to include in any case.
    """
    rest = [item for item in items if item not in start]
    count = len(items) if most is None else max(min(most, len(items)) - len(start), 0)
    spread = rest if count >= len(rest) else [rest[i * len(rest) // count] for i in range(count)]
    in_turn = dict.fromkeys([*start, *spread, *rest])  # a covering prefers the first of equally good tests
    able = [item for item in in_turn if hasattr(item, "callspec") and not evaluate_skip_marks(item)]
    rows = [tuple(item.callspec._idlist) for item in able]
    if not rows or len({len(row) for row in rows}) > 1 or len(rows[0]) < 2:
        return [*start, *spread]
    places = covering(rows, strength, [at for at, item in enumerate(able) if item in start])
    return [able[at] for at in places[:most]]


# --- the slice of the weekly run ---

IN_SLICE = pytest.StashKey[bool]()
_spent = 0.0


def slice_number() -> int | None:
    """Return the number that chooses a slice, from SLICE or the commit's hash; None outside a git repository."""
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
    """Return the tests of the commit's slice, starting at a different test in each commit: its time may run out."""
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
    if PROBLEM in item.stash:
        pytest.fail(item.stash[PROBLEM], pytrace=False)
    if item.stash.get(IN_SLICE, False) and _spent > SLICE_SECONDS:
        pytest.skip(f"the {SLICE_SECONDS} seconds of the weekly slice are over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed and item.stash.get(IN_SLICE, False):
        report.sections.append(("a weekly test", f"again: WEEKLY=1 python -m pytest {shlex.quote(item.nodeid)}"))
    return report
