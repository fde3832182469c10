"""Operators for convolutions with a subnetwork's weight, shared by conv1d, conv2d and their transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.arguments import InputError, check_live, convolution_geometry, of_each
from partkernels.backend import dispatch
from partkernels.backend.bias import learning_bias
from partkernels.backend.reference.conv2d import empty_conv2d, empty_conv2d_grad_input, empty_conv2d_grad_weight
from partkernels.operators import nested
from partkernels.operators.bias import grad_of_rows
from partkernels.operators.checks import check_bias, check_inputs, check_narrow, check_weight
from partkernels.operators.registration import OWNERS, PARTITION, autocast, define, differentiate, is_wanted
from partkernels.operators.subnetwork_weight import select
from partkernels.partition import NestedPartition, Partition

GEOMETRY = "int[2] stride, int[2] padding, int[2] dilation, int groups"


_forward = define(
    "conv2d", f"Tensor x, Tensor weight, Tensor? bias, {GEOMETRY}, int active, int? update, {PARTITION}", empty_conv2d
)
_grad_input = define(
    "conv2d_grad_input",
    f"Tensor grad_output, Tensor weight, SymInt[4] input_size, {GEOMETRY}, int active, int? update, {PARTITION}",
    empty_conv2d_grad_input,
)
_grad_weight = define(
    "conv2d_grad_weight",
    f"Tensor grad_output, Tensor x, int[2] kernel_size, {GEOMETRY}, int update, {OWNERS}",
    empty_conv2d_grad_weight,
)
autocast("conv2d")
autocast("conv2d_grad_input")  # the transposed convolution


def _setup_context(ctx, inputs, output):
    x, weight, bias, *ctx.geometry, ctx.active, ctx.update, map, stored = inputs[:11]
    ctx.rest = inputs[11:]
    ctx.has_rows = bias is not None and bias.dim() == 2
    ctx.input_size, ctx.kernel_size = x.shape, weight.shape[2:]
    needs_weight_grad = ctx.update is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight_grad else None, weight if ctx.needs_input_grad[0] else None, map, stored)


def _backward(ctx, grad):
    x, weight, map, stored = ctx.saved_tensors
    count, backend = ctx.rest[0], ctx.rest[-1]
    grad_x = grad_weight = grad_bias = None
    if weight is not None and is_wanted(ctx, 0):
        grad_x = _grad_input(
            grad, weight, ctx.input_size, *ctx.geometry, ctx.active, ctx.update, map, stored, *ctx.rest
        )
    if x is not None and is_wanted(ctx, 1):
        grad_weight = _grad_weight(grad, x, ctx.kernel_size, *ctx.geometry, ctx.update, map, count, backend)
    if ctx.needs_input_grad[2]:
        grad_bias = grad_of_rows(grad, 1, ctx.update, count, backend) if ctx.has_rows else grad.sum((0, 2, 3))
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
    grad_output, x, _, *ctx.geometry, ctx.update, map, ctx.num_partitions, ctx.backend = inputs
    ctx.save_for_backward(grad_output, x, map)


def _grad_weight_backward(ctx, grad):
    grad_output, x, map = ctx.saved_tensors
    grad = select(grad, ctx.update, ctx.update, map, ctx.num_partitions, ctx.backend)
    grad_grad_output = F.conv2d(x, grad, None, *ctx.geometry)
    grad_x = torch.nn.grad.conv2d_input(x.shape, grad, grad_output, *ctx.geometry)
    return grad_grad_output, grad_x, *[None] * 9


differentiate("conv2d_grad_weight", _grad_weight_setup_context, _grad_weight_backward)


SPATIAL = {1: "length", 2: "height, width"}


def _check_operands(
    x: Tensor, weight: Tensor, partition: Partition, active: int, update: int | None, bias: Tensor | None, narrow: bool
) -> None:
    """Raise unless a convolution's arguments fit each other, apart from their shapes."""
    check_weight(weight, partition)
    check_live(partition, active, update)
    check_inputs(x, bias, weight)
    check_narrow(narrow, partition)


# A nested partition and its active subnetwork, for which x may have only the active channels.
Nested = tuple[NestedPartition, int] | None


def _check_shapes(
    x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None, count: int, groups: int, is_transposed: bool,
    dims: int, live: Nested,
) -> None:  # fmt: skip
    """Raise unless a convolution with `dims` spatial dimensions can have these shapes."""
    spatial = SPATIAL[dims]
    if len(weight) != 2 + dims:
        name, channels = ("conv_transpose", "in, out / groups") if is_transposed else ("conv", "out, in / groups")
        raise ValueError(f"the weight has shape {tuple(weight)}; {name}{dims}d takes [{channels}, {spatial}].")
    first, second = weight[:2]
    if groups < 1 or first % groups:
        of = "input" if is_transposed else "output"
        raise ValueError(f"groups={groups} does not divide the weight's {first} {of} channels.")
    taken, made = (first, second * groups) if is_transposed else (second * groups, first)
    fits = len(x) in (1 + dims, 2 + dims)
    if live is not None and fits and x[-1 - dims] != taken:
        partition, active = live
        taken = nested.inputs(partition, groups, is_transposed).number(active)
    if not fits or x[-1 - dims] != taken:
        raise InputError(
            f"x has shape {tuple(x)}; this weight with groups={groups} takes"
            f" [batch, {taken}, {spatial}] or [{taken}, {spatial}]."
        )
    check_bias(bias, count, made)


