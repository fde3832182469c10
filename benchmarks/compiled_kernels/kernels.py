"""A compiled kernel, and what its main loop costs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from benchmarks.compiled_kernels import pipes
from benchmarks.compiled_kernels.pipes import ARCHITECTURES, LANES, QUARTERS, SHARED_BYTES
from benchmarks.compiled_kernels.sass import Loop, instructions, main_loop


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
        slots: of an entry of the weight that the main loop rebuilds, the lanes of 128 a clock that it takes, by the
            busiest pipe; of a kernel that multiplies no matrices, all of its own for each entry of its tile. None if it
            multiplies and rebuilds nothing.
        pipe, moved: the busiest pipe but for tensor cores and shared memory; slots of bytes through shared memory.
        unknown, at_least: instructions on no known pipe; whether there are loops of unknown length inside.
        budget: how many slots the tensor cores take; None where these are not what takes longest.
        cycles, multiply_adds, entries: of a multiprocessor, for an iteration of a block's main loop; in it, multiplied
            and rebuilt.
        reach: which share of those cycles the tensor cores multiply.
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
    pipe: str = ""
    moved: float | None = None
    unknown: Sequence[str] = ()
    at_least: bool = False
    budget: float | None = None
    cycles: float | None = None
    multiply_adds: float = 0
    entries: float = 0
    reach: float | None = None


# In tiles of fewer rows of x, reading the weight takes longer than multiplying.
LEAST_ROWS = 128


def costs(
    code: str,
    target: str,
    warps: int,
    rebuilt: Callable[[Loop], float],
    copied: Callable[[Loop], float] | None = None,
    tile: Sequence[int] = (),
) -> dict:
    """Of a Kernel, what its disassembly says: from products on, all but serialized.

    Args:
        rebuilt: how many entries of the weight a warp rebuilds in an iteration, 0 if none.
        copied: how many bytes the copy engine fetches for a warp in an iteration; None where it has no part.
        tile: of a kernel that multiplies no matrices.
    """
    all_of_it = instructions(code)
    loop, architecture = main_loop(all_of_it), ARCHITECTURES[target]
    if loop is None:
        if not tile:
            return {}
        total = pipes.cycles(((each, 1) for each in all_of_it), architecture)
        pipe, cycles = pipes.bound(total)
        an_entry = LANES * warps / prod(tile)
        return {"slots": cycles * an_entry, "pipe": pipe, "moved": total["shared"] * an_entry}
    total, entries = pipes.cycles(loop.steps, architecture), rebuilt(loop)
    if copied is not None:
        total["shared"] += copied(loop) * QUARTERS / SHARED_BYTES
    pipe, cycles = pipes.bound(total)
    iteration = pipes.iteration(loop, total, architecture, warps)
    return {
        "products": "wgmma" if any(each.opcode == "HGMMA" for each, _ in loop.steps) else "mma",
        "slots": cycles * LANES / entries if entries else None,
        "pipe": pipe,
        "moved": total["shared"] * LANES / entries if entries else None,
        "unknown": sorted({each.name for each, _ in loop.steps if not pipes.is_known(each)}),
        "at_least": loop.unknown > 0,
        "budget": total["tensor"] * LANES / entries if entries * LEAST_ROWS <= loop.multiply_adds and entries else None,
        "cycles": iteration,
        "multiply_adds": warps * loop.multiply_adds,
        "entries": warps * entries,
        "reach": total["tensor"] * warps / QUARTERS / iteration,
    }


def disassembler() -> str:
    """cuobjdump: Triton's package carries it."""
    import triton

    return triton.knobs.nvidia.cuobjdump.path


def dumped(binary: bytes | Path, *what: str) -> str:
    """What cuobjdump says of machine code or of an object file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        if isinstance(binary, bytes):
            file.write(binary)
            file.flush()
        path = file.name if isinstance(binary, bytes) else binary
        return subprocess.run([disassembler(), *what, path], capture_output=True, text=True, check=True).stdout


def functions(listing: str) -> list[tuple[str, str, str]]:
    """Architecture, mangled name and code of each kernel that cuobjdump --dump-sass shows."""
    found = []
    for image in re.split(r"\n\s*code for ", listing)[1:]:
        architecture = image.split(None, 1)[0]
        found += [(architecture, *function.split("\n", 1)) for function in image.split("Function : ")[1:]]
    return found
