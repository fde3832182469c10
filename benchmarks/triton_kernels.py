"""triton_kernels: every Triton kernel as it is compiled, which takes no GPU, and what can be read in it.

Operators are called on tensors without memory, for a GPU that is not there. So each kernel is compiled for the very
arguments and configuration that such a GPU would give it; none is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.layer import Layer
from benchmarks.without_gpu import META, TARGETS, Case, Launch, launches, pretend

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def _square(rows: int, size: int, dtype: torch.dtype = BFLOAT16) -> Layer:
    return Layer((rows, size), (size, size), dtype=dtype, device=META)


LARGE = _square(4096, 4096)
CONVOLUTION = Layer((32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype=BFLOAT16, device=META)
CASES = (
    *(Case("linear", LARGE, kind) for kind in ("zeros", "uniform", "normal", "stored")),
    *(Case("linear", LARGE, kind, bits) for bits in (1, 4, 8) for kind in ("zeros", "uniform")),
    *(Case("linear", _square(4096, 4096, dtype)) for dtype in (torch.float16, FLOAT32)),
    *(Case("linear", LARGE, kind, tile=(128, 128, 8, 3)) for kind in ("zeros", "uniform")),
    *(Case("linear", _square(16, 8192), kind) for kind in ("zeros", "uniform")),
    Case("linear", _square(16, 2048)),  # so few tiles that several programs share each sum
    *(Case("linear_grad_input", LARGE, kind) for kind in ("zeros", "uniform")),
    Case("linear_grad_weight", LARGE),
    *(Case(f"conv2d{work}", CONVOLUTION) for work in ("", "_grad_input", "_grad_weight")),
    *(Case("subnetwork_weight", LARGE, kind) for kind in ("zeros", "uniform")),
    Case("subnetwork_weight_grad", LARGE),
    Case("embedding", LARGE),
    *(Case(step, _square(1, 4096, dtype)) for step in ("sgd_step", "adam_step") for dtype in (FLOAT32, BFLOAT16)),
)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        target, case: what it was compiled for.
        error: why it could not be; nothing else is known then.
        name: with its module's.
        tile: its sizes: rows and columns of the result, or how many entries in all.
        warps, stages: of a program.
        registers: of a thread.
        spilled: bytes of a thread's registers that are kept in memory for want of registers.
        shared: bytes of memory that a block shares.
        has_dot: it multiplies matrices.
        wgmma: how many of Hopper's products its PTX has.
        serialized: why ptxas makes these wait for one another; empty if it doesn't.
        slots: issue slots for each entry of the weight that the main loop rebuilds; of a kernel that multiplies no
            matrices, all of its own for each entry of its tile. None if it multiplies and rebuilds nothing.
        budget: how many of them an H100 hides behind its tensor cores; None where these are not what takes longest.
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
    shared: int = 0
    has_dot: bool = False
    wgmma: int = 0
    serialized: str = ""
    slots: float | None = None
    budget: float | None = None


def compiled_for(target: str) -> list[Kernel]:
    """The kernels of every case; the process that calls this has the target for its GPU ever after."""
    pretend(TARGETS[target])
    cases = [case for case in CASES if case.tile is None or target == "sm_90"]
    return [_compiled(target, case, launch) for case in cases for launch in launches(case)]


def _compiled(target: str, case: Case, launch: Launch) -> Kernel:
    launch.kernel.device_caches.clear()  # else what an earlier case compiled comes back, with nothing said of it
    try:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments)
    except Exception as error:
        return Kernel(target, str(case), f"{type(error).__name__}: {error}")
    return _examined(target, case, kernel, log.getvalue())


def _examined(target: str, case: Case, kernel, log: str) -> Kernel:
    metadata, function, asm = kernel.metadata, kernel.src.fn, kernel.asm
    if TARGETS[target].backend == "cuda":
        code = _disassembled(asm["cubin"])
        registers, spilled = _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)
    else:
        code = asm["amdgcn"]
        registers, spilled = _number(r"vgpr_count: +(\d+)", code), 4 * _number(r"vgpr_spill_count: +(\d+)", code)
    constants = {function.arg_names[i]: value for (i,), value in kernel.src.constants.items()}
    tile = tuple(constants[name] for name in ("DOWN", "ACROSS", "BLOCK") if name in constants)
    has_dot, loop, entries, budget = "tt.dot" in asm["ttir"], _main_loop(code), prod(tile), None
    if has_dot:
        uses = 0  # of each entry of the weight in a tile
        if "KIND" in constants:
            uses = tile[0] if case.operator.endswith("grad_input") else tile[1]
        entries = metadata.num_warps * sum(map(_multiply_adds, loop)) / uses if uses else 0
        # Below, reading the weight takes longer than multiplying. TF32 is half as fast as 16 bits are.
        if target == "sm_90" and uses >= 128:
            budget = 128 * uses / (1024 if case.layer.dtype == FLOAT32 else 2048)
    return Kernel(
        target,
        str(case),
        name=f"{function.__module__.rpartition('.')[2]}.{function.__name__}",
        tile=tile,
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        has_dot=has_dot,
        wgmma=asm.get("ptx", "").count("wgmma.mma_async"),
        serialized=" ".join(re.findall("wgmma.mma_async instructions are serialized due to (.*) in the function", log)),
        slots=len(loop) * metadata.num_warps * TARGETS[target].warp_size / entries if entries else None,
        budget=budget,
    )


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])


def _disassembled(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Without its analysis of the flow of data, which takes as long again and changes nothing here.
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Products of matrices in the code of sm_90, by four warps together, of sm_80 and of AMD.
_PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.(16)(8)(\d+)|v_mfma_f32_(\d+)x(\d+)x(\d+)")


def _multiply_adds(instruction: str) -> float:
    """A warp's share of them."""
    found = _PRODUCT.search(instruction)
    sizes = [int(size) for size in found.groups() if size] if found else [0]
    return prod(sizes) / (4 if "HGMMA" in instruction else 1)


