"""conv2d: a convolution with a subnetwork's weight, computed from the packed map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels import dispatch
from partkernels.operators import (
    OWNERS,
    PARTITION,
    InputError,
    autocast,
    check_input,
    check_live,
    check_weight,
    define,
    differentiate,
)
from partkernels.partition import Partition
from partkernels.subnetwork_weight import select

GEOMETRY = "int[2] stride, int[2] padding, int[2] dilation, int groups"


_forward = define("conv2d", f"Tensor x, Tensor weight, Tensor? bias, {GEOMETRY}, int active, int? update, {PARTITION}")
_grad_input = define(
    "conv2d_grad_input",
    f"Tensor grad_output, Tensor weight, SymInt[4] input_size, {GEOMETRY}, int active, int? update, {PARTITION}",
)
_grad_weight = define(
    "conv2d_grad_weight", f"Tensor grad_output, Tensor x, int[2] kernel_size, {GEOMETRY}, int update, {OWNERS}"
)
autocast("conv2d")


def _setup_context(ctx, inputs, output):
    x, weight, _, *ctx.geometry, ctx.active, ctx.update, map, stored = inputs[:11]
    ctx.rest = inputs[11:]
    ctx.input_size, ctx.kernel_size = x.shape, weight.shape[2:]
    needs_weight_grad = ctx.update is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight_grad else None, weight if ctx.needs_input_grad[0] else None, map, stored)


def _backward(ctx, grad):
    x, weight, map, stored = ctx.saved_tensors
    count, backend = ctx.rest[0], ctx.rest[-1]
    grad_x = grad_weight = grad_bias = None
    if weight is not None:
        grad_x = _grad_input(
            grad, weight, ctx.input_size, *ctx.geometry, ctx.active, ctx.update, map, stored, *ctx.rest
        )
    if x is not None:
        grad_weight = _grad_weight(grad, x, ctx.kernel_size, *ctx.geometry, ctx.update, map, count, backend)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.sum((0, 2, 3))
    return grad_x, grad_weight, grad_bias, *[None] * 16


differentiate("conv2d", _setup_context, _backward)


def _grad_input_setup_context(ctx, inputs, output):
    grad_output, weight, _, *ctx.geometry, ctx.active, ctx.update, map, stored = inputs[:11]
    ctx.rest = inputs[11:]
    ctx.kernel_size = weight.shape[2:]
    ctx.save_for_backward(grad_output, weight, map, stored)


def _grad_input_backward(ctx, grad):
    grad_output, weight, map, stored = ctx.saved_tensors
    grad_grad_output = _forward(grad, weight, None, *ctx.geometry, ctx.active, ctx.update, map, stored, *ctx.rest)
    grad_weight = None
    if ctx.update is not None and ctx.needs_input_grad[1]:
        grad_weight = _grad_weight(
            grad_output, grad, ctx.kernel_size, *ctx.geometry, ctx.update, map, ctx.rest[0], ctx.rest[-1]
        )
    return grad_grad_output, grad_weight, *[None] * 17


differentiate("conv2d_grad_input", _grad_input_setup_context, _grad_input_backward)


def _grad_weight_setup_context(ctx, inputs, output):
    grad_output, x, _, *ctx.geometry, ctx.update, map, ctx.count, ctx.backend = inputs
    ctx.save_for_backward(grad_output, x, map)


def _grad_weight_backward(ctx, grad):
    grad_output, x, map = ctx.saved_tensors
    grad = select(grad, ctx.update, ctx.update, map, ctx.count, ctx.backend)
    grad_grad_output = F.conv2d(x, grad, None, *ctx.geometry)
    grad_x = torch.nn.grad.conv2d_input(x.shape, grad, grad_output, *ctx.geometry)
    return grad_grad_output, grad_x, *[None] * 9


differentiate("conv2d_grad_weight", _grad_weight_setup_context, _grad_weight_backward)


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) == 1:
        pair *= 2
    if len(pair) != 2 or any(n < least for n in pair):
        raise ValueError(f"{name}={value!r}; pass an int or a pair of ints, each at least {least}.")
    return pair


def _resolve_padding(x: Tensor, weight: Tensor, padding, stride, dilation) -> tuple[Tensor, tuple[int, int]]:
    """The padding as a pair; where 'same' needs one more at the end than at the start, x is padded here."""
    if padding == "valid":
        return x, (0, 0)
    if padding != "same":
        if isinstance(padding, str):
            raise ValueError(f"padding={padding!r}; pass an int, a pair of ints, 'valid' or 'same'.")
        return x, _pair("padding", padding, least=0)
    if stride != (1, 1):
        raise ValueError(f"padding='same' with stride={stride}; 'same' needs stride 1.")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):
        x = F.pad(x, (0, odd[1], 0, odd[0]))
    return x, (total[0] // 2, total[1] // 2)


def conv2d(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """F.conv2d(x, w_s^(active), bias, ...), without materialising the subnetwork's weight.

    Gradients and what is saved for backward are as in `linear`.

    Args:
        x: [batch, in_channels, height, width] or [in_channels, height, width], the weight's dtype; any strides.
        weight: [out_channels, in_channels / groups, kernel_height, kernel_width], floating point; any strides.
        partition: of the weight.
        active: k, 1..C: partitions 1..k are live, the others at their default.
        update: the partition that receives a gradient, 1..active, or None.
        bias: [out_channels] or None.
        stride, dilation: an int or a pair of ints, at least 1.
        padding: an int or a pair of ints, at least 0, 'valid' or 'same'.
        groups: divides both numbers of channels.

    Returns:
        [batch, out_channels, out_height, out_width], or without batch as x; channels_last if x is.

    Raises:
        ValueError: active or update is out of range, or the partition or another argument does not fit the weight.
        TypeError: the weight is not floating point, or stored defaults have another dtype.
        InputError: x or bias does not fit the weight, in shape, dtype or device; both a ValueError and, as torch raises
            for it, a RuntimeError.

    Example:
        >>> import torch
        >>> p = Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
        >>> conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), p, active=1, padding="same").shape
        torch.Size([1, 4, 8, 8])
    """
    check_weight(weight, partition)
    check_live(partition, active, update)
    check_input("x", x, weight)
    if weight.dim() != 4:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}; conv2d takes [out, in / groups, height, width].")
    out_channels, in_channels = weight.shape[0], weight.shape[1] * groups
    if groups < 1 or out_channels % groups:
        raise ValueError(f"groups={groups} does not divide the weight's {out_channels} output channels.")
    if x.dim() not in (3, 4) or x.shape[-3] != in_channels:
        raise InputError(
            f"x has shape {tuple(x.shape)}; this weight with groups={groups} takes"
            f" [batch, {in_channels}, height, width] or [{in_channels}, height, width]."
        )
    if bias is not None:
        check_input("bias", bias, weight)
        if tuple(bias.shape) != (out_channels,):
            raise InputError(f"bias has shape {tuple(bias.shape)}; this weight takes [{out_channels}].")
    stride, dilation = _pair("stride", stride, least=1), _pair("dilation", dilation, least=1)
    batched = x if x.dim() == 4 else x.unsqueeze(0)
    batched, padding = _resolve_padding(batched, weight, padding, stride, dilation)
    for size, kernel, p, d in zip(batched.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if size + 2 * p < d * (kernel - 1) + 1:
            raise InputError(
                f"the padded input of size {size + 2 * p} is smaller than the kernel, {d * (kernel - 1) + 1} with"
                f" dilation {d}; pass a larger image or more padding."
            )
    y = _forward(
        batched, weight, bias, stride, padding, dilation, groups, active, update, *partition.flat(),
        dispatch.requested(),
    )  # fmt: skip
    return y if x.dim() == 4 else y.squeeze(0)
