"""Tests of `make gpu` with simulated steps: one that fails, hangs or is killed does not affect the others' results."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pairwise import pairwise
from simulated import results, workload

from partbench.cli import _parser
from partbench.gpu import __main__, summary
from partbench.gpu import steps as running
from partbench.gpu.steps import Step, steps

ROOT = Path(__file__).parents[2]
NAMES = [step.name for step in steps(Path("out"))]
# Steps differ only in their place.
SOME = [NAMES[0], "smoke", NAMES[-1]]
# The most files and bytes that come back from such a machine.
FILES, BYTES = 8, 16 << 20


@pytest.fixture
def played(tmp_path, monkeypatch) -> Callable[..., int]:
    """Return a function that runs all steps as `true`, in a second each at most, except one with another program."""

    def play(fault: str = "", program: str = "exit 3") -> int:
        def planned(out: Path) -> list[Step]:
            plays = {fault: ("sh", "-c", program)}
            return [
                dataclasses.replace(step, command=plays.get(step.name, ("true",)), seconds=0.5) for step in steps(out)
            ]

        monkeypatch.setattr(__main__, "steps", planned)
        monkeypatch.setattr(running, "FAREWELL", 0.2)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        return __main__.main(["--out", str(tmp_path)])

    return play


def states(out: Path) -> dict[str, str]:
    """Return the state of each step in the summary."""
    lines = (out / "summary.md").read_text().splitlines()
    assert len(lines) <= summary.LINES
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {row[0]: row[3] for row in rows if row[0] in NAMES}


def living(group: int) -> list[str]:
    """Return the names of a group's processes in /proc, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group, *_ = rest.split()
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


def test_nothing_imports_pytorch_that_runs_the_steps():
    program = "import sys, partbench.gpu.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_suites_command_lines_are_understood():
    commands = [step.command for step in steps(Path("out")) if "partbench" in step.command]
    assert len(commands) == 7
    for command in commands:
        _parser().parse_args(command[command.index("partbench") + 1 :])


def test_all_steps_run_in_their_order_and_make_gpu_succeeds(played, tmp_path):
    assert played() == 0
    assert states(tmp_path) == dict.fromkeys(NAMES, "ok")
    log = (tmp_path / "log.txt").read_text()
    assert sorted(NAMES, key=lambda name: log.index(f"\n== {name}: ")) == NAMES


@pytest.mark.parametrize("fault", SOME)
def test_a_step_that_fails_keeps_no_other_from_running_and_the_summary_says_why(fault, played, tmp_path):
    assert played(fault, "echo all is well; echo; echo RuntimeError: no such luck; exit 3") == 1
    assert states(tmp_path) == {name: "**failed**" if name == fault else "ok" for name in NAMES}
    text = (tmp_path / "summary.md").read_text()
    assert f"{fault}: RuntimeError: no such luck" in text and "all is well" not in text


DIES, STAYS = "sleep 60", "trap '' INT; while true; do sleep 60; done"


@pytest.mark.parametrize(("hangs", "fault"), [(STAYS, NAMES[0]), (STAYS, NAMES[-1]), (DIES, "smoke")])
def test_a_step_that_hangs_is_killed_with_its_children_and_all_others_run(hangs, fault, played, tmp_path):
    assert played(fault, f"echo $$ > {tmp_path / 'pid'}; echo so far; {hangs}") == 1
    assert states(tmp_path) == {name: "**out of time**" if name == fault else "ok" for name in NAMES}
    assert f"{fault}: so far" in (tmp_path / "summary.md").read_text()
    assert not living(group=int((tmp_path / "pid").read_text()))


@pytest.mark.full
@pairwise(strength=1, end=[signal.SIGKILL, signal.SIGTERM], last=[NAMES[0], NAMES[-1]])
def test_a_killed_run_leaves_its_log_and_a_summary_of_its_steps(end, last, tmp_path):
    program = f"""
import dataclasses, sys
from partbench.cli import _parser
from partbench.gpu import __main__
def planned(out):
    return [
        dataclasses.replace(step, command=("sleep", "60") if step.name == {last!r} else ("echo", "7 of 7 passed"))
        for step in steps(out)
    ]
steps, __main__.steps = __main__.steps, planned
sys.exit(__main__.main(["--out", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    before = NAMES[: NAMES.index(last)]
    try:
        for _ in range(2400):  # two minutes, since a busy machine takes half a minute for the imports
            if (tmp_path / "summary.md").exists() and states(tmp_path).get(last) == "running":
                break
            time.sleep(0.05)
    finally:
        process.send_signal(end)
        process.wait()
    assert states(tmp_path) == {**dict.fromkeys(before, "ok: 7 of 7 passed"), last: "running"}
    assert (tmp_path / "log.txt").read_text().count("7 of 7 passed\n") == len(before)
    assert not list(tmp_path.glob("*.partial"))


def test_the_number_and_size_of_result_files_are_bounded(played, tmp_path):
    played("smoke", f"yes {'x' * 999} | head -c {4 * running.KEPT}")
    assert (tmp_path / "log.txt").stat().st_size < (len(NAMES) * 2 * running.KEPT) + BYTES // 4 < BYTES
    assert "... left out ..." in (tmp_path / "log.txt").read_text()
    # Besides these: one file of a GPU's plans, and one that is being written.
    assert len(__main__.FILES) + 2 <= FILES


def test_ratios_are_in_the_summary_as_soon_as_there_are_any(tmp_path):
    case = {"operator": "linear", "work": "forward", "defaults": "uniform", "shape": "16×8×4"}
    for backend, seconds in {"cuda": 3.0, "triton": 4.0}.items():
        found = results(*(workload(case={**case, "active": n}, dense=2.0) for n in (1, 2)), noise=0)
        ours = results(
            *(
                workload(case={**case, "active": n}, **{"dense": 2.0, f"partkernels {backend}": n * seconds})
                for n in (1, 2)
            ),
            noise=0,
        )
        found.records = ours.records
        found.save(tmp_path / f"gpu-{backend}.json")
    (tmp_path / "damaged.json").write_text("{")
    files = [tmp_path / f"gpu-{backend}.json" for backend in ("cuda", "triton", "none")]
    lines = summary.page(steps(tmp_path), [], files)
    assert "| linear forward, uniform, 16×8×4 | 3.00 | 4.00 |" in lines
    assert any("No ratios" in line for line in summary.page(steps(tmp_path), [], [tmp_path / "damaged.json"]))
