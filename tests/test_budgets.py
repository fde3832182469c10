"""Each folder's processor time is reported beside its budget, and a complete run in CI fails if it is far above."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import budgets
import pytest
from budgets import CHILDREN, COLLECTION, REFERENCE, SLICE, Meter, Report, folder_of, report
from processes import run_python
from tiers import IN_SLICE, Tier

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/partnets/nn/test_norms.py::test_one[a/b-c]", "tests/partnets/nn"),
        ("tests/partnets/test_devices.py::test_one", "tests/partnets"),
        ("tests/partkernels/test_fuzz.py::test_one", "tests/partkernels"),
        ("tests/test_readme.py::test_one[docs/method.md]", "tests"),
        ("python_api/partnets/nn/linear.py::partnets.nn.linear.Linear", "python_api, docstrings"),
    ],
)
def test_which_folder_pays(nodeid, folder):
    assert folder_of(nodeid) == folder


def test_a_folder_may_take_half_again_as_much_as_its_budget_and_a_minute():
    seconds = {"tests/a": 299.0, "tests/b": 301.0, "tests/new": 61.0, "tests/small": 69.0}
    lines, over = report(seconds, {"tests/a": 200, "tests/b": 200, "tests/small": 10, "tests/none": 1000})
    assert lines[0].split() == ["301.0", "of", "200", "s", "tests/b"]
    assert lines[-1].split() == ["730.0", "of", "410", "s", "in", "all"]
    assert [sentence.split()[0] for sentence in over] == ["tests/b", "tests/new", "in"]
    assert "took 301 s of processor time and may take 200" in over[0]


@pytest.mark.parametrize("tier", [Tier.USUAL, Tier.FULL])
def test_every_folder_of_tests_has_a_budget_and_no_other(tier):
    files = [*ROOT.glob("tests/**/test_*.py")]
    folders = {folder_of(path.relative_to(ROOT).as_posix()) for path in files}
    folders |= {f"{name}, docstrings" for name in ("benchmarks", "numpy_api", "partkernels", "python_api")}
    more = {COLLECTION, CHILDREN} | ({SLICE} if tier is Tier.FULL else set())
    assert json.loads(budgets.FILE.read_text())[tier.name.lower()].keys() == folders | more


class Clock:
    """Simulated processor time. The reference loop takes twice as long as on the reference machine."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.children = 100.0, 0.0
        monkeypatch.setattr(budgets, "processor_seconds", lambda: (self.now, self.children))
        monkeypatch.setattr(budgets, "reference_loop", lambda: 2 * REFERENCE)

    def run(self, meter: Meter, nodeid: str, seconds: float, *, children: float = 0.0, in_slice: bool = False) -> None:
        item = SimpleNamespace(nodeid=nodeid, stash=pytest.Stash())
        item.stash[IN_SLICE] = in_slice
        protocol = meter.pytest_runtest_protocol(item)
        next(protocol)
        self.now += seconds
        self.children += children
        with pytest.raises(StopIteration):
            protocol.send(None)


def finished(
    meter, monkeypatch, *, args_source=pytest.Config.ArgsSource.TESTPATHS, keyword="", ci="true", allowed=None
):
    """Return the exit status and the report of a run with the meter's times."""
    monkeypatch.setenv("CI", ci)
    allowed = {"tests": 60.0, COLLECTION: 5.0} if allowed is None else allowed
    monkeypatch.setattr(budgets, "budgets", lambda: allowed)
    config = SimpleNamespace(args_source=args_source, option=SimpleNamespace(keyword=keyword, markexpr=""))
    session, printed, one = SimpleNamespace(config=config, exitstatus=0), [], Report(meter)
    one.pytest_sessionfinish(session)
    terminal = SimpleNamespace(section=printed.append, write_line=lambda line, **_: printed.append(line))
    one.pytest_terminal_summary(terminal, config)
    return session.exitstatus, "\n".join(printed)


def test_times_are_scaled_to_the_reference_machine_and_a_run_that_is_over_fails_in_ci(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter()
    clock.now += 8
    meter.pytest_collection_finish()
    clock.run(meter, "tests/test_readme.py::test_one", 200)
    clock.run(meter, "tests/test_names.py::test_two", 30)
    status, printed = finished(meter, monkeypatch)
    assert status == 0 and "115.0 of    60 s  tests\n" in printed and f"4.0 of     5 s  {COLLECTION}" in printed
    clock.run(meter, "tests/test_names.py::test_three", 20)
    assert finished(meter, monkeypatch)[0] == 1
    assert "tests took 125 s of processor time and may take 60" in finished(meter, monkeypatch)[1]
    assert finished(meter, monkeypatch, ci="")[0] == 0
    assert finished(meter, monkeypatch, keyword="names")[0] == 0
    assert finished(meter, monkeypatch, args_source=pytest.Config.ArgsSource.ARGS)[0] == 0


def test_times_are_scaled_by_the_speed_at_that_time(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter()
    meter.pytest_collection_finish()
    clock.run(meter, "tests/test_names.py::test_one", 10)
    monkeypatch.setattr(budgets, "EVERY", 0)
    clock.run(meter, "tests/test_names.py::test_two", 10)
    assert meter.scaled()["tests"] == 20 / 2
    monkeypatch.setattr(budgets, "reference_loop", lambda: 4 * REFERENCE)  # another program slows the machine down
    clock.run(meter, "tests/test_names.py::test_three", 30)
    assert meter.scaled()["tests"] == 20 / 2 + 30 / 3
    clock.run(meter, "tests/test_names.py::test_four", 40)
    assert meter.scaled()["tests"] == 20 / 2 + 30 / 3 + 40 / 4


def test_a_run_without_budgets_is_not_over(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter()
    meter.pytest_collection_finish()
    clock.run(meter, "tests/test_names.py::test_one", 500)
    status, printed = finished(meter, monkeypatch, allowed={})
    assert status == 0 and "  250.0 s  tests\n" in printed
    assert finished(meter, monkeypatch)[0] == 1


def test_processes_and_the_weekly_slice_are_booked_apart(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter()
    clock.run(meter, "tests/test_names.py::test_one", 2, children=5)
    clock.run(meter, "tests/test_names.py::test_two", 3, children=4, in_slice=True)
    assert meter.seconds == {"tests": 2, CHILDREN: 5, SLICE: 7}


def test_the_time_of_processes_that_are_forked_counts():
    before = budgets.processor_seconds()[1]
    run_python("-c", "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
    assert 0.4 <= budgets.processor_seconds()[1] - before < 5


def test_workers_send_their_meters(monkeypatch):
    monkeypatch.setattr(budgets, "budgets", lambda: {"tests": 60.0})
    one = Report(None)
    for seconds in (40.0, 45.0):
        one.pytest_testnodedown(SimpleNamespace(workeroutput={"seconds": {"tests": seconds}}))
    one.pytest_testnodedown(SimpleNamespace())  # a worker that crashed
    assert one.seconds == {"tests": 85.0}
