"""The empty output of each operator: its shape, dtype and memory format, from the operator's own arguments.

Fake tensors are these, and kernels write into them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def memory_format(x: Tensor) -> torch.memory_format:
    """What an image-like output takes from an input, as in torch's own convolution."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def _image(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=memory_format(like))


def subnetwork_weight(weight, *_):
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


learning_weight = subnetwork_weight


def subnetwork_weight_grad(grad, *_):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def embedding(weight, ids, *_):
    return weight.new_empty(*ids.shape, weight.shape[1])


def linear(x, weight, *_):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear_grad_input(grad_output, weight, *_):
    return grad_output.new_empty(*grad_output.shape[:-1], weight.shape[1])


def linear_grad_bias(grad_output, update, count, *_):
    return grad_output.new_empty(count, grad_output.shape[-1])


def linear_grad_weight(grad_output, x, *_):
    return x.new_empty(grad_output.shape[-1], x.shape[-1])


def _spatial(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def conv2d(x, weight, bias, stride, padding, dilation, groups, *_):
    spatial = map(_spatial, x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return _image(x, x.shape[0], weight.shape[0], *spatial)


def conv2d_grad_input(grad_output, weight, input_size, *_):
    return _image(grad_output, *input_size)


def conv2d_grad_weight(grad_output, x, kernel_size, stride, padding, dilation, groups, *_):
    return x.new_empty(grad_output.shape[1], x.shape[1] // groups, *kernel_size)
