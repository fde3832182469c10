"""`python -m partbench.gpu`: all steps in turn, with the summary page updated after each."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from partbench.gpu import summary
from partbench.gpu.steps import Outcome, run, steps

# Files of an earlier run. Its measurements of Triton's plans may stay.
FILES = ("summary.md", "log.txt", "gpu-cuda.json", "gpu-triton.json", "gpu.html")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m partbench.gpu", description="Builds, tests, tunes and measures.")
    parser.add_argument("only", nargs="*", metavar="STEP", help="names of steps; by default all")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of what is found")
    given = parser.parse_args(arguments)
    out, all_steps = given.out, steps(given.out)
    names = [step.name for step in all_steps]
    if unknown := [name for name in given.only if name not in names]:
        parser.error(f"there is no step named {unknown[0]!r}; the steps are {', '.join(map(repr, names))}.")
    if not (Path("setup.py").exists() and Path("tests/partkernels").exists()):
        parser.error("the steps need a checkout, which this folder is not; run `make gpu` in the root of one.")
    # SIGTERM also ends the step that is running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    planned = [step for step in all_steps if not given.only or step.name in given.only]
    outcomes = []

    def write(outcomes: list[Outcome]) -> None:
        summary.write(out / "summary.md", planned, outcomes, [out / "gpu-cuda.json", out / "gpu-triton.json"])

    for step in planned:
        write([*outcomes, Outcome(step, "running")])
        print(f"{step.name} ...", end=" ", flush=True)
        outcomes.append(run(step, out / "log.txt"))
        print(f"{outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
        write(outcomes)
    print((out / "summary.md").read_text())
    return 0 if all(outcome.state == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
