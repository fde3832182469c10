"""steps: the steps on a machine with a GPU, their order and their time limits; all output goes to one log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PRESET = "gpu"
# Builds for this GPU only, which takes half the time. If the CUDA backend does not compile, the others are built, but
# the step still fails.
BUILD = """
found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -Ex '[0-9.]+' | sort -u | xargs)
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$found}
PARTKERNELS_BUILD=cuda "$0" "$@" || { PARTKERNELS_BUILD= "$0" "$@"; exit 1; }
"""
# A page of the result files that exist.
REPORT = """exec "$0" -m partbench report "$1"/gpu-*.json --out "$1"/gpu.html"""


@dataclass(frozen=True)
class Step:
    """A command in the checkout's root, its time limit in seconds, and the prefix of output lines for the summary."""

    name: str
    command: tuple[str, ...]
    seconds: float
    shown: str = ""


def steps(out: Path) -> list[Step]:
    """Return the steps, correctness before speed, all independent; together they take under ten minutes."""
    python, triton, cuda = sys.executable, str(out / "gpu-triton.json"), str(out / "gpu-cuda.json")
    measured = str(out / "measured")
    workers = ("-n", "auto") if find_spec("xdist") else ()
    # Another PyTorch gives other warnings. Only tests of GPU kernels run here; all others need no GPU.
    tests = ("env", "OMP_NUM_THREADS=1", python, "-m", "pytest", "-v", "-p", "partbench.gpu.failures", "--tb=no")
    tests += ("-W", "default", *workers, "tests/partkernels", "--ignore=tests/partkernels/test_cuda_library.py")
    tests += ("--ignore=tests/partkernels/test_cuda_stream.py", "-k", "[cuda or -cuda or triton")  # not "reference on"
    # Without PyTorch's caching allocator, the tool sees where each tensor ends.
    sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "1", "--tool")
    smoke = (python, "-m", "partbench.gpu.smoke")
    suites = ("env", "-u", "OMP_WAIT_POLICY", f"PARTKERNELS_CACHE={measured}")

    def suite(name: str, backend: str, *options: str, minutes: float = 1.0) -> tuple[str, ...]:
        options += ("--preset", PRESET, "--minutes", str(minutes), "--backends", backend, "--add")
        environment = (f"PARTKERNELS_BACKEND={backend}",) if name == "optim" else ()
        out = triton if backend == "triton" else cuda
        return (*suites, *environment, python, "-m", "partbench", name, *options, "--out", out)

    responses = (python, "-m", "partbench.responses", "--device=cuda", "--dtype=bfloat16")
    responses += ("--passes=2", "--seconds=0.1")
    linear, convolutions = (
        (f"--operator={operator}", "--no-compiled", "--works=forward,grad_input,grad_weight")
        for operator in ("linear", "conv2d")
    )
    return [
        Step("build", ("sh", "-c", BUILD, python, "setup.py", "-q", "build_ext", "--inplace"), 75),
        Step("explain", (python, "-m", "partkernels"), 10, shown="  "),
        Step("smoke", smoke, 35, shown="|"),
        Step("tests", tests, 110),
        Step("memcheck", (*sanitizer, "memcheck", *smoke, "--limit=30", "cuda fused"), 16),
        Step("racecheck", (*sanitizer, "racecheck", *smoke, "--limit=30", "cuda fused"), 30),
        Step("tune", (python, "-m", "partbench.tune", f"--preset={PRESET}", "--out", measured, "--minutes=0.4"), 30),
        Step("speed of cuda", suite("speed", "cuda", *linear, minutes=0.5), 35),
        Step("speed of triton", suite("speed", "triton", *linear, minutes=0.5), 40),
        Step("convolutions", suite("speed", "triton", *convolutions, minutes=0.4), 35),
        Step("training", suite("step", "triton", minutes=0.8), 63),
        Step("memory", suite("memory", "triton"), 40),
        Step("optim", suite("optim", "triton", minutes=0.1), 18),
        Step("responses", responses, 15, shown="|"),
        Step("bars", (python, "-m", "partbench", "bars", triton), 12, shown="|"),
        Step("report", ("sh", "-c", REPORT, python, str(out)), 12),
    ]


# The last seconds of a step's time limit, in which it can still report before it is killed.
FAREWELL = 4.0
# Bytes that are kept of a step's output, at its start and at its end.
KEPT = 200_000


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: "ok", "failed", "out of time" or, until it ends, "running"; its seconds; its output."""

    step: Step
    state: str
    seconds: float = 0.0
    output: str = ""


def run(step: Step, log: Path) -> Outcome:
    """Run a step until it ends or reaches its time limit."""
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
        # Output goes to a file, because a process that survives its kill would keep a pipe open. The new session is a
        # process group, which can be killed as a whole.
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
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a hanging GPU cannot be killed
            process.wait(1)


def _signal(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
