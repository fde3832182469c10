"""running: one step, ended in time; what it says goes to one log of all."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.steps import Step

# Of its seconds, for saying what it did before it is killed.
FAREWELL = 4.0
# Of what a step says, the first and the last bytes that are kept.
KEPT = 200_000


@dataclass(frozen=True)
class Outcome:
    """How a step went: "ok", "failed", "out of time", or "running" as long as it does; its seconds; what it said."""

    step: Step
    state: str
    seconds: float = 0.0
    output: str = ""


def run(step: Step, log: Path) -> Outcome:
    """Runs a step to its end, or to the end of its time."""
    start, clock = log.stat().st_size if log.exists() else 0, time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n== {step.name}: {shlex.join(step.command)}\n".encode())
        file.flush()
        state = _state(step, file)
        file.write(f"\n== {step.name}: {state}\n".encode())
    content = log.read_bytes()
    said = content[start:]
    if len(said) > 2 * KEPT:
        said = said[:KEPT] + b"\n... left out ...\n" + said[-KEPT:]
        log.write_bytes(content[:start] + said)
    return Outcome(step, state, time.monotonic() - clock, said.decode(errors="replace"))


def _state(step: Step, file) -> str:
    try:
        # To a file, for a process that outlives its kill would keep a pipe open; in a group, to be killed with its own.
        how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(step.command, **how)
    except OSError as error:
        file.write(f"Error: {error}\n".encode())
        return "failed"
    try:
        return "ok" if process.wait(step.seconds - FAREWELL) == 0 else "failed"
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(FAREWELL)
        return "out of time"
    finally:
        _signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a GPU that hangs is not killed
            process.wait(1)


def _signal(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
