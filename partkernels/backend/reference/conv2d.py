from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.backend.bias import live_bias
from partkernels.backend.reference.subnetwork_weight import subnetwork_weight, subnetwork_weight_grad

Pair = tuple[int, int]


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format that the output takes from an input, as in torch's own convolution."""
    if torch._C._functorch.is_batchedtensor(x):  # under vmap, tensors do not report their strides
        return torch.contiguous_format
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def _empty_images(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=memory_format(like))


def _output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def conv2d_shape(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> tuple[int, ...]:
    """Return the shape of the output."""
    return x.shape[0], weight.shape[0], *map(_output_size, x.shape[2:], weight.shape[2:], stride, padding, dilation)


def empty_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair, groups: int, *_: object
) -> Tensor:
    return _empty_images(x, *conv2d_shape(x, weight, stride, padding, dilation))


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    active: int,
    update: int | None,
    *partition: Any,
) -> Tensor:
    """Convolve x with w_s^(k) and add bias; a bias [C, out_channels] contributes b_1 + ... + b_k."""
    subnetwork = subnetwork_weight(weight, active, *partition)
    y = F.conv2d(x, subnetwork, live_bias(bias, active), stride, padding, dilation, groups)
    return y.contiguous(memory_format=memory_format(x))


def empty_conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: tuple[int, int, int, int], *_: object
) -> Tensor:
    return _empty_images(grad_output, *input_size)


def conv2d_grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: tuple[int, int, int, int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    active: int,
    update: int | None,
    *partition: Any,
) -> Tensor:
    """Return the gradient of conv2d's input: the transposed convolution of grad_output with w_s^(k)."""
    subnetwork = subnetwork_weight(weight, active, *partition)
    grad = torch.nn.grad.conv2d_input(input_size, subnetwork, grad_output, stride, padding, dilation, groups)
    return grad.contiguous(memory_format=memory_format(grad_output))


def empty_conv2d_grad_weight(
    grad_output: Tensor,
    x: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    *_: object,
) -> Tensor:
    return x.new_empty(grad_output.shape[1], x.shape[1] // groups, *kernel_size)


def conv2d_grad_weight(
    grad_output: Tensor,
    x: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    update: int,
    map: Tensor,
    count: int,
) -> Tensor:
    """Return the gradient of conv2d's weight at the entries of partition update, 0 elsewhere."""
    shape = (grad_output.shape[1], x.shape[1] // groups, *kernel_size)
    grad = torch.nn.grad.conv2d_weight(x, shape, grad_output, stride, padding, dilation, groups)
    return subnetwork_weight_grad(grad, update, update, map, count)