def _main_loop(code: str) -> list[str]:
    """The instructions of the smallest loop that multiplies matrices; of a kernel without one, all."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for label, nvidia, amd in re.findall(r"^(\.L\w+):|/\*[0-9a-f]{4,}\*/ +(.*?) *;|^\t([a-z]\w+.*)", code, re.M):
        if label:
            labels[label] = len(instructions)
        elif nvidia != "NOP":  # these fill the last line of the code
            instructions.append(nvidia or amd)
    loops = []
    for i, instruction in enumerate(instructions):
        jump = re.search(r"(?:BRA|s_c?branch).*(\.L\w+)", instruction)
        if jump and labels[jump[1]] <= i and any(map(_multiply_adds, instructions[labels[jump[1]] : i])):
            loops.append(instructions[labels[jump[1]] : i + 1])
    return min(loops, key=len, default=instructions)


ABOUT = """\
# The Triton kernels, as they are compiled

Made by `python -m benchmarks.triton_kernels --out benchmarks/results/triton-kernels.md` with Triton {version}. No GPU
was involved and nothing measured: compilers and disassemblers say this, so that a change that makes a kernel worse is
seen in review. A case is an operator with M×N×K of a linear layer, with images and weight of a convolution, or with a
weight. Registers and spilled bytes are a thread's, shared memory is a block's. Slots are the instructions of the main
loop, times threads, over the entries of the weight that are rebuilt there; of a kernel that multiplies no matrices,
all of its own over the entries of its tile. The budget is 128 slots for every 2048 multiply-adds, 1024 in TF32: what
an H100 hides behind its tensor cores, in tiles of at least 128 rows of x.
"""
HEAD = ("case", "kernel", "tile", "warps", "stages", "registers", "spilled", "shared", "slots", "budget", "products")


def table(kernels: Sequence[Kernel]) -> str:
    """Markdown: a section for each target, a row for each kernel of each case."""
    lines = [ABOUT.format(version=version("triton"))]
    for name, target in TARGETS.items():
        rows = [HEAD, ["---"] * len(HEAD), *(_row(kernel) for kernel in kernels if kernel.target == name)]
        lines += [f"## {name}: {target.gpu}, {target.shared_memory >> 10} KB", ""]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines[:-1]) + "\n"


def _row(kernel: Kernel) -> list[str]:
    if kernel.error:
        return [kernel.case, "**does not compile:** " + " ".join(kernel.error.split())]
    numbers = kernel.warps, kernel.stages, kernel.registers, kernel.spilled
    products = ("wgmma" if kernel.wgmma else "mma") if kernel.has_dot else ""
    return [
        *(kernel.case, kernel.name, "×".join(map(str, kernel.tile)), *map(str, numbers)),
        f"{kernel.shared / 1024:g} KB",
        "" if kernel.slots is None else f"{kernel.slots:.1f}",
        "" if kernel.budget is None else f"{kernel.budget:g}",
        products + (", **serialized**" if kernel.serialized else ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the table, in Markdown")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="by default all")
    parser.add_argument("--json", action="store_true", help="write the kernels to standard output as well")
    given = parser.parse_args()
    with ProcessPoolExecutor(len(given.targets), mp_context=get_context("spawn")) as pool:
        kernels = [kernel for compiled in pool.map(compiled_for, given.targets) for kernel in compiled]
    given.out.write_text(table(kernels))
    if given.json:
        json.dump([asdict(kernel) for kernel in kernels], sys.stdout)


if __name__ == "__main__":
    main()
