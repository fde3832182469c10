"""tune: measurements of Triton's plans for the linear layers of a preset, so that the suites use the fastest ones.

usage: python -m partbench.tune --out FOLDER, then the suites with PARTKERNELS_CACHE=FOLDER. A file in FOLDER that is
moved to partkernels/backend/triton/measured applies to every GPU of its name.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from partbench.peers import operators
from partbench.peers.layer import THREE, Layer, Partitioning, Tensors
from partbench.presets import PRESETS, Preset
from partbench.suites.speed import linear_layers

# The first subnetwork; the others use the same kernels.
ACTIVE = 1
# Share of the time for compiling; kernels that have not begun by then are compiled when they are measured.
COMPILING = 0.5


@dataclass(frozen=True)
class Work:
    """A layer's forward pass."""

    layer: Layer
    partitioning: Partitioning = THREE

    def __str__(self) -> str:
        return f"{self.layer.shape}, {self.partitioning.defaults}"

    def __call__(self) -> None:
        operators.ours(Tensors(self.layer, self.partitioning, seed=0), "forward", ACTIVE, "triton")()


def works(preset: Preset, device: torch.device) -> list[Work]:
    """Return the products of a preset's speed suite for which Triton chooses a plan."""
    kinds = (THREE, *(Partitioning(defaults=kind) for kind in preset.forward_defaults))
    return [
        Work(layer, partitioning) for layer in linear_layers(preset, preset.dtypes, device) for partitioning in kinds
    ]


def tune(works: Sequence[Work], minutes: float) -> tuple[int, list[str]]:
    """Store the fastest plan for each product in the folder PARTKERNELS_CACHE; begin none after this many minutes.

    Returns:
        the number of products with a known plan, and a message for each product that failed.
    """
    from partkernels.backend.triton.operators import tuning

    start, known, problems = time.time(), 0, []
    if works[0].layer.device.type == "cuda":
        _compile(works, start + 60 * minutes * COMPILING)
    with tqdm(works, disable=None, unit="product", leave=False) as progress, tuning():
        for work in progress:
            if time.time() > start + 60 * minutes:
                break
            progress.set_description(str(work))
            try:
                work()
                known += 1
            except Exception as error:  # one product's failure must not lose the others
                problems.append(f"{work}: {type(error).__name__}: {str(error)[:500]}")
    return known, problems


def _compile(works: Sequence[Work], deadline: float) -> None:
    """Fill Triton's cache on disk with all kernels that tuning measures, by a process for each core."""
    processes = min(len(works), os.cpu_count() or 1)
    # CUDA does not survive a fork.
    how = {"mp_context": get_context("spawn"), "initializer": _only_compile}
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(processes, initargs=(scratch,), **how) as pool:
        compiled = pool.map(_compile_one, works, [deadline] * len(works))
        for _ in tqdm(compiled, total=len(works), desc="compiling", disable=None, unit="product", leave=False):
            pass


def _only_compile(scratch: str) -> None:
    """Make tuning in this process compile kernels without launching them, by a clock that measures nothing."""
    from triton.runtime.jit import JITFunction

    from partkernels.backend.triton import plans

    run = JITFunction.run

    def compile_only(function, *args, warmup, **kwargs):
        return run(function, *args, warmup=True, **kwargs)

    JITFunction.run, plans.clock = compile_only, lambda call: float(call() is None)
    os.environ["PARTKERNELS_CACHE"] = scratch
    torch.set_num_threads(1)


def _compile_one(work: Work, deadline: float) -> None:
    from partkernels.backend.triton.operators import tuning

    # A failure here occurs again in the measurement, and is reported there.
    with suppress(Exception), tuning():
        if time.time() < deadline:
            work()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m partbench.tune", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder, as PARTKERNELS_CACHE names it")
    parser.add_argument("--preset", choices=PRESETS, default="gpu", help="whose layers")
    parser.add_argument("--device", help="cuda, or cpu under TRITON_INTERPRET=1; by default the preset's")
    parser.add_argument("--minutes", type=float, default=2.5, help="no product begins after them")
    given = parser.parse_args(arguments)
    if obstacle := operators.obstacles().get("triton"):
        parser.exit(2, f"{parser.prog}: the backend 'triton' cannot run here: {obstacle}.\n")
    os.environ["PARTKERNELS_CACHE"] = str(given.out)
    preset = PRESETS[given.preset]
    found = works(preset, torch.device(given.device or preset.device))
    known, problems = tune(found, given.minutes)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{known} of {len(found)} products are tuned, in {given.out}.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
