"""The CUDA C++ backend: csrc/cuda, whose products rebuild a subnetwork's weight as they multiply.

float16 and bfloat16 run on tensor cores. What these kernels do not serve, or more slowly, PyTorch's own compute from a
rebuilt weight: float32 and float64, gradients of weights, convolutions, whose weight is small beside the images that it
meets, and products with so many rows that rebuilding the weight costs less than the fused kernel does beyond cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.backend import dispatch, plan, rebuilt
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.bias import grad_bias
from partkernels.backend.reference.entries import gather_entries, scatter_entries
from partkernels.backend.reference.linear import (
    empty_linear,
    empty_linear_grad_input,
    empty_linear_grad_weight,
)

__all__ = [
    "conv2d", "conv2d_grad_input", "conv2d_grad_weight", "gather_entries", "grad_bias", "linear",
    "linear_grad_input", "linear_grad_weight", "scatter_entries",
]  # fmt: skip

_cuda = torch.ops.partkernels_cuda
Pair = tuple[int, int]

# What a fused product takes beyond the dense one on compute capability 9.0, as a fraction, by kind of defaults. Linear
# layers with zeros and uniform, and input gradients with uniform: measured on an H200, at 4096 and 8192 rows
# (benchmarks/results/h200.md). The others are benchmarks/results/predictions.md's, as much larger as those were.
_FUSED_OVERHEAD = {
    "linear": {"zeros": 0.23, "uniform": 0.6, "normal": 2.0, "stored": 0.8},
    "linear_grad_input": {"zeros": 0.4, "uniform": 1.0, "normal": 1.2, "stored": 0.8},
}
# The same on other GPUs, whose kernels wait for their products one after the other.
_FUSED_OVERHEAD_BEFORE_HOPPER = {"zeros": 0.5, "uniform": 0.9, "normal": 2.0, "stored": 0.5}


def __getattr__(name: str) -> Callable:
    """The operator of csrc/torch of this name, looked up when first asked for: the library is loaded then."""
    operator = getattr(_cuda, name).default
    globals()[name] = operator
    return operator


def is_estimated_faster(operator: str, kind: str, uses: int, is_hopper: bool) -> bool:
    """Whether the fused kernel is taken to be faster than rebuilding, for so many rows of x."""
    overhead = _FUSED_OVERHEAD[operator][kind] if is_hopper else _FUSED_OVERHEAD_BEFORE_HOPPER[kind]
    return overhead <= rebuilt.USES[kind] / uses


def _is_fused(operator: str, x: Tensor, weight: Tensor, kind: str) -> bool:
    """Whether the fused kernel computes a product of x's rows; notes why."""
    if (obstacle := _obstacle(weight)) is not None:
        is_fused, reason = False, obstacle
    elif plan.forced() is not None:
        is_fused, reason = plan.forced() != "rebuild", "asked for"
    else:
        uses = max(1, x.numel() // x.shape[-1])
        is_fused = is_estimated_faster(operator, kind, uses, _is_hopper(x.device))
        reason = f"estimated, not measured, for {uses} uses of each weight"
    dispatch.note_plan(f"fused ({reason})" if is_fused else f"rebuild, then cuBLAS ({reason})")
    return is_fused


@cache  # every product asks
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _obstacle(weight: Tensor) -> str | None:
    """Why the fused kernels do not serve a weight."""
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"they have no {str(weight.dtype).removeprefix('torch.')}"
    # They would gather its entries one by one, as often as there are tiles.
    return None if weight.stride(1) == 1 else "the weight's rows are not of neighbouring entries"


def _fitted(x: Tensor) -> Tensor:
    """x, or a copy where the kernels' copies of 16 bytes take only that: a sum's gradient has strides of 0."""
    entries = 8
    fits = x.stride(-1) == 1 and all(stride % entries == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits or x.shape[-1] % entries else x.clone(memory_format=torch.contiguous_format)


def _rebuild_into(out: Tensor, weight: Tensor, active: int, *partition) -> None:
    _cuda.subnetwork_weight_out(out, weight, active, *partition)


def _keep(out: Tensor, grad: Tensor, first: int, last: int, map: Tensor, count: int) -> None:
    _cuda.subnetwork_weight_grad_out(out, grad, first, last, map, count)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, update: int | None, map: Tensor,
    stored: Tensor | None, count: int, kind: str, *draw,
) -> Tensor:  # fmt: skip
    if active == count:
        return F.linear(x, weight, live_bias(bias, active))
    partition = map, stored, count, kind, *draw
    if _is_fused("linear", x, weight, kind):
        return _cuda.linear(_fitted(x), weight, bias, active, update, *partition)
    out = empty_linear(x, weight)
    return rebuilt.linear(_rebuild_into, out, x, weight, live_bias(bias, active), active, *partition)


def linear_grad_input(
    grad_output: Tensor, weight: Tensor, active: int, update: int | None, map: Tensor, stored: Tensor | None,
    count: int, kind: str, *draw,
) -> Tensor:  # fmt: skip
    if active == count:
        return grad_output @ weight
    partition = map, stored, count, kind, *draw
    if _is_fused("linear_grad_input", grad_output, weight, kind):
        return _cuda.linear_grad_input(_fitted(grad_output), weight, active, update, *partition)
    out = empty_linear_grad_input(grad_output, weight)
    return rebuilt.linear_grad_input(_rebuild_into, out, grad_output, weight, active, *partition)


def linear_grad_weight(grad_output: Tensor, x: Tensor, update: int, map: Tensor, count: int) -> Tensor:
    out = empty_linear_grad_weight(grad_output, x)
    return rebuilt.linear_grad_weight(_keep, out, grad_output, x, update, map, count)


def _subnetwork_weight(weight: Tensor, active: int, map: Tensor, stored: Tensor | None, count: int, *draw) -> Tensor:
    """A convolution's weight, rebuilt as a whole."""
    return weight if active == count else _cuda.subnetwork_weight(weight, active, map, stored, count, *draw)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    weight = _subnetwork_weight(weight, active, *partition)
    return rebuilt.conv2d(weight, x, bias, stride, padding, dilation, groups, active)


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: tuple[int, int, int, int], stride: Pair, padding: Pair,
    dilation: Pair, groups: int, active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    weight = _subnetwork_weight(weight, active, *partition)
    return rebuilt.conv2d_grad_input(weight, grad_output, input_size, stride, padding, dilation, groups)


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    update: int, map: Tensor, count: int,
) -> Tensor:  # fmt: skip
    return rebuilt.conv2d_grad_weight(
        _keep, grad_output, x, kernel_size, stride, padding, dilation, groups, update, map, count
    )
