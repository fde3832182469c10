"""The Triton backend's kernels, compiled without a GPU.

Operators are called on tensors without memory, for a simulated GPU. So each kernel is compiled for the arguments and
the configuration that it would get on such a GPU; none is launched.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from partbench.compiled_kernels.code import amdgcn, costs, dumped, functions, multiply_adds, sass
from partbench.compiled_kernels.kernels import Kernel
from partbench.compiled_kernels.without_gpu import META, TARGETS, Case, Launch, launches, pretend
from partbench.peers.layer import Layer

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def _square(rows: int, size: int, dtype: torch.dtype = BFLOAT16) -> Layer:
    return Layer((rows, size), (size, size), dtype=dtype, device=META)


LARGE, LARGE_FLOAT = _square(4096, 4096), _square(4096, 4096, FLOAT32)
CONVOLUTION = Layer((32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype=BFLOAT16, device=META)
STEPS = "sgd_steps", "adam_steps"
CASES = (
    *(Case("linear", LARGE, kind) for kind in ("zeros", "uniform", "normal", "stored")),
    *(Case("linear", LARGE, kind, bits) for bits in (1, 4, 8) for kind in ("zeros", "uniform")),
    Case("linear", _square(4096, 4096, torch.float16)),
    Case("linear", LARGE_FLOAT),
    *(Case("linear", LARGE, kind, tile=(128, 128, 8, 3)) for kind in ("zeros", "uniform")),
    Case("linear", _square(16, 8192), "zeros"),
    Case("linear", _square(16, 2048)),  # so few tiles that several programs split each sum
    *(Case("subnetwork_weight", LARGE, kind) for kind in ("zeros", "uniform")),
    Case("subnetwork_weight", CONVOLUTION),
    *(Case("subnetwork_weight_grad", layer) for layer in (LARGE, CONVOLUTION)),
    Case("embedding", LARGE),
    *(Case(step, _square(1, 4096, dtype)) for step in STEPS for dtype in (FLOAT32, BFLOAT16)),
    *(Case(f"{work}_entries", LARGE) for work in ("gather", "scatter", "exchange")),
    Case("gather_entries", CONVOLUTION),
    # Fewer rows of x use other tiles.
    *(Case("linear", _square(rows, 4096)) for rows in (64, 128, 512)),
)


def compiled(targets: Sequence[str] = tuple(TARGETS)) -> list[Kernel]:
    """Return the kernels of every case for each target."""
    with ProcessPoolExecutor(len(targets), mp_context=get_context("spawn")) as pool:
        return [kernel for kernels in pool.map(compiled_for, targets) for kernel in kernels]


def compiled_for(target: str) -> list[Kernel]:
    """Return the kernels of every case; the calling process keeps the target as its GPU from then on."""
    pretend(TARGETS[target])
    cases = [case for case in CASES if target == "sm_90" or case.tile is None]
    return [_compiled(target, case, launch) for case in cases for launch in launches(case)]


def _compiled(target: str, case: Case, launch: Launch) -> Kernel:
    launch.kernel.device_caches.clear()  # otherwise an earlier case's kernel is reused, without ptxas's log
    try:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments)
    except Exception as error:
        return Kernel(target, str(case), f"{type(error).__name__}: {error}")
    return _examined(target, case, kernel, log.getvalue())


def _examined(target: str, case: Case, kernel, log: str) -> Kernel:
    metadata, function, asm = kernel.metadata, kernel.src.fn, kernel.asm
    constants = {function.arg_names[i]: value for (i,), value in kernel.src.constants.items()}
    tile = tuple(constants[name] for name in ("DOWN", "ACROSS", "BLOCK") if name in constants)
    uses = 0  # how often a tile uses each entry of the weight
    if "KIND" in constants and "tt.dot" in asm["ttir"]:
        uses = tile[1]
    if TARGETS[target].backend == "cuda":
        registers, spilled = _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)
        ((_, _, listing),) = functions(dumped(asm["cubin"], "--dump-sass"))
        code = sass(listing)
    else:
        listing = asm["amdgcn"]
        registers, spilled = _number(r"vgpr_count: +(\d+)", listing), 4 * _number(r"vgpr_spill_count: +(\d+)", listing)
        code = amdgcn(listing)

    def rebuilt(loop) -> float:
        return multiply_adds(loop) / uses if uses else 0

    said = costs(code, metadata.num_warps, rebuilt, TARGETS[target].warp_size, tile)
    if "tt.dot" in asm["ttir"]:
        said.setdefault("products", "mma")
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
        serialized=" ".join(re.findall("wgmma.mma_async instructions are serialized due to (.*) in the function", log)),
        **said,
    )


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])
