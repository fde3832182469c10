"""Each folder's processor time is reported, and a complete run in CI fails if it exceeds its limit."""

from __future__ import annotations

from types import SimpleNamespace

import budgets
import pytest
from budgets import SECONDS, Meter, Report, folder_of
from processes import run_python


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
def test_a_tests_time_belongs_to_its_folder(nodeid, folder):
    assert folder_of(nodeid) == folder


def test_times_are_scaled_to_the_reference_machine(monkeypatch):
    now, loop, found = 100.0, 2 * budgets.REFERENCE, []
    monkeypatch.setattr(budgets, "processor_seconds", lambda: now)
    monkeypatch.setattr(budgets, "reference_loop", lambda: loop)
    monkeypatch.setattr(budgets, "EVERY", 0)
    meter = Meter()
    now = 110.0  # imports and collection
    meter.pytest_collection_finish()
    for seconds in (30, 40):
        now += seconds
        report = SimpleNamespace(user_properties=[])
        hook = meter.pytest_runtest_makereport(SimpleNamespace(when="teardown"))
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)
        found += report.user_properties
        loop = 4 * budgets.REFERENCE  # another program slows the machine down
    assert found == [(SECONDS, 15), (SECONDS, 10)]


@pytest.mark.parametrize(
    ("ci", "seconds", "changes", "status"),
    [
        ("true", budgets.USUAL + 1, {}, pytest.ExitCode.TESTS_FAILED),
        ("true", budgets.USUAL - 1, {}, 0),
        ("", budgets.USUAL + 1, {}, 0),
        ("true", budgets.USUAL + 1, {"keyword": "names"}, 0),
        ("true", budgets.USUAL + 1, {"args_source": pytest.Config.ArgsSource.ARGS}, 0),
    ],
)
def test_a_complete_run_in_ci_fails_beyond_its_limit(ci, seconds, changes, status, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("FULL", raising=False)
    one, printed = Report(), []
    for when, time in (("call", 7.0), ("teardown", seconds - 40.0), ("teardown", 40.0)):
        properties = [(SECONDS, time)] if when == "teardown" else []
        nodeid = "tests/test_names.py::test_one"
        one.pytest_runtest_logreport(SimpleNamespace(when=when, nodeid=nodeid, user_properties=properties))
    given = {"args_source": pytest.Config.ArgsSource.TESTPATHS, "keyword": "", "markexpr": ""} | changes
    config = SimpleNamespace(args_source=given.pop("args_source"), option=SimpleNamespace(**given))
    session = SimpleNamespace(config=config, exitstatus=0)
    one.pytest_sessionfinish(session)
    assert session.exitstatus == status
    terminal = SimpleNamespace(section=printed.append, write_line=lambda line, **_: printed.append(line))
    one.pytest_terminal_summary(terminal)
    assert printed[1].split() == [f"{seconds}.0", "tests"] and printed[-1].split()[0] == f"{seconds}.0"


def test_the_time_of_processes_that_are_forked_counts():
    before = budgets.processor_seconds()
    run_python("-c", "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
    assert 0.4 <= budgets.processor_seconds() - before < 5
