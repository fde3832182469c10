"""A compiled kernel, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partbench.figures import markdown

ABOUT = """\
# Compiled GPU kernels

Made by `python -m partbench.compiled_kernels --out benchmarks/results/compiled-kernels.md` without a GPU, from what
compilers and disassemblers report. Nothing was measured: the table shows in a review whether a change makes a kernel
worse.

| column | meaning |
| --- | --- |
| registers, spilled | registers of a thread; bytes that a thread spills to memory |
| shared | shared memory of a block |
| slots | instructions times threads for each weight entry that the main loop rebuilds |
| products | the tensor core instructions in use |

An NVIDIA multiprocessor issues 128 slots in a clock cycle. Both sides of a branch count, and inner loops count once.
For kernels without matrix products, slots are all instructions times threads for each entry of the tile.
"""
TRITON = ("case", "kernel", "tile", "warps", "stages", "registers", "spilled", "shared", "slots", "products")
CUDA = ("kernel", "registers", "spilled", "slots", "products")


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        target, case: the GPU architecture, and the call that launches the kernel; for C++, the template arguments.
        error: why compilation failed; all other attributes are then undefined.
        name, tile: name with its module (Triton) or without its namespace (C++); rows and columns, or entries.
        warps, stages: of a program; for the CUDA backend, only the warps that multiply.
        registers, spilled: registers of a thread, and the bytes that are spilled to memory.
        shared: bytes of shared memory per block; None if the launch sets them.
        products, serialized: 'wgmma', 'mma' or empty; ptxas's reason for serializing the products, if it does.
        slots: see ABOUT; None if the kernel multiplies matrices without rebuilding a weight.
    """

    target: str
    case: str
    error: str = ""
    name: str = ""
    tile: tuple[int, ...] = ()
    warps: int = 0
    stages: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int | None = None
    products: str = ""
    serialized: str = ""
    slots: float | None = None

    def cells(self, head: Sequence[str]) -> list[str]:
        """Return the kernel's row of the table."""
        if self.error:
            return [self.case, "**does not compile:** " + " ".join(self.error.split())]
        shown = {name: str(getattr(self, name)) for name in head if name != "kernel"}
        shown["kernel"] = self.name if "case" in head else f"{self.name}: {self.case}"
        shown |= {"tile": "×".join(map(str, self.tile)), "shared": f"{(self.shared or 0) / 1024:g} KB"}
        shown["slots"] = "" if self.slots is None else f"{self.slots:.1f}"
        shown["products"] += ", **serialized**" * bool(self.serialized)
        return [shown[name] for name in head]


def section(title: str, head: Sequence[str], kernels: Sequence[Kernel]) -> str:
    """Return a heading and a table with a row for each kernel, in Markdown."""
    return f"## {title}\n\n{markdown(head, [kernel.cells(head) for kernel in kernels])}\n"
