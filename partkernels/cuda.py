"""The CUDA C++ backend: csrc/cuda, whose products rebuild a subnetwork's weight as they multiply.

float16 and bfloat16 run on tensor cores. Convolutions are PyTorch's own, for a weight that is rebuilt as a whole: it is
small beside the images that it meets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.bias import live_bias
from partkernels.outputs import memory_format
from partkernels.reference import linear_grad_bias

__all__ = ["conv2d", "conv2d_grad_input", "conv2d_grad_weight", "linear_grad_bias"]

_cuda = torch.ops.partkernels_cuda
Pair = tuple[int, int]


def __getattr__(name: str) -> Callable:
    """The operator of csrc/torch/cuda.cpp of this name, looked up when first asked for: the library is loaded then."""
    operator = getattr(_cuda, name).default
    globals()[name] = operator
    return operator


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    rebuilt = _cuda.subnetwork_weight(weight, active, *partition)
    y = F.conv2d(x, rebuilt, live_bias(bias, active), stride, padding, dilation, groups)
    return y.contiguous(memory_format=memory_format(x))


def conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: tuple[int, int, int, int], stride: Pair, padding: Pair,
    dilation: Pair, groups: int, active: int, update: int | None, *partition,
) -> Tensor:  # fmt: skip
    rebuilt = _cuda.subnetwork_weight(weight, active, *partition)
    grad = torch.nn.grad.conv2d_input(input_size, rebuilt, grad_output, stride, padding, dilation, groups)
    return grad.contiguous(memory_format=memory_format(grad_output))


def conv2d_grad_weight(
    grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    update: int, map: Tensor, count: int,
) -> Tensor:  # fmt: skip
    shape = grad_output.shape[1], x.shape[1] // groups, *kernel_size
    grad = torch.nn.grad.conv2d_weight(x, shape, grad_output, stride, padding, dilation, groups)
    return _cuda.subnetwork_weight_grad(grad, update, update, map, count)
