"""finalize: the ordinary model that comes after training a partitioned one."""

from __future__ import annotations

import copy

import torch
from torch import nn

from partkernels.defaults import check_seed
from partnets.convert.merging import merge, without_partitions
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.modules import device_of
from partnets.utils.random_state import preserved

MODES = ("finetune", "retrain")


def finalize(model: nn.Module, mode: str, *, seed: int = 0) -> nn.Module:
    """An ordinary model with the hyperparameters that were found, frozen, to train on all of the data.

    The result has torch's layers, trains in any loop with any optimiser, and shares no parameter with the model, which
    stays as it is. Modules of partnets.hyper are inside, with the values that they learned.

    Args:
        model: with partitioned layers.
        mode: 'finetune': what the whole network computes, as partnets.merge makes it, with ψ frozen, to train on (Table
            2 and Appendix I.4, at a lower learning rate).
            'retrain': a network that has seen no data, with ψ frozen, to train from scratch (Appendix G): what
            partitions own is drawn anew, as torch draws it, as the layer's `seed_defaults` say (then with a bias of 0)
            or from the distribution of defaults that were given. What was frozen keeps its values.
        seed: an int in [0, 2**63), of the values that 'retrain' draws. They are the same on every machine, but may
            differ between kinds of devices.

    Raises:
        ValueError: the mode is none of these, or the model has no partitioned layers. With 'retrain', modules with
            parameters have no initial values: a layer without reset_parameters, one whose defaults are stored, or one
            that trains without being partitioned. All are named.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> model = partnets.partition(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2)), (0.8, 0.2))
        >>> network = finalize(model, "retrain", seed=1)
        >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
        >>> optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    """
    if mode not in MODES:
        use = " For a model to use as it is, call partnets.merge(model)." if mode == "merge" else ""
        raise ValueError(f"mode={mode!r}; pass one of {', '.join(map(repr, MODES))}.{use}")
    check_seed("seed", seed)
    ordinary = merge(model) if mode == "finetune" else _fresh(model, seed)
    for parameter in hyperparameters(ordinary):
        parameter.requires_grad_(False)
    return ordinary


def _fresh(model: nn.Module, seed: int) -> nn.Module:
    """A copy with ordinary layers in place of the partitioned ones, and initial values in them."""
    count(model)
    model = copy.deepcopy(model)
    new, stuck = {}, _unpartitioned(model)
    with preserved(device_of(model)):
        torch.manual_seed(seed)
        for path, layer in partitioned_layers(model):
            try:
                new[layer] = layer.to_fresh()
            except ValueError as error:
                stuck[path] = str(error)
    if stuck:
        listed = "\n".join(f"  {path or 'the model itself'}: {why}" for path, why in stuck.items())
        raise ValueError(f"this model cannot start anew:\n{listed}")
    return without_partitions(model, new)


def _unpartitioned(model: nn.Module) -> dict[str, str]:
    """The paths of modules with trainable parameters of their own that neither partitions nor ψ have, and why not."""
    layers = [layer for _, layer in partitioned_layers(model)]
    known = {
        inner
        for module in [*layers, *(one for one in model.modules() if isinstance(one, Hyperparameter))]
        for inner in module.modules()
    }
    return {
        path: f"a {type(module).__name__} that trains without being partitioned; partition or freeze it."
        for path, module in model.named_modules()
        if module not in known and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    }
