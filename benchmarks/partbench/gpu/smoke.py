"""smoke: every case on every backend, isolated so that a wrong, hanging or crashing kernel affects no other case.

usage: python -m partbench.gpu.smoke                       all cases, in several processes
       python -m partbench.gpu.smoke "triton fused" [N...] one backend's cases, or those numbered N, in this process

After an illegal memory access, a process cannot use its GPU. So each process runs case after case and reports each
outcome. If a process dies, the next one continues after the case that killed it.
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
# Processes for each target, since Triton compiles for as long as it computes.
PROCESSES = 3
# Seconds after which a case counts as hanging; they include Triton's compilation.
LIMIT = 20
# Characters of an exception that are reported.
TOLD = 90

# The outcome for each case number and target.
Said = dict[tuple[int, str], str]


def here(target: str, numbers: Sequence[int], limit: int) -> bool:
    """Run cases in this process until it loses its GPU, print a JSON line for each, and return whether all are ok."""
    # cuBLAS is deterministic, as poisoned_memory requires, only with a configured workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device, all_ok = torch.device(_device(target)), True
    torch.ones(1, device=device)  # CUDA's start-up time should count for no case
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
    """Return why a target cannot run here; an empty string if it can."""
    if _device(target) == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    return obstacles().get(target.partition(" ")[0], "")


def in_processes(
    target: str, numbers: Sequence[int], worker: Sequence[str], deadline: float, limit: int
) -> Iterator[tuple[int, str]]:
    """Yield each case's number and its outcome, an error's size or the failure; none begins after the deadline."""
    left = list(numbers)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            yield from ((number, "not run: out of time") for number in left)
            return
        command = [*worker, f"--limit={limit}", target, *map(str, left)]
        before, last = len(left), ""
        # One thread a process: otherwise threads of different processes wait for one another beyond a case's limit.
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
        # A process that has lost its GPU reports the case and exits by itself.
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
    """Run every case of these numbers on every target; print each outcome as it comes, and return them."""
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
    """Return a Markdown table with a row for each case and a column for each target."""

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
