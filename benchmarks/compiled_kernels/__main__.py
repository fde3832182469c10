"""compiled_kernels: the kernels of both GPU backends as they are compiled, which takes no GPU, and predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.compiled_kernels import cuda, predictions, triton
from benchmarks.compiled_kernels.kernels import Kernel
from benchmarks.figures import markdown

ABOUT = """\
# The kernels for GPUs, as they are compiled

Made by `python -m benchmarks.compiled_kernels --out benchmarks/results/compiled-kernels.md`. No GPU was involved and
nothing measured: compilers and disassemblers say this, so that a change that makes a kernel worse is seen in review.
What products should take by it is in [predictions](predictions.md).

Slots are what an entry of the weight takes that the main loop rebuilds, in lanes of the 128 that a multiprocessor
issues a clock, by the busiest pipe, which is named: `issue` of instructions, `ALU` for integers and bits at half that
rate, `IMAD`, `FMA`, `LSU` for loads and stores, `XU`
([which is which](../compiled_kernels/pipes.py)). Moved is the same for bytes that go through shared memory, tensor
cores' operands and asynchronous copies among them, each thread's taken for different ones. The budget is what the
tensor cores take, in tiles of at least 128 rows of x; reach is how much of the loop's time they multiply, which depends
too on how many products are under way while the next entries are rebuilt. Of a kernel that multiplies no matrices,
slots are all of its own for each entry of its tile; of AMD's, instructions only. Where the code branches by the map's
bits, the way of 2 bits is counted; '≥' marks loops inside whose number of iterations cannot be told. Registers and
spilled bytes are a thread's, shared memory is a block's.
"""
COSTS = ("slots", "pipe", "moved", "budget", "reach", "products")
TRITON_HEAD = ("case", "kernel", "tile", "warps", "stages", "registers", "spilled", "shared", *COSTS)
CUDA_HEAD = ("kernel", "registers", "spilled", *COSTS)


def table(kernels: Sequence[Kernel], library: Sequence[Kernel], nvcc: str) -> str:
    """Markdown: a section for each backend and target, a row for each kernel."""
    lines = [ABOUT]
    for name, target in triton.TARGETS.items():
        about = f"{target.gpu}, {target.shared_memory >> 10} KB"
        lines += [f"## Triton {version('triton')}, {name}: {about}", ""]
        lines += [markdown(TRITON_HEAD, [_of_triton(kernel) for kernel in kernels if kernel.target == name]), ""]
    for name in sorted({kernel.target for kernel in library}, reverse=True):
        lines += [f"## CUDA C++ {nvcc}, {name}", ""]
        lines += [markdown(CUDA_HEAD, [_of_cuda(kernel) for kernel in library if kernel.target == name]), ""]
    return "\n".join(lines[:-1]) + "\n"


def _of_triton(kernel: Kernel) -> list[str]:
    if kernel.error:
        return [kernel.case, "**does not compile:** " + " ".join(kernel.error.split())]
    numbers = kernel.warps, kernel.stages, kernel.registers, kernel.spilled
    tile, shared = "×".join(map(str, kernel.tile)), f"{kernel.shared / 1024:g} KB"
    return [kernel.case, kernel.name, tile, *map(str, numbers), shared, *_costs(kernel)]


def _of_cuda(kernel: Kernel) -> list[str]:
    return [f"{kernel.name}: {kernel.case}", str(kernel.registers), str(kernel.spilled), *_costs(kernel)]


def _costs(kernel: Kernel) -> list[str]:
    return [
        "" if kernel.slots is None else "≥ " * kernel.at_least + f"{kernel.slots:.1f}",
        "" if kernel.slots is None else kernel.pipe,
        "" if kernel.moved is None else f"{kernel.moved:.1f}",
        "" if kernel.budget is None else f"{kernel.budget:g}",
        "" if kernel.reach is None else f"{kernel.reach:.2f}",
        kernel.products + (", **serialized**" if kernel.serialized else ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table, in Markdown; predictions.md goes beside it")
    targets = list(triton.TARGETS)
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets, help="Triton's for these alone")
    parser.add_argument("--json", action="store_true", help="write the kernels to standard output as well")
    parser.add_argument(
        "--built", action="store_true", help="read the CUDA library if it is built, instead of compiling it"
    )
    given = parser.parse_args()
    files = []
    if given.targets == targets:
        files = cuda.objects() if given.built else cuda.build()
    kernels, library = triton.compiled(given.targets), cuda.compiled(files)
    given.out.write_text(table(kernels, library, cuda.compiler() if library else ""))
    given.out.with_name("predictions.md").write_text(predictions.page(kernels, library))
    if given.json:
        json.dump({"triton": [*map(asdict, kernels)], "cuda": [*map(asdict, library)]}, sys.stdout)


if __name__ == "__main__":
    main()
