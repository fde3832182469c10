"""conv2d and its gradients: the weight is rebuilt as a whole, and PyTorch's own kernels compute with it.

Fused Triton kernels took 12 to 14 times as long as cuDNN on an H200 (benchmarks/results/h200.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels.backend import dispatch, rebuilt
from partkernels.backend.reference.conv2d import memory_format
from partkernels.backend.triton.subnetwork_weight import keep, rebuild_into

Pair = tuple[int, int]
PLAN = "rebuild, then the vendor's kernel (a convolution's weight is small beside its images)"


def _subnetwork_weight(
    weight: Tensor, like: Tensor, active: int, map: Tensor, stored: Tensor | None, count: int, *draw
) -> Tensor:
    """The subnetwork's weight, in the memory format of the images."""
    if active == count:
        return weight
    dispatch.note_plan(PLAN)
    out = torch.empty_like(weight, memory_format=memory_format(like))
    return rebuild_into(out, weight, active, map, stored, count, *draw)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    weight = _subnetwork_weight(weight, x, active, *partition)
    return rebuilt.conv2d(weight, x, bias, stride, padding, dilation, groups, active)


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: tuple[int, int, int, int], stride: Pair, padding: Pair,
    dilation: Pair, groups: int, active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    weight = _subnetwork_weight(weight, grad_output, active, *partition)
    return rebuilt.conv2d_grad_input(weight, grad_output, input_size, stride, padding, dilation, groups)


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    update: int, map: Tensor, count: int,
) -> Tensor:  # fmt: skip
    dispatch.note_plan(PLAN)
    return rebuilt.conv2d_grad_weight(
        keep, grad_output, x, kernel_size, stride, padding, dilation, groups, update, map, count
    )
