"""Processes that run_python forks behave like those that subprocess starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import run_python

PROGRAM = "import os, sys; print(sys.argv[1:], os.environ.get('GIVEN'), __name__); sys.exit(len(sys.argv))"


@pytest.fixture
def module(tmp_path):
    (tmp_path / "some.py").write_text(PROGRAM)
    return tmp_path / "some.py"


@pytest.mark.parametrize("how", ["-c", "-m", "path"])
def test_a_program_gives_the_output_and_status_of_subprocess(how, module):
    command = {"-c": ["-c", PROGRAM], "-m": ["-m", "some"], "path": [module]}[how]
    environment = os.environ | {"GIVEN": "a value", "PYTHONPATH": str(module.parent)}
    found = run_python(*command, "one", "two", environment=environment)
    expected = subprocess.run([sys.executable, *command, "one", "two"], env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (3, expected.stdout, expected.stderr)


def test_forked_processes_have_imported_torch_and_not_the_tested_packages():
    code = "import sys; print('torch' in sys.modules, {'partkernels', 'partnets', 'triton'} & {*sys.modules})"
    assert run_python("-c", code).stdout.split() == ["True", "set()"]


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import sys; sys.exit('gone')", 1, "gone"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, ""),
    ],
)
def test_failures_are_reported(code, status, message):
    found = run_python("-c", code)
    assert found.returncode == status and message in found.stderr
    with pytest.raises(subprocess.CalledProcessError):
        run_python("-c", code, check=True)


def test_a_program_that_does_not_end_is_ended():
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_python("-c", "import time; print('begun', flush=True); time.sleep(60)", timeout=2)
    assert error.value.output == "begun\n"


def test_environment_variables_that_python_reads_at_startup_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="PYTHONHASHSEED cannot change in a process that is forked"):
        run_python("-c", "", environment=os.environ | {"PYTHONHASHSEED": "3"})
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="PYTHONWARNINGS cannot change"):
        patch.setenv("PYTHONWARNINGS", "error")
        run_python("-c", "")
