"""finalize: the ordinary model that comes after training a partitioned one, to train on or to deploy."""

from __future__ import annotations

import copy

import torch
from torch import nn

from partkernels.arguments import check_seed
from partnets.convert.deploying import deployed
from partnets.convert.merging import merge, without_partitions
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.nn.own_state import sharing
from partnets.nn.partitioned import count, partitioned_layers
from partnets.utils.checks import check_at_least
from partnets.utils.modules import device_of
from partnets.utils.random_state import preserved

MODES = ("finetune", "retrain", "deploy")


def finalize(model: nn.Module, mode: str, *, seed: int = 0, draws: int = 0) -> nn.Module:
    """An ordinary model with the hyperparameters that were found, to train on all of the data or to deploy.

    The result has torch's layers and shares no parameter with the model, which stays as it is. To train on, it goes
    into any loop with any optimiser: modules of partnets.hyper are inside and do in training what they learned, frozen.
    To deploy, none of them is left.

    Args:
        model: with partitioned layers; for 'deploy' also what `finalize` or partnets.merge gave, trained since.
        mode: 'finetune': what the whole network computes, as partnets.merge makes it, with ψ frozen, to train on (Table
            2 and Appendix I.4, at a lower learning rate).
            'retrain': a network that has seen no data, with ψ frozen, to train from scratch (Appendix G): what
            partitions own is drawn anew, as the layer's `seed_defaults` say (then with a bias of 0), from the
            distribution of defaults that were given, or as it was: as torch draws it, or uniform or normal of another
            mean and standard deviation. What had a few different values alone before it was partitioned has them again,
            as biases of 0, or an adapter's weight, which then starts at its base. What was frozen keeps its values.
            'deploy': what the whole network computes, in evaluation mode, made of torch's modules and the model's own
            classes alone, and nothing random in it. ConcreteDropout becomes nn.Dropout with its rate, InputMask a
            multiplication, Submodule the module in it, frozen; another Hyperparameter what its to_ordinary() says.
            Augmentations go, and of Averaged the network stays: it sees each example once, as it is.
        seed: an int in [0, 2**63), of the values that 'retrain' draws, and of `draws`. They are the same on every
            machine, but may differ between kinds of devices.
        draws: with 'deploy', keeps Averaged, over so many draws of its augmentation that stay: the same at each call
            and for each example. Averaged is a class of partnets; torch.export and ONNX leave it behind.

    Raises:
        ValueError: the mode is none of these, or the model has no partitioned layers, which 'deploy' can do without.
            With 'retrain', modules with parameters have no initial values: a layer without reset_parameters, one whose
            defaults are stored, or one that trains without being partitioned. With 'deploy', a hyperparameter has
            nothing of torch to take its place, or draws are asked for where none can be fixed. All are named.

    Example:
        >>> import partnets
        >>> from partnets import hyper
        >>> model = partnets.partition(nn.Sequential(hyper.InputMask(4), nn.Linear(4, 2)), (0.8, 0.2))
        >>> network = finalize(model, "retrain", seed=1)
        >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
        >>> optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
        >>> finalize(network, "deploy")
        Sequential(
          (0): MeanMask()
          (1): Linear(in_features=4, out_features=2, bias=True)
        )
        >>> [type(module).__module__ for module in finalize(network, "deploy")]
        ['torch.fx.graph_module', 'torch.nn.modules.linear']
    """
    if mode not in MODES:
        use = " For the whole network as it is, call partnets.merge(model)." if mode == "merge" else ""
        raise ValueError(f"mode={mode!r}; pass one of {', '.join(map(repr, MODES))}.{use}")
    check_seed("seed", seed)
    check_at_least(0, draws=draws)
    if mode == "deploy":
        return deployed(model, draws, seed)
    if draws:
        raise ValueError(f"draws={draws} with mode={mode!r}, whose augmentation draws anew; they are for 'deploy'.")
    ordinary = merge(model) if mode == "finetune" else _fresh(model, seed)
    for parameter in hyperparameters(ordinary):
        parameter.requires_grad_(False)
    return ordinary


def _fresh(model: nn.Module, seed: int) -> nn.Module:
    """A copy with ordinary layers in place of the partitioned ones, and initial values in them."""
    count(model)
    model = copy.deepcopy(model)
    new, stuck = {}, _unpartitioned(model)
    with preserved(device_of(model)), sharing():
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
