"""merge: a dense model that computes what a subnetwork computes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from partnets.subnetworks.context import subnetwork
from partnets.subnetworks.state import (
    ATTRIBUTE,
    DEFAULTS,
    ESTIMATED,
    MAP,
    ROWS,
    STORED,
    num_partitions,
    partitioned_modules,
)
from partnets.subnetworks.statistics import warn_of_stale
from partnets.subnetworks.divide import read_defaults, refuse_inside
from partnets.utils.modules import is_sharded


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
        with subnetwork(new, active):
            values = [(p, p.detach().clone()) for p in new.parameters()] + [(b, b.clone()) for b in new.buffers()]
        for tensor, value in values:
            tensor.copy_(value)
    for module in partitioned_modules(new):
        remove(module)
    # An Ensemble is one of its networks.
    chosen = {one: one.merged_subnetwork(active) for one in new.modules() if hasattr(one, "merged_subnetwork")}
    for module in new.modules():
        module._modules.update({name: chosen[one] for name, one in module._modules.items() if one in chosen})
    return chosen.get(new, new)


def remove(module: nn.Module) -> None:
    """Forget the partitions of a module, whose parameters stay as they are."""
    state = vars(module).pop(ATTRIBUTE)
    for name in [*state.weights, *state.vectors, *state.statistics]:
        for end in (MAP, DEFAULTS, STORED, ROWS):
            module._buffers.pop(name + end, None)
    module._buffers.pop(ESTIMATED, None)
    for hooks in (module._load_state_dict_post_hooks, module._state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in (read_defaults, refuse_inside)]:
            del hooks[key]
