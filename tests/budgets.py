"""A report of the processor time of each folder of tests, and a limit of the whole.

Times are scaled to the reference machine, two cores of an AMD EPYC (Zen 3), by the time of `reference_loop`. If the
environment variable CI is set, a complete run that exceeds its limit fails: make tests faster, or move them to FULL.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest
import torch
from processes import seconds_spent
from tiers import is_full

# Processor seconds of all tests on the reference machine, without imports and collection.
USUAL, FULL = 450, 3000
# Seconds of reference_loop on the reference machine with both cores busy, and seconds between two measurements: other
# programs may slow the machine down for a while.
REFERENCE, EVERY = 0.25, 20
SECONDS = "processor seconds on the reference machine"


def reference_loop() -> float:
    """Return the processor seconds of a fixed workload that resembles the tests: Python code and small tensors."""
    start = time.process_time()
    x, total = torch.linspace(0, 1, 4096).view(64, 64), 0
    for i in range(8000):
        total += sum(i % k for k in range(1, 60))
        x = torch.nn.functional.relu(x @ x.t() / 40).clone()
    return time.process_time() - start


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4]) + seconds_spent()


def folder_of(nodeid: str) -> str:
    """Return the folder of a test: tests/partnets/NAME, tests/NAME, or the root package of a docstring."""
    parts = nodeid.partition("::")[0].split("/")
    if parts[0] != "tests":
        return f"{parts[0]}, docstrings"
    return "/".join(parts[: 3 if parts[1] == "partnets" else 2][: len(parts) - 1])


class Meter:
    """A plugin that notes in each test's report the processor time since the report before."""

    def __init__(self) -> None:
        self._scale, self._measured, self._last = 1.0, float("-inf"), processor_seconds()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._last = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Any:
        report = yield
        if call.when == "teardown":
            spent = processor_seconds() - self._last
            if time.monotonic() > self._measured + EVERY:
                self._scale, self._measured = REFERENCE / reference_loop(), time.monotonic()
            report.user_properties.append((SECONDS, spent * self._scale))
            self._last = processor_seconds()
        return report


class Report:
    """A plugin that adds up the times of all processes, prints them, and fails a run that exceeds its limit."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds[folder_of(report.nodeid)] += dict(report.user_properties).get(SECONDS, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        is_whole = is_whole and not (config.option.keyword or config.option.markexpr)
        if is_whole and self.is_over() and os.environ.get("CI") and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def is_over(self) -> bool:
        return self.seconds.total() > (FULL if is_full() else USUAL)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.seconds.total() < 60:  # a developer runs a few tests
            return
        terminalreporter.section(SECONDS)
        for folder, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {folder}")
        limit = FULL if is_full() else USUAL
        said = f"{self.seconds.total():8.1f}  in all, of {limit}"
        terminalreporter.write_line(said, red=self.is_over(), bold=self.is_over())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(), "meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(), "times")
