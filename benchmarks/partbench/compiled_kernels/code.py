"""Disassembled kernels of NVIDIA's and AMD's GPUs: their instructions, and the main loop among them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp: name with modifiers, operands with results first, and index of a jump's target."""

    name: str
    operands: tuple[str, ...]
    target: int | None = None

    @property
    def multiply_adds(self) -> float:
        """Return a warp's multiply-adds in a matrix product; an HGMMA is shared by four warps."""
        shape = re.search(r"^HGMMA\.(\d+)x(\d+)x(\d+)|^HMMA\.(16)(8)(\d+)|^v_mfma_f32_(\d+)x(\d+)x(\d+)", self.name)
        if shape is None:
            return 0
        return prod(int(size) for size in shape.groups() if size) / (4 if self.name.startswith("HGMMA") else 1)

    @property
    def left_registers(self) -> tuple[int, ...]:
        """Return the registers of a product's left operand; empty if it is in shared memory."""
        found = self.multiply_adds and re.match(r"R(\d+)", self.operands[1])
        return tuple(range(int(found[1]), int(found[1]) + 4)) if found else ()


Code = Sequence[Instruction]


def sass(listing: str) -> list[Instruction]:
    """Parse a kernel's instructions from cuobjdump --dump-sass, without the NOPs that pad its end."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", listing)
    while lines and lines[-1][1] == "NOP":
        lines.pop()
    index, found = {int(address, 16): i for i, (address, _, _) in enumerate(lines)}, []
    for _, name, operands in lines:
        jump = name.startswith("BRA") and re.search(r"0x([0-9a-f]+)$", operands)
        target = index.get(int(jump[1], 16)) if jump else None
        found.append(Instruction(name, tuple(re.split(r",\s*", operands)), target))
    return found


def amdgcn(listing: str) -> list[Instruction]:
    """Parse a kernel's instructions from Triton's assembly for AMD GPUs."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for label, line in re.findall(r"^(\.L\w+):|^\t([a-z]\w+.*)", listing, re.M):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(line)
    jumps = (re.search(r"s_c?branch.*(\.L\w+)", line) for line in lines)
    return [Instruction(line, (), labels[jump[1]] if jump else None) for line, jump in zip(lines, jumps, strict=True)]


def main_loop(code: Code) -> Code | None:
    """Return the smallest loop that multiplies matrices, from its first instruction to the jump back; None without one.

    Both sides of a branch count, and inner loops count once.
    """
    loops = (code[each.target : i + 1] for i, each in enumerate(code) if each.target is not None and each.target <= i)
    return min((loop for loop in loops if multiply_adds(loop)), key=len, default=None)


def multiply_adds(code: Code) -> float:
    """Return a warp's multiply-adds in matrix products."""
    return sum(each.multiply_adds for each in code)


def left_entries(code: Code) -> float:
    """Count the distinct entries in the left operands of a warp's products, if these are in registers."""
    written: dict[int, int] = {}
    fragments = set()
    for i, each in enumerate(code):
        if each.left_registers:
            fragments.add(tuple((register, written.get(register)) for register in each.left_registers))
        elif found := re.match(r"R(\d+)", each.operands[0]):
            written[int(found[1])] = i
    return 256 * len(fragments)


def costs(code: Code, warps: int, rebuilt: Callable[[Code], float], lanes: int = 32, tile: Sequence[int] = ()) -> dict:
    """Return `products` and `slots` of a Kernel.

    Args:
        rebuilt: returns the entries of the weight that a warp rebuilds in an iteration of the main loop, 0 if none.
        lanes: per warp.
        tile: shape of the tile of a kernel that multiplies no matrices.
    """
    loop = main_loop(code)
    if loop is None:
        return {"slots": len(code) * warps * lanes / prod(tile)} if tile else {}
    entries, is_wgmma = rebuilt(loop), any(each.name.startswith("HGMMA") for each in loop)
    return {"products": "wgmma" if is_wgmma else "mma", "slots": len(loop) * lanes / entries if entries else None}


def dumped(binary: bytes | Path, *what: str) -> str:
    """Return the output of cuobjdump, which is in Triton's package, for machine code or an object file."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        if isinstance(binary, bytes):
            file.write(binary)
            file.flush()
        path = file.name if isinstance(binary, bytes) else binary
        command = [triton.knobs.nvidia.cuobjdump.path, *what, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(listing: str) -> list[tuple[str, str, str]]:
    """Return architecture, mangled name and code of each kernel in the output of cuobjdump --dump-sass."""
    found = []
    for image in re.split(r"\n\s*code for ", listing)[1:]:
        architecture = image.split(None, 1)[0]
        found += [(architecture, *function.split("\n", 1)) for function in image.split("Function : ")[1:]]
    return found
