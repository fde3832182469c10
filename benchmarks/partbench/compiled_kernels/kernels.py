"""A compiled kernel, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partbench.figures import markdown

ABOUT = """\
# The kernels for GPUs, as they are compiled

Made by `python -m partbench.compiled_kernels --out benchmarks/results/compiled-kernels.md`. No GPU was involved and
nothing measured: compilers and disassemblers say this, so that a change that makes a kernel worse is seen in review.

Slots are the instructions of the main loop for each entry of the weight that it rebuilds, in lanes: an NVIDIA
multiprocessor issues 128 a clock. Both ways of a branch count, as those by the map's bits in CUDA C++, and loops
inside count once. Of a kernel that multiplies no matrices, slots are all of its instructions for each entry of its
tile. Registers and spilled bytes are a thread's, shared memory is a block's.
"""
TRITON = ("case", "kernel", "tile", "warps", "stages", "registers", "spilled", "shared", "slots", "products")
CUDA = ("kernel", "registers", "spilled", "slots", "products")


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        target, case: what it was compiled for, and the call that launches it; in C++ the template arguments.
        error: why it could not be compiled; nothing else is known then.
        name, tile: with its module's, or without its namespace; rows and columns of the result, or entries in all.
        warps, stages: of a program; of the CUDA backend, those that multiply.
        registers, spilled: of a thread, and the bytes of them that are kept in memory for want of registers.
        shared: bytes of memory that a block shares; None where the launch says.
        products, serialized: 'wgmma', 'mma' or none, and why ptxas makes them wait for one another, if it does.
        slots: see ABOUT; None if it multiplies and rebuilds nothing.
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
        """A row of the table."""
        if self.error:
            return [self.case, "**does not compile:** " + " ".join(self.error.split())]
        shown = {name: str(getattr(self, name)) for name in head if name != "kernel"}
        shown["kernel"] = self.name if "case" in head else f"{self.name}: {self.case}"
        shown |= {"tile": "×".join(map(str, self.tile)), "shared": f"{(self.shared or 0) / 1024:g} KB"}
        shown["slots"] = "" if self.slots is None else f"{self.slots:.1f}"
        shown["products"] += ", **serialized**" * bool(self.serialized)
        return [shown[name] for name in head]


def section(title: str, head: Sequence[str], kernels: Sequence[Kernel]) -> str:
    """A heading and a row for each kernel, in Markdown."""
    return f"## {title}\n\n{markdown(head, [kernel.cells(head) for kernel in kernels])}\n"
