"""merge: a dense model with the outputs of a subnetwork."""

from __future__ import annotations

import copy
from typing import overload

import torch
from torch import nn

from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.ensemble import Ensemble
from partnets.subnetworks.guard import unguard
from partnets.subnetworks.saving import remove_hooks
from partnets.subnetworks.state import (
    ATTRIBUTE,
    ROWS,
    holder_of,
    num_partitions,
    partitioned_modules,
    state_of,
)
from partnets.subnetworks.statistics import warn_of_stale
from partnets.utils.modules import Model, frozen, is_sharded


@overload
def merge(model: Ensemble, active: int | None = None) -> nn.Module: ...


@overload
def merge(model: Model, active: int | None = None) -> Model: ...


def merge(model: nn.Module, active: int | None = None) -> nn.Module:
    """Return a dense copy of subnetwork `active`, without partitions.

    Modules of partnets.hyper stay as they are, and go on learning from an optimizer that is given their parameters.

    Args:
        model: partitioned; it is left unchanged.
        active: k, 1..C; C if None.

    Raises:
        ValueError: active is out of range, or the model is not partitioned, or is sharded.
    """
    count = num_partitions(model)
    active = count if active is None else active
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "the model is sharded, and no rank holds all of a weight; save it by torch.distributed.checkpoint, load it"
            " into a model of one process, and merge that one."
        )
    warn_of_stale(model)
    new = copy.deepcopy(model)
    with torch.no_grad():
        with frozen(new.parameters()), subnetwork(new, active):  # gradients of frozen parameters are not masked later
            values = [(p, p.detach().clone()) for p in new.parameters()] + [(b, b.clone()) for b in new.buffers()]
        for tensor, value in values:
            tensor.copy_(value)
        narrow: dict[nn.Parameter, nn.Parameter] = {}
        for module in partitioned_modules(new) if active != count else ():
            for name in state_of(module).statistics:
                holder_of(module, name)[name].copy_(module._buffers[name + ROWS][active - 1])
            if state_of(module).narrow is not None:
                _narrow(module, active, narrow)
    remove(new)
    return without_ensembles(new, active)


def without_ensembles(model: nn.Module, active: int) -> nn.Module:
    """Return a model with the network of subnetwork `active` in place of each Ensemble, which may be the model."""
    chosen = {one: one.merged_subnetwork(active) for one in model.modules() if hasattr(one, "merged_subnetwork")}
    for module in list(model.modules()) if chosen else ():
        module._modules.update({name: chosen[one] for name, one in module._modules.items() if one in chosen})
    return chosen.get(model, model)


def _narrow(module: nn.Module, active: int, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Narrow a module with nested channels to subnetwork `active`; tied parameters stay tied."""
    narrow = state_of(module).narrow
    for name in narrow.owners:
        own = module._parameters if name in module._parameters else module._buffers
        if (whole := own[name]) is not None and whole not in made:
            part = narrow.take(whole.detach(), name, active).clone()
            made[whole] = nn.Parameter(part, whole.requires_grad) if own is module._parameters else part
        own[name] = made.get(whole)
    for name, values in narrow.attributes.items():
        setattr(module, name, values[active - 1])


def remove(model: nn.Module) -> None:
    """Remove the partitions of a model; its parameters are left unchanged."""
    for module in model.modules():
        unguard(module)
    for module in partitioned_modules(model):
        remove_own(module)


def remove_own(module: nn.Module) -> None:
    """Remove a module's own partitions, not those of modules in it."""
    state = state_of(module)
    delattr(module, ATTRIBUTE)
    for name in state.buffers():
        if name in module._buffers:
            delattr(module, name)
    remove_hooks(module)
