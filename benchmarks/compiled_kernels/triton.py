"""Every kernel of the Triton backend as it is compiled for GPUs that are not there.

Operators are called on tensors without memory, for a GPU that is not there. So each kernel is compiled for the very
arguments and configuration that such a GPU would give it; none is launched.
"""

from __future__ import annotations

import contextlib
import io
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from types import SimpleNamespace

import torch

from benchmarks.compiled_kernels.kernels import Kernel, costs, dumped, functions
from benchmarks.layer import Layer
from partkernels import packed_map
from partkernels.defaults import Normal, Stored, Uniform, Zeros
from partkernels.partition import Partition

META = torch.device("meta")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# C of a map of so many bits.
COUNTS = {1: 2, 2: 3, 4: 16, 8: 32}


@dataclass(frozen=True)
class Target:
    """A GPU that Triton compiles for; shared_memory is a block's, in bytes."""

    gpu: str
    multiprocessors: int
    shared_memory: int
    backend: str
    arch: int | str
    warp_size: int = 32


TARGETS = {
    "sm_90": Target("H100", 132, 227 << 10, "cuda", 90),
    "sm_80": Target("A100", 108, 163 << 10, "cuda", 80),
    "gfx942": Target("MI300X", 304, 64 << 10, "hip", "gfx942", warp_size=64),
}


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    Attributes:
        operator: its name.
        layer: what it works on.
        bits: of the map.
        defaults: of what is not live.
        tile: down, across, warps and stages of a plans.Config, for sm_90 instead of its default.
    """

    operator: str
    layer: Layer
    defaults: str = "uniform"
    bits: int = 2
    tile: tuple[int, int, int, int] | None = None

    def __str__(self) -> str:
        has_x = self.operator.startswith(self.layer.operator)
        shape = self.layer.shape if has_x else "×".join(map(str, self.layer.weight))
        parts = [self.operator, shape, str(self.layer.dtype).removeprefix("torch."), f"{self.bits}-bit map"]
        if not self.operator.endswith(("grad_weight", "weight_grad", "step")):
            parts.append(self.defaults)
        return ", ".join(parts)


def _square(rows: int, size: int, dtype: torch.dtype = BFLOAT16) -> Layer:
    return Layer((rows, size), (size, size), dtype=dtype, device=META)


LARGE, LARGE_FLOAT = _square(4096, 4096), _square(4096, 4096, FLOAT32)
CONVOLUTION = Layer((32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype=BFLOAT16, device=META)
MIDDLE = (
    *(Case("linear", _square(rows, size)) for size in (4096, 8192) for rows in (16, 64, 128, 512)),
    Case("linear", _square(512, 4096), "normal"),
    *(Case("linear_grad_input", _square(rows, 4096)) for rows in (16, 128, 512)),
)
# What the predictions need, which are for Hopper.
FOR_HOPPER = (
    *MIDDLE,
    *(
        Case(operator, LARGE, kind)
        for operator in ("linear_grad_input", "subnetwork_weight")
        for kind in ("normal", "stored")
    ),
)
CASES = (
    *(Case("linear", LARGE, kind) for kind in ("zeros", "uniform", "normal", "stored")),
    *(Case("linear", LARGE, kind, bits) for bits in (1, 4, 8) for kind in ("zeros", "uniform")),
    Case("linear", _square(4096, 4096, torch.float16)),
    Case("linear", LARGE_FLOAT),
    *(Case("linear", LARGE, kind, tile=(128, 128, 8, 3)) for kind in ("zeros", "uniform")),
    Case("linear", _square(16, 8192), "zeros"),
    Case("linear", _square(16, 2048)),  # so few tiles that several programs share each sum
    *(Case("linear_grad_input", LARGE, kind) for kind in ("zeros", "uniform")),
    Case("linear_grad_weight", LARGE),
    *(Case(f"conv2d{work}", CONVOLUTION) for work in ("", "_grad_input", "_grad_weight")),
    *(Case("subnetwork_weight", LARGE, kind) for kind in ("zeros", "uniform")),
    Case("subnetwork_weight_grad", LARGE),
    Case("embedding", LARGE),
    *(Case(step, _square(1, 4096, dtype)) for step in ("sgd_step", "adam_step") for dtype in (FLOAT32, BFLOAT16)),
    *FOR_HOPPER,
)


def compiled() -> list[Kernel]:
    """The kernels of every case for every target."""
    with ProcessPoolExecutor(len(TARGETS), mp_context=get_context("spawn")) as pool:
        return [kernel for kernels in pool.map(compiled_for, TARGETS) for kernel in kernels]


def compiled_for(target: str) -> list[Kernel]:
    """The kernels of every case; the process that calls this has the target for its GPU ever after."""
    from triton.runtime.jit import JITFunction

    _pretend(TARGETS[target])
    run, kernels = JITFunction.run, []

    def compile_only(function, *args, warmup, **kwargs):
        function.device_caches.clear()  # else what an earlier case compiled comes back, with nothing said of it
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(function, *args, warmup=True, **kwargs)
        kernels.append(_examined(target, case, kernel, log.getvalue()))

    JITFunction.run = compile_only
    for case in CASES:
        if target != "sm_90" and (case.tile is not None or case in FOR_HOPPER):
            continue
        try:
            _call(case)
        except Exception as error:
            kernels.append(Kernel(target, str(case), f"{type(error).__name__}: {error}"))
    return kernels


def _pretend(target: Target) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    driver = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 0, "get_current_target": lambda: gpu}
    triton.runtime.driver.set_active(SimpleNamespace(**driver))
    # ptxas tells of spills and of products that wait only while it compiles.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    # The backend asks for it when it is imported.
    torch.version.hip = "7" if target.backend == "hip" else None
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    from partkernels.triton import launch

    launch.gpu = lambda _: launch.Gpu(target.gpu, target.multiprocessors, target.shared_memory, target.arch == 90)


def _call(case: Case) -> None:
    from partkernels import triton as backend
    from partkernels.triton.plans import Config, use_plan

    layer, count = case.layer, COUNTS[case.bits]
    memory = torch.channels_last if layer.operator == "conv2d" else torch.contiguous_format
    shapes = layer.x, layer.weight, layer.y
    x, weight, grad = (torch.empty(shape, dtype=layer.dtype, device=META, memory_format=memory) for shape in shapes)
    rows, cols = packed_map.matrix_shape(layer.weight)
    map = torch.empty(rows, packed_map.row_bytes(cols, case.bits), dtype=torch.uint8, device=META)
    kinds = {"zeros": Zeros(), "uniform": Uniform(0.02, 0), "normal": Normal(0.02, 0), "stored": Stored(weight)}
    active, update, owners = min(2, count - 1), 2, (map, count)
    subnetwork = (active, update, *Partition(layer.weight, count, map, kinds[case.defaults]).flat())
    geometry = *((n, n) for n in (layer.stride, layer.padding, layer.dilation)), layer.groups
    arguments = {
        "linear": (x, weight, None, *subnetwork),
        "linear_grad_input": (grad, weight, *subnetwork),
        "linear_grad_weight": (grad, x, update, *owners),
        "conv2d": (x, weight, None, *geometry, *subnetwork),
        "conv2d_grad_input": (grad, weight, layer.x, *geometry, *subnetwork),
        "conv2d_grad_weight": (grad, x, layer.weight[2:], *geometry, update, *owners),
        "subnetwork_weight": (weight, active, *subnetwork[2:]),
        "subnetwork_weight_grad": (weight, 1, active, *owners),
        "embedding": (weight, torch.empty(4096, dtype=torch.int64, device=META), -1, *subnetwork),
        "sgd_step": (weight, weight, weight, *owners, update, 0.1, 0.9, 0.01, False),
        "adam_step": (weight, weight, weight, weight, *owners, update, 1, 0.1, 0.9, 0.999, 1e-8, 0.01, False),
    }
    with use_plan("fused" if case.tile is None else Config(*case.tile)):
        getattr(backend, case.operator)(*arguments[case.operator])


def _examined(target: str, case: Case, kernel, log: str) -> Kernel:
    metadata, function, asm = kernel.metadata, kernel.src.fn, kernel.asm
    constants = {function.arg_names[i]: value for (i,), value in kernel.src.constants.items()}
    tile = tuple(constants[name] for name in ("DOWN", "ACROSS", "BLOCK") if name in constants)
    uses = 0  # of each entry of the weight in a tile
    if "KIND" in constants and "tt.dot" in asm["ttir"]:
        uses = tile[0] if case.operator.endswith("grad_input") else tile[1]
    if TARGETS[target].backend == "cuda":
        registers, spilled = _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)
        ((_, _, code),) = functions(dumped(asm["cubin"], "--dump-sass"))
        said = costs(code, target, metadata.num_warps, lambda loop: loop.multiply_adds / uses if uses else 0, tile=tile)
        if "tt.dot" in asm["ttir"]:
            said.setdefault("products", "mma")
    else:
        code = asm["amdgcn"]
        registers, spilled = _number(r"vgpr_count: +(\d+)", code), 4 * _number(r"vgpr_spill_count: +(\d+)", code)
        threads = metadata.num_warps * TARGETS[target].warp_size
        said = _amd_costs(code, threads, metadata.num_warps, uses, tile)
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


def _amd_costs(code: str, threads: int, warps: int, uses: int, tile: tuple[int, ...]) -> dict:
    """Of AMD's code the instructions are counted, without what each costs."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for label, instruction in re.findall(r"^(\.L\w+):|^\t([a-z]\w+.*)", code, re.M):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(instruction)
    loops = []
    for i, instruction in enumerate(instructions):
        jump = re.search(r"s_c?branch.*(\.L\w+)", instruction)
        if jump and labels[jump[1]] <= i and any("v_mfma" in each for each in instructions[labels[jump[1]] : i]):
            loops.append(instructions[labels[jump[1]] : i + 1])
    if not loops:
        return {"slots": len(instructions) * threads / prod(tile), "pipe": "issue"}
    loop = min(loops, key=len)
    shapes = (re.search(r"v_mfma_f32_(\d+)x(\d+)x(\d+)", each) for each in loop)
    multiply_adds = warps * sum(prod(map(int, shape.groups())) for shape in shapes if shape)
    slots = len(loop) * threads * uses / multiply_adds if uses else None
    return {"products": "mma", "slots": slots, "pipe": "issue"}
