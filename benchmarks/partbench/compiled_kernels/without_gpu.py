"""Calls of operators on tensors without memory, for a simulated GPU, to record the kernels that they launch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from partbench.peers.layer import Layer
from partkernels.arguments import matrix_shape, row_bytes
from partkernels.defaults import Normal, Stored, Uniform, Zeros
from partkernels.partition import Partition

META = torch.device("meta")
# C for each number of bits of the map.
COUNTS = {0: 1, 1: 2, 2: 3, 4: 16, 8: 32}
# The assumed result of any count on the GPU, and the assumed address of any tensor.
COUNTED = 1000
ADDRESS = 1 << 40


@dataclass(frozen=True)
class Target:
    """A GPU that Triton compiles for; shared_memory is in bytes per block."""

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
        layer: the operands' shapes; an embedding has as many ids as x has rows.
        bits: of the map; 0 for an optimiser's step without a map.
        defaults: the default values of inactive weights.
        tile: down, across, warps and stages of a plans.Config, for sm_90 instead of its default.
        tensors: the number of such weights in an optimiser's step.
    """

    operator: str
    layer: Layer
    defaults: str = "uniform"
    bits: int = 2
    tile: tuple[int, int, int, int] | None = None
    tensors: int = 1

    def __str__(self) -> str:
        has_x = self.operator.startswith(self.layer.operator)
        shape = self.layer.shape if has_x else "×".join(map(str, self.layer.weight))
        parts = [self.operator, shape, str(self.layer.dtype).removeprefix("torch."), f"{self.bits}-bit map"]
        if not self.operator.endswith(("grad_weight", "weight_grad", "steps", "entries")):
            parts.append(self.defaults)
        return ", ".join(parts)


def call(case: Case) -> None:
    from partkernels.backend.plan import use_plan
    from partkernels.backend.triton import operators as backend
    from partkernels.backend.triton.plans import Config

    layer, count = case.layer, COUNTS[case.bits]
    # Operators that take only a weight get it contiguous, as PyTorch's layers create it.
    memory = torch.channels_last if case.operator.startswith("conv2d") else torch.contiguous_format
    shapes = layer.x, layer.weight, layer.y
    x, weight, grad = (torch.empty(shape, dtype=layer.dtype, device=META, memory_format=memory) for shape in shapes)
    rows, cols = matrix_shape(layer.weight)
    map = None
    if case.bits:
        map = torch.empty(rows, row_bytes(cols, case.bits), dtype=torch.uint8, device=META)
    kinds = {"zeros": Zeros(), "uniform": Uniform(0.02, 0), "normal": Normal(0.02, 0), "stored": Stored(weight)}
    active, update, owners = min(2, count - 1), 2, (map, count)
    n = case.tensors
    weights, owned = [weight] * n, ([map] * n, [count] * n)
    values = [weight.new_empty(COUNTED)], [weight.new_empty(COUNTED)]
    partition = () if map is None else Partition(layer.weight, count, map, kinds[case.defaults]).flat()
    subnetwork = active, update, *partition
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
        "embedding": (weight, torch.empty(layer.x[0], dtype=torch.int64, device=META), -1, *subnetwork),
        "gather_entries": (weight, update, *owners),
        "scatter_entries": (weight, weight.new_empty(COUNTED), update, *owners),
        "exchange_entries": ([weight.view(-1)], [weight.new_empty(COUNTED, dtype=torch.int32)], *values),
        "sgd_steps": (*[weights] * 3, *owned, update, 0.1, 0.9, 0.01, False),
        "adam_steps": (*[weights] * 4, *owned, update, [1] * n, 0.1, 0.9, 0.999, 1e-8, 0.01, False),
    }
    with use_plan("fused" if case.tile is None else Config(*case.tile)):
        getattr(backend, case.operator)(*arguments[case.operator])


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and its arguments and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the kernel's name with its module."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__}"


def launches(case: Case) -> list[Launch]:
    """Return the kernel launches of a call, without executing them."""
    from triton.runtime.jit import KernelInterface

    found, item = [], torch.Tensor.item

    def record(kernel, grid):
        def launch(*args, **kwargs):
            named = dict(zip(kernel.arg_names, args, strict=False))
            found.append(Launch(kernel, grid, named | kwargs))

        return launch

    # PyTorch's cumsum of tensors without memory builds a square matrix; its size can exceed 64 bits.
    pretended = {
        "cumsum": lambda counts, _: counts.new_empty(counts.shape, dtype=torch.int64),
        "item": lambda number: COUNTED if number.is_meta else item(number),
        "data_ptr": lambda _: ADDRESS,
    }
    with patch.object(KernelInterface, "__getitem__", record), patch.multiple(torch.Tensor, **pretended):
        call(case)
    return found


def pretend(target: Target) -> None:
    """Make the target this process's GPU from then on."""
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    driver = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 0, "get_current_target": lambda: gpu}
    triton.runtime.driver.set_active(SimpleNamespace(**driver))
    # ptxas reports spills and serialized products only while it compiles.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    # The backend reads this when it is imported.
    torch.version.hip = "7" if target.backend == "hip" else None
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    from partkernels.backend.triton import launch

    launch.gpu = lambda _: launch.Gpu(target.gpu, target.multiprocessors, target.shared_memory, target.arch == 90)