def _looked_up(function: Callable[..., tuple]) -> Callable[..., tuple]:
    """Wrap a function of shapes as a function of tensors, with a cache: 5 us less per call."""
    known = lru_cache(maxsize=1024, typed=True)(function)

    def of(dims: int, x: Tensor, bias: Tensor | None, partition: Partition, active: int, *asked) -> tuple:
        shapes = dims, x.shape, partition.shape, None if bias is None else bias.shape, partition.num_partitions
        if isinstance(partition, NestedPartition):
            return function(*shapes, *asked, live=(partition, active))
        if torch.compiler.is_compiling():
            return function(*shapes, *asked)
        try:
            return known(*shapes, *asked)
        except TypeError:  # lists and symbolic sizes are not hashable
            return function(*shapes, *asked)

    return of


@_looked_up
def _geometry(
    dims: int, x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None, count: int, stride, padding,
    dilation, groups: int, live: Nested = None,
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Check the shapes and return convolution_geometry."""
    _check_shapes(x, weight, bias, count, groups, False, dims, live)
    return convolution_geometry(x[-dims:], weight[2:], stride, padding, dilation)


@_looked_up
def _transposed_geometry(
    dims: int, x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None, count: int, stride, padding,
    dilation, groups: int, output_padding, live: Nested = None,
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Return stride, padding, dilation, the output's size, and the number of zeros to append to each dimension of x."""
    _check_shapes(x, weight, bias, count, groups, True, dims, live)
    stride, dilation = of_each("stride", stride, dims, least=1), of_each("dilation", dilation, dims, least=1)
    padding, output_padding = of_each("padding", padding, dims, 0), of_each("output_padding", output_padding, dims, 0)
    if any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise ValueError(
            f"output_padding={output_padding} with stride={stride} and dilation={dilation}; it must be smaller than the"
            " stride or the dilation."
        )
    size = tuple(
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1
        for n, s, p, d, k, o in zip(x[-dims:], stride, padding, dilation, weight[2:], output_padding, strict=True)
    )
    if any(n < 1 for n in size):
        raise InputError(f"x has shape {tuple(x)}, which gives an output of size {list(size)}; pass a larger x.")
    # If output_padding reaches the stride, a convolution of the output has more positions than x.
    return stride, padding, dilation, size, tuple(o // s for o, s in zip(output_padding, stride, strict=True))


def _unpadded(y: Tensor, x: Tensor, dims: int) -> Tensor:
    """Remove the added height or batch dimension. Not by a view, on which in-place operations bypass FSDP2's hooks."""
    if dims == 1:
        y = torch.ops.aten._unsafe_view(y, [*y.shape[:2], y.shape[3]])
    return y if x.dim() == 2 + dims else torch.ops.aten._unsafe_view(y, y.shape[1:])


def _flat(partition: Partition, dims: int) -> tuple:
    """Return flat() for image weights; a conv1d weight gets height 1, which does not change the packed map."""
    map, stored, *rest = partition.flat()
    return map, stored.unsqueeze(2) if dims == 1 and stored is not None else stored, *rest


def convolve(
    dims: int, x: Tensor, weight: Tensor, partition: Partition, active: int, update: int | None, bias: Tensor | None,
    stride: int | Sequence[int], padding: int | Sequence[int] | str, dilation: int | Sequence[int], groups: int,
    narrow: bool,
) -> Tensor:  # fmt: skip
    """Compute conv2d, or conv1d as a conv2d of images of height 1: both weights have the same packed map."""
    _check_operands(x, weight, partition, active, update, bias, narrow)
    stride, padding, dilation, before = _geometry(dims, x, bias, partition, active, stride, padding, dilation, groups)
    batched = x if x.dim() == 2 + dims else x.unsqueeze(0)
    if any(before):
        batched = F.pad(batched, [n for last in reversed(before) for n in (0, last)])
    if dims == 1:
        batched, weight = batched.unsqueeze(2), weight.unsqueeze(2)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    if isinstance(partition, NestedPartition):
        geometry = stride, padding, dilation
        y = nested.conv2d(batched, weight, bias, geometry, groups, partition, active, update, narrow)
        return _unpadded(y, x, dims)
    y = _forward(
        batched, weight, bias, stride, padding, dilation, groups, active, update, *_flat(partition, dims),
        dispatch.requested(),
    )  # fmt: skip
    return _unpadded(y, x, dims)


def convolve_transposed(
    dims: int, x: Tensor, weight: Tensor, partition: Partition, active: int, update: int | None, bias: Tensor | None,
    stride: int | Sequence[int], padding: int | Sequence[int], output_padding: int | Sequence[int], groups: int,
    dilation: int | Sequence[int], narrow: bool,
) -> Tensor:  # fmt: skip
    """Compute conv_transpose2d, which is conv2d's input gradient as a function of grad_output; or conv_transpose1d."""
    _check_operands(x, weight, partition, active, update, bias, narrow)
    stride, padding, dilation, size, beyond = _transposed_geometry(
        dims, x, bias, partition, active, stride, padding, dilation, groups, output_padding
    )
    batched = x if x.dim() == 2 + dims else x.unsqueeze(0)
    if any(beyond):
        batched = F.pad(batched, [n for last in reversed(beyond) for n in (0, last)])
    if dims == 1:
        batched, weight = batched.unsqueeze(2), weight.unsqueeze(2)
        stride, padding, dilation, size = (1, *stride), (0, *padding), (1, *dilation), (1, *size)
    if isinstance(partition, NestedPartition):
        geometry = stride, padding, dilation
        y = nested.conv_transpose2d(batched, weight, bias, size, geometry, groups, partition, active, update, narrow)
        return _unpadded(y, x, dims)
    y = _grad_input(
        batched, weight, [len(batched), weight.shape[1] * groups, *size], stride, padding, dilation, groups, active,
        update, *_flat(partition, dims), dispatch.requested(),
    )  # fmt: skip
    if bias is not None:
        y = y + learning_bias(bias, active, update).to(y.dtype).view(-1, 1, 1)
    return _unpadded(y, x, dims)
