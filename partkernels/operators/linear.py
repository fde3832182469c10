"""linear: x times the transpose of a subnetwork's weight, computed from the packed map."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from partkernels.arguments import InputError, check_live
from partkernels.backend import dispatch
from partkernels.backend.reference.linear import (
    empty_linear,
    empty_linear_grad_input,
    empty_linear_grad_weight,
)
from partkernels.operators import nested
from partkernels.operators.bias import grad_of_rows
from partkernels.operators.checks import check_bias, check_inputs, check_narrow, check_weight
from partkernels.operators.registration import OWNERS, PARTITION, autocast, define, differentiate, is_wanted
from partkernels.operators.subnetwork_weight import select
from partkernels.partition import NestedPartition, Partition

_forward = define(
    "linear", f"Tensor x, Tensor weight, Tensor? bias, int active, int? update, {PARTITION}", empty_linear
)
_grad_input = define(
    "linear_grad_input",
    f"Tensor grad_output, Tensor weight, int active, int? update, {PARTITION}",
    empty_linear_grad_input,
)
_grad_weight = define(
    "linear_grad_weight", f"Tensor grad_output, Tensor x, int update, {OWNERS}", empty_linear_grad_weight
)
autocast("linear")


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.active, ctx.update, map, stored, *ctx.rest = inputs
    ctx.has_rows = bias is not None and bias.dim() == 2
    needs_weight_grad = ctx.update is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_weight_grad else None, weight if ctx.needs_input_grad[0] else None, map, stored)


def _backward(ctx, grad):
    x, weight, map, stored = ctx.saved_tensors
    count, backend = ctx.rest[0], ctx.rest[-1]
    grad_x = grad_weight = grad_bias = None
    if weight is not None and is_wanted(ctx, 0):
        grad_x = _grad_input(grad, weight, ctx.active, ctx.update, map, stored, *ctx.rest)
    if x is not None and is_wanted(ctx, 1):
        grad_weight = _grad_weight(grad, x, ctx.update, map, count, backend)
    if ctx.needs_input_grad[2]:
        if ctx.has_rows:
            grad_bias = grad_of_rows(grad, -1, ctx.update, count, backend)
        else:
            grad_bias = grad.sum_to_size(grad.shape[-1])
    return grad_x, grad_weight, grad_bias, *[None] * 12


differentiate("linear", _setup_context, _backward)


def _grad_input_setup_context(ctx, inputs, output):
    grad_output, weight, ctx.active, ctx.update, map, stored, *ctx.rest = inputs
    ctx.save_for_backward(grad_output, weight, map, stored)


def _grad_input_backward(ctx, grad):
    grad_output, weight, map, stored = ctx.saved_tensors
    grad_grad_output = _forward(grad, weight, None, ctx.active, ctx.update, map, stored, *ctx.rest)
    grad_weight = None
    if ctx.update is not None and ctx.needs_input_grad[1]:
        grad_weight = _grad_weight(grad_output, grad, ctx.update, map, ctx.rest[0], ctx.rest[-1])
    return grad_grad_output, grad_weight, *[None] * 12


differentiate("linear_grad_input", _grad_input_setup_context, _grad_input_backward)


def _grad_weight_setup_context(ctx, inputs, output):
    grad_output, x, ctx.update, map, ctx.num_partitions, ctx.backend = inputs
    ctx.save_for_backward(grad_output, x, map)


def _grad_weight_backward(ctx, grad):
    grad_output, x, map = ctx.saved_tensors
    grad = select(grad, ctx.update, ctx.update, map, ctx.num_partitions, ctx.backend)
    return F.linear(x, grad), grad_output @ grad, *[None] * 4


differentiate("linear_grad_weight", _grad_weight_setup_context, _grad_weight_backward)


def linear(
    x: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    bias: Tensor | None = None,
    narrow: bool = False,
) -> Tensor:
    """Compute F.linear(x, w_s^(active), bias) without materialising the subnetwork's weight.

    x and bias receive the dense gradient. The weight receives it at the entries of partition `update` and exactly 0
    elsewhere (Eq. 3); with update=None its gradient is not computed at all (Eq. 4).
    Saved for backward: x, weight and the map.

    Args:
        x: [..., in_features], the weight's dtype; any strides, also an empty batch. With a nested partition, x may have
            only the first m_active features, since the others would be multiplied by zeros.
        weight: [out_features, in_features], floating point; any strides.
        partition: the weight's partition.
        active: k, 1..C: partitions 1..k are active, the others take their defaults.
        update: the partition that receives a gradient, 1..active, or None.
        bias: [out_features]; or [C, out_features] with a row b_i for each partition, where the bias is
            b_1 + ... + b_active and b_update receives its gradient (Appendix I.2); or None.
        narrow: for a nested partition, whether to omit inactive outputs, which equal their bias.

    Returns:
        [..., out_features], x's dtype; the first n_active of them if narrow.

    Raises:
        ValueError: active or update is out of range, or the partition or another argument does not fit the weight.
        TypeError: the weight is not floating point, or stored defaults have another dtype.
        InputError: x or bias does not fit the weight in shape, dtype or device. It is a ValueError and, like the errors
            of torch's operators, a RuntimeError.

    Example:
        >>> import torch
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> linear(torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 4.0]]), p, active=1)
        tensor([[3.]])
    """
    check_weight(weight, partition)
    check_live(partition, active, update)
    check_inputs(x, bias, weight)
    shape, taken = partition.shape, x.shape  # the weight's sizes as a tuple, which is faster than asking a tensor
    if len(shape) != 2:
        raise ValueError(f"the weight has shape {shape}; linear takes [out_features, in_features].")
    check_narrow(narrow, partition)
    check_bias(None if bias is None else bias.shape, partition.num_partitions, shape[0])
    if isinstance(partition, NestedPartition):
        few = partition.col_channels.number(active)
        if not taken or taken[-1] not in (shape[1], few):
            raise InputError(f"x has shape {tuple(taken)}; this weight takes [..., {shape[1]}] or [..., {few}].")
        return nested.linear(x, weight, bias, partition, active, update, narrow)
    if not taken or taken[-1] != shape[1]:
        raise InputError(f"x has shape {tuple(taken)}; this weight takes [..., {shape[1]}].")
    return _forward(x, weight, bias, active, update, *partition.flat(), dispatch.requested())
