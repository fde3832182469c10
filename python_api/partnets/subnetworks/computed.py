"""Computed weights: a subnetwork with parameters computed from the whole network's, so that a graph can have many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partkernels import subnetwork_weight
from partkernels.operators.entries import combine_rows
from partnets.subnetworks.channels import narrow_to, widen
from partnets.subnetworks.exchanged import Vector, Weight
from partnets.subnetworks.gradients import add_gradient
from partnets.subnetworks.state import ROWS, holder_of, is_norm, partition_of
from partnets.subnetworks.switch import Switch


@contextmanager
def computed_parameters(switch: Switch, active: int, update: int | None) -> Iterator[None]:
    """Give the model the parameters of subnetwork `active` in the context, as new tensors.

    So one autograd graph can contain several subnetworks, as for examples in different ones. partnets.subnetwork
    exchanges entries in place instead, which takes less memory and time. The backward pass may run after the context.

    Args:
        switch: that of the model.
        active: k, the subnetwork.
        update: the partition that receives gradients, in the parameters of the whole network; None for no gradients.

    Raises:
        RuntimeError: on exit, if a running statistic has another shape or dtype than before.
    """
    values = {id(one.parameter): _value(one, active, update) for one in (*switch.weights, *switch.vectors)}
    buffers, narrow = [], []
    try:
        for module, name, parameter in switch.aliases:
            module._parameters[name] = values[id(parameter)]
        for module, state in switch.statistics:
            for name in state.statistics:
                own, rows = holder_of(module, name), module._buffers[name + ROWS]
                learns = update is not None and (module.training or not is_norm(state))
                buffers.append((own, name, own[name], rows, learns))
                own[name] = own[name].detach().clone() if active == state.num_partitions else rows[active - 1].clone()
        for module, state in zip(switch.modules, switch.states, strict=True):
            if state.narrow is not None and active != state.num_partitions:
                narrow_to(module, active)
                narrow.append(module)
        yield
    finally:
        for module in narrow:
            widen(module, active)
        for module, name, parameter in switch.aliases:
            module._parameters[name] = parameter
        changed = []
        for own, name, whole, rows, learns in buffers:
            followed, own[name] = own.get(name), whole
            if learns and followed is not None:
                if (followed.shape, followed.dtype) != (whole.shape, whole.dtype):
                    changed.append(name)
                    continue
                with torch.no_grad():
                    (whole if active == len(rows) else rows[active - 1]).copy_(followed)
        if changed:
            raise RuntimeError(f"{changed[0]} has changed its shape or dtype; let it keep one.")


def _value(one: Weight | Vector, active: int, update: int | None) -> Tensor:
    parameter = one.parameter
    if isinstance(one, Weight) and one.is_narrow:
        if update is None or not parameter.requires_grad:
            return parameter.detach()
        return _Masked.apply(parameter, partition_of(one.module, one.name).mask(update))
    if isinstance(one, Weight):
        update = update if parameter.requires_grad else None
        return subnetwork_weight(parameter, partition_of(one.module, one.name), active, update=update)
    if update is None or not parameter.requires_grad:
        value = torch.empty_like(parameter, requires_grad=False)
        combine_rows([value], [one.rows], active, [one.is_product])
        return value
    return _Combined.apply(parameter, one, active, update)


class _Combined(torch.autograd.Function):
    """b_1 + ... + b_k or s_1 * ... * s_k, with a gradient that becomes `.grad` of partition `update`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, one: Vector, active: int, update: int) -> Tensor:
        value, rows = torch.empty_like(parameter), one.rows
        combine_rows([value], [rows], active, [one.is_product])
        others = torch.cat([rows[: update - 1], rows[update:active]]) if one.is_product and active > 1 else None
        ctx.factor = None if others is None else others.prod(0)
        ctx.update, ctx.one = update, one
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad if ctx.factor is None else grad * ctx.factor
        add_gradient(ctx.one, ctx.update, grad)
        return (None,) * 4


class _Masked(torch.autograd.Function):
    """The identity, with a gradient of 0 outside of a mask."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, 0), None
