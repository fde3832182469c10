"""A report of the processor time of each folder of tests beside its budget.

budgets.json has the seconds of each kind of run on the reference machine: two cores of an AMD EPYC (Zen 3), on which
`reference_loop` takes REFERENCE seconds. Times on any other machine are scaled by the time of the loop just before and
after. If the environment variable CI is set, a complete run fails when a folder, or all of them, take more than one and
a half times the budget and a minute more than it. To add tests to a full folder, move others to a longer run or make
them faster. The weekly run has no budget. The weekly slice of a FULL run is counted separately.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import seconds_spent
from tiers import IN_SLICE, tier

FILE = Path(__file__).with_name("budgets.json")
# Seconds of reference_loop on the reference machine with both cores busy, and seconds between two measurements.
# The loop is measured repeatedly because other programs may slow the machine down for a while.
REFERENCE, EVERY = 0.25, 20
# The factor of a budget, and the seconds above it, both of which a folder must exceed to fail the run.
ALLOWED, SLACK = 1.5, 60
COLLECTION = "imports and collection"
# The time of child processes is known only after they end, possibly during another folder's tests.
CHILDREN = "processes that tests start"
SLICE = "the slice of the weekly run"
ALL = "in all"


def reference_loop() -> float:
    """Return the processor seconds of a fixed workload that resembles the tests: Python code and small tensors."""
    start = time.process_time()
    x, total = torch.linspace(0, 1, 4096).view(64, 64), 0
    for i in range(8000):
        total += sum(i % k for k in range(1, 60))
        x = torch.nn.functional.relu(x @ x.t() / 40).clone()
    return time.process_time() - start


def folder_of(nodeid: str) -> str:
    """Return the folder that a test's time is charged to: tests/partnets/NAME, tests/NAME, or a docstring's package."""
    parts = nodeid.partition("::")[0].split("/")
    if parts[0] != "tests":
        return f"{parts[0]}, docstrings"
    return "/".join(parts[: 3 if parts[1] == "partnets" else 2][: len(parts) - 1])


def processor_seconds() -> tuple[float, float]:
    """Return the processor time of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system + seconds_spent()


def report(seconds: Mapping[str, float], budgets: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and a sentence for each folder that is far over its budget.

    Args:
        seconds: processor seconds of each folder, scaled to the reference machine.
        budgets: budget of each folder; empty for the weekly run. A folder without a budget counts as over budget.
    """
    lines, over = [], []
    rows = [(folder, seconds[folder], budgets.get(folder, 0.0)) for folder in seconds]
    rows.sort(key=lambda row: row[1], reverse=True)
    rows.append((ALL, sum(seconds.values()), sum(budgets[folder] for folder in seconds if folder in budgets)))
    for folder, spent, budget in rows:
        lines.append(f"{spent:8.1f} of {budget:5.0f} s  {folder}" if budgets else f"{spent:8.1f} s  {folder}")
        if spent > max(ALLOWED * budget, budget + SLACK):
            over.append(
                f"{folder} took {spent:.0f} s of processor time and may take {budget:.0f}:"
                " move tests to a longer run, or make them faster"
            )
    return lines, over


class Meter:
    """The processor time of a run's tests in one process: a pytest-xdist worker, or the main process."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()  # as measured, since the last calibration
        self._scaled: Counter[str] = Counter()
        self._loop = 0.0
        self._last, self._measured = processor_seconds(), time.monotonic()

    def spend(self, folder: str) -> None:
        """Add the time since the last call to a folder."""
        now = processor_seconds()
        self.seconds[folder] += now[0] - self._last[0]
        self.seconds[SLICE if folder == SLICE else CHILDREN] += now[1] - self._last[1]
        self._last = now

    def calibrate(self) -> None:
        """Scale the time since the last calibration by the machine's speed then and now. No folder pays for this."""
        loop = reference_loop()
        scale = 2 * REFERENCE / (loop + (self._loop or loop))
        self._scaled.update({folder: seconds * scale for folder, seconds in self.seconds.items()})
        self.seconds.clear()
        self._loop = loop
        self._last, self._measured = processor_seconds(), time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.spend(COLLECTION)
        self.calibrate()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        result = yield
        self.spend(SLICE if item.stash.get(IN_SLICE, False) else folder_of(item.nodeid))
        if time.monotonic() > self._measured + EVERY:
            self.calibrate()
        return result

    def scaled(self) -> Counter[str]:
        """Return each folder's seconds on the reference machine; nothing before the first calibration."""
        if self._loop and self.seconds:
            self.calibrate()
        return self._scaled


class Report:
    """A plugin that collects the meters of all processes, prints the table and fails a run that is over budget."""

    def __init__(self, meter: Meter | None) -> None:
        self.meter = meter
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.meter is not None:
            self.seconds.update(self.meter.scaled())
        if self.over(session.config) and os.environ.get("CI") and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def over(self, config: pytest.Config) -> list[str]:
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        is_whole = is_whole and not (config.option.keyword or config.option.markexpr)
        allowed = budgets()
        # A slice has its own time limit, and the collection time grows with the number of processes.
        folders = {folder: seconds for folder, seconds in self.seconds.items() if folder not in (SLICE, COLLECTION)}
        return report(folders, allowed)[1] if is_whole and allowed else []

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if sum(self.seconds.values()) < 60:  # a developer runs a few tests
            return
        lines, _ = report(self.seconds, budgets())
        terminalreporter.section("processor time, on the reference machine, and budgets")
        for line in lines:
            terminalreporter.write_line(line)
        for line in self.over(config):
            terminalreporter.write_line(line, red=True, bold=True)


def budgets() -> dict[str, float]:
    """Return the budgets of the current kind of run; empty for the weekly run."""
    return json.loads(FILE.read_text()).get(tier().name.lower(), {})


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    distributes = bool(getattr(config.option, "numprocesses", None)) and not is_worker
    meter = None if distributes else Meter()
    if meter is not None:
        config.pluginmanager.register(meter, "meter")
    if is_worker:
        config.pluginmanager.register(_Sender(config, meter), "meter's sender")
    else:
        config.pluginmanager.register(Report(meter), "budgets' report")


class _Sender:
    """A plugin that sends a worker's meter to the process that started the worker."""

    def __init__(self, config: pytest.Config, meter: Meter) -> None:
        self.config, self.meter = config, meter

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput["seconds"] = dict(self.meter.scaled())
