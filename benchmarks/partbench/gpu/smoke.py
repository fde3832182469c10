"""smoke: every case on every backend, each where a wrong, hanging or crashing kernel loses no other case.

usage: python -m partbench.gpu.smoke                       all, in processes
       python -m partbench.gpu.smoke "triton fused" [N...] one backend's cases, or those of these numbers, in this one

An illegal memory access leaves a process without its GPU. So each process runs case after case and says how each went;
where it dies, the next process goes on behind the case that it died of.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Timer

import torch

from partbench.figures import markdown
from partbench.gpu.cases import CASES
from partbench.peers.operators import obstacles
from partkernels.backend import triton

TARGETS = ("cuda fused", "cuda rebuild", "triton fused", "triton rebuild", "reference")
# Of a target: Triton compiles as long as it computes.
PROCESSES = 3
# What a case may take until it is taken to hang: Triton compiles it first.
LIMIT = 20
# How much of an exception is told.
TOLD = 90

# Of a case's number and a target: how it went.
Said = dict[tuple[int, str], str]


def here(target: str, numbers: Sequence[int], limit: int) -> bool:
    """Runs cases in this process, as long as it has its GPU, and prints a line of JSON for each; whether all are ok."""
    # cuBLAS is deterministic, as poisoned_memory asks, only with a workspace of its own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device, all_ok = torch.device(_device(target)), True
    torch.ones(1, device=device)  # what CUDA takes to begin is no case's time
    for number in numbers:
        signal.alarm(limit)  # ends this process, even inside a call of CUDA
        try:
            said = f"ok {CASES[number].error(target, device):.1e}"
        except Exception as error:
            all_ok = False
            said = " ".join(f"{type(error).__name__}: {error}".split())[:TOLD]
        print(json.dumps({"case": number, "name": str(CASES[number]), "said": said}), flush=True)
        if not said.startswith("ok") and device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.ones(1, device=device).item()
            except Exception:
                return False
    return all_ok


def _device(target: str) -> str:
    return next(iter(triton.BACKEND.devices)) if target.startswith("triton") else "cuda"


def _obstacle(target: str) -> str:
    """Why a target cannot run here at all; empty if it can."""
    if _device(target) == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    return obstacles().get(target.partition(" ")[0], "")


def in_processes(
    target: str, numbers: Sequence[int], worker: Sequence[str], deadline: float, limit: int
) -> Iterator[tuple[int, str]]:
    """How each case of a target went: an error's number, or what went wrong; none begins after the deadline."""
    left = list(numbers)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            yield from ((number, "not run: out of time") for number in left)
            return
        command = [*worker, f"--limit={limit}", target, *map(str, left)]
        before, last = len(left), ""
        # Of each process one thread: those of all wait for one another, else, for longer than a case may take.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
            timer = Timer(seconds, process.kill)
            timer.start()
            for line in process.stdout:
                if not line.startswith('{"case"'):
                    last = line.strip() or last
                    continue
                told = json.loads(line)
                left.remove(told["case"])
                yield told["case"], told["said"]
            code = process.wait()
            timer.cancel()
        # A process that has lost its GPU says of what, and ends by itself.
        if left and (code < 0 or len(left) == before):
            why = "out of time" if time.monotonic() > deadline else _death(code, last, limit)
            yield left.pop(0), why


def _death(code: int, last: str, limit: int) -> str:
    if code == -signal.SIGALRM:
        return f"hangs: nothing in {limit} s"
    how = signal.Signals(-code).name if code < 0 else f"exit {code}"
    return f"died of {how}: {last}"[:TOLD]


def run(
    targets: Sequence[str] = TARGETS,
    numbers: Sequence[int] = range(len(CASES)),
    *,
    seconds: float,
    limit: int = LIMIT,
    worker: Sequence[str] = (sys.executable, "-m", "partbench.gpu.smoke"),
) -> Said:
    """Every case of these numbers on every target, and prints each as it comes."""
    deadline, said = time.monotonic() + seconds, {}

    def part(work: tuple[str, int]) -> None:
        target, first = work
        for number, text in in_processes(target, numbers[first::PROCESSES], worker, deadline, limit):
            said[number, target] = text
            print(f"{target}: {CASES[number]}: {text}", flush=True)

    with ThreadPoolExecutor(PROCESSES * len(TARGETS)) as threads:
        list(threads.map(part, product(targets, range(PROCESSES))))
    return said


def table(said: Said) -> str:
    """Markdown: a row for each case, a column for each target."""

    def cell(text: str) -> str:
        return text.removeprefix("ok ") if text.startswith("ok") else f"**{text.replace('|', '/')}**"

    ran = [target for target in TARGETS if any(target == each for _, each in said)]
    numbers = sorted({number for number, _ in said})
    rows = [[str(CASES[number]), *(cell(said.get((number, target), "ok ")) for target in ran)] for number in numbers]
    return markdown(["largest error", *ran], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m partbench.gpu.smoke", description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", choices=TARGETS, help="runs its cases in this process")
    parser.add_argument("numbers", nargs="*", type=int, help="of the cases; by default all")
    parser.add_argument("--seconds", type=float, default=38, help="what all processes may take")
    parser.add_argument("--limit", type=int, default=LIMIT, help="what a case may take")
    given = parser.parse_args(arguments)
    if given.target:
        return 0 if here(given.target, given.numbers or range(len(CASES)), given.limit) else 1
    found = {target: _obstacle(target) for target in TARGETS}
    for target, obstacle in found.items():
        if obstacle:
            print(f"{target} cannot run: {obstacle}")
    said = run([target for target in TARGETS if not found[target]], seconds=given.seconds, limit=given.limit)
    if said:
        print(table(said))
    ok = sum(text.startswith("ok") for text in said.values())
    print(f"{ok} of {len(TARGETS) * len(CASES)} are ok")
    return 0 if ok == len(TARGETS) * len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())
