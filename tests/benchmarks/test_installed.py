"""Tests of the installed benchmarks, without a checkout, and of the messages if one is missing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import partbench
from partbench.compiled_kernels import __main__ as compiled_kernels
from partbench.gpu import __main__ as gpu
from partbench.measuring import machine
from partbench.paper import __main__ as paper

ROOT = Path(__file__).parents[2]


def test_the_commit_of_another_project_around_an_installation_is_not_taken_for_ours(tmp_path, monkeypatch):
    commands = ["init", "add .", "-c user.name=a -c user.email=a@b commit --quiet --message theirs"]
    (tmp_path / "theirs").touch()
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() == ("unknown", False)
    (tmp_path / "csrc").mkdir()
    assert re.fullmatch("[0-9a-f]{40}", machine.commit()[0])


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (gpu.main, [], "run `make gpu` in the root of one"),
        (paper.main, ["page"], "There is no docs/paper.md and no benchmarks/results/paper; run this in the root"),
        (compiled_kernels.main, ["--out", "table.md"], "compiling csrc needs a checkout"),
    ],
)
def test_commands_that_need_a_checkout_exit_with_a_message(main, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiled_kernels.cuda, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert message in capsys.readouterr().err + str(end.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named_with_the_extra_that_brings_it():
    with pytest.raises(ImportError, match=r"no_such_library is missing; .* extra 'bench'"), partbench.needing("bench"):
        import no_such_library.part  # noqa: F401
    with pytest.raises(ModuleNotFoundError), partbench.needing("bench"):
        import partkernels.no_such_module  # noqa: F401
