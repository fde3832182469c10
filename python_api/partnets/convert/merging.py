"""merge: an ordinary model that computes what a subnetwork computes."""

from __future__ import annotations

import copy

from torch import nn

from partkernels.arguments import check_live
from partnets.convert.replacing import replace_modules
from partnets.nn.batch_norm import warn_of_stale
from partnets.nn.own_state import OwnState, sharing
from partnets.nn.partitioned import EXISTING, Partitioned, count, partitioned_layers, take_over
from partnets.nn.state_dict import unguard
from partnets.utils.modules import is_sharded


def merge(model: nn.Module, active: int | None = None) -> nn.Module:
    """A copy of the model with ordinary layers, whose parameters are those of subnetwork `active`.

    Its outputs are the subnetwork's up to rounding. Modules of partnets.hyper stay as they are, and go on learning from
    an optimiser that is given their parameters; partnets.finalize freezes them, for further training, or leaves nothing
    of them, to deploy.

    Args:
        model: with partitioned layers; it stays as it is.
        active: k, 1..C; C if None.

    Raises:
        ValueError: active is out of range, or the model has no partitioned layers, or is sharded.

    Warns:
        UserWarning: running statistics of BatchNorm layers are older than the weights; see
            partnets.estimate_statistics.

    Example:
        >>> import partnets
        >>> merge(partnets.partition(nn.Sequential(nn.Linear(4, 3)), (0.5, 0.5)))
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
        )
    """
    active = count(model) if active is None else active
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "the model is sharded, and no rank holds all of a weight; save it by torch.distributed.checkpoint, load it"
            " into a model of one process, and merge that one."
        )
    warn_of_stale(model)
    model = copy.deepcopy(model)
    layers = [layer for _, layer in partitioned_layers(model)]
    check_live(layers[0], active, None)
    with sharing():
        new = {layer: layer.to_ordinary(active) for layer in layers}
    return without_partitions(model, new)


def without_partitions(model: nn.Module, new: dict[Partitioned, nn.Module]) -> nn.Module:
    """The model with an ordinary module for each partitioned layer; nothing of partnets stays in it but ψ.

    The layers themselves become those: their methods may be hooks, or kept in lists and functions. Parameters that they
    shared they go on sharing: the first layer's.

    Args:
        model: a copy that nobody else has.
        new: of each partitioned layer what it becomes, which is in no other place.
    """
    unguard(model)
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for layer, ordinary in new.items():
        for name, parameter in layer.named_parameters(recurse=False):
            if name in ordinary._parameters:  # else it is inside, of live units, which no other layer has
                ordinary._parameters[name] = shared.setdefault(parameter, ordinary._parameters[name])
    stuck = {layer: ordinary for layer, ordinary in new.items() if not _become(layer, ordinary)}
    for module in model.modules():
        if "_orig_mod" in module._modules:  # torch.compile's wrapper, which keeps its call too
            if module._orig_mod in new:
                module._initialize()
        elif hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):  # compiled, of the original
            del vars(module)["forward"]
    return replace_modules(model, stuck) if stuck else model


def _become(layer: nn.Module, ordinary: nn.Module) -> bool:
    """Makes one module another, in place; False, and nothing has changed, if its class forbids it or its state does."""
    if isinstance(layer, OwnState):
        return False
    try:
        layer.__class__ = type(ordinary)
    except (TypeError, AttributeError):
        return False
    EXISTING.discard(layer)
    take_over(layer, ordinary)
    return True
