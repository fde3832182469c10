"""finalize: turn a trained partitioned model into a dense one, for further training or deployment."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from partkernels import Defaults, Normal, Uniform, Zeros
from partkernels.arguments import check_seed
from partnets.convert.deploying import deployed
from partnets.hyper import Hyperparameter, hyperparameters
from partnets.subnetworks.assignment import padding_of
from partnets.subnetworks.initial_values import declared, fill, reset_of
from partnets.subnetworks.merging import merge, remove, without_ensembles
from partnets.subnetworks.rules import known_rule, rule_of
from partnets.subnetworks.state import PartitionState, holder_of, num_partitions, partitioned_modules, state_of
from partnets.utils import seeds
from partnets.utils.checks import check_at_least
from partnets.utils.modules import device_of, is_frozen
from partnets.utils.random_state import preserved

MODES = ("finetune", "retrain", "deploy")


def finalize(model: nn.Module, mode: str, *, seed: int = 0, draws: int = 0) -> nn.Module:
    """Return a dense model with the learned hyperparameters, to train on all data or to deploy.

    The result has no partitions and shares no parameter with the model, which is left unchanged. With 'finetune' and
    'retrain', it contains the modules of partnets.hyper with frozen ψ, and trains in any loop with any optimiser. With
    'deploy', it contains no modules of partnets.hyper.

    Args:
        model: partitioned; for 'deploy', also a model from `finalize` or partnets.merge that was trained further.
        mode: 'finetune': the whole network, as from partnets.merge, with ψ frozen, to train further at a lower learning
            rate (Table 2 and Appendix I.4).
            'retrain': a network that has seen no data, with ψ frozen, to train from scratch (Appendix G). Partitioned
            parameters are drawn again: by the layer's `seed_defaults` (biases are then 0, and scales 1), from the given
            distribution of defaults, or as they were before `partition`: as torch draws them, or uniform or normal with
            their mean and standard deviation. Parameters that had only a few different values get these again, such as
            biases of 0, or the weight of an adapter that starts at 0. Frozen parameters keep their values.
            'deploy': the whole network in evaluation mode, without randomness, made only of torch's modules and the
            model's own classes. ConcreteDropout becomes nn.Dropout with the learned rate, InputMask a multiplication,
            Submodule the module in it, frozen, and another Hyperparameter the result of its to_torch().
            Augmentations are removed, and Averaged becomes the network in it, which sees each example once, unchanged.
        seed: an int in [0, 2**63), for the values that 'retrain' draws, and for `draws`. They are the same on every
            machine, but may differ between kinds of devices.
        draws: with 'deploy', keep Averaged, over this number of fixed draws of its augmentation: the same in each call
            and for each example. Averaged is a class of partnets; files of torch.export and ONNX do not need it.

    Raises:
        ValueError: the mode is unknown, or the model has no partitions, which only 'deploy' allows.
            With 'retrain': modules with parameters have no initial values, because they have no reset_parameters, have
            stored defaults, or train without partitions. With 'deploy': torch has no replacement for a hyperparameter,
            or `draws` cannot be fixed. The message names all of them.

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
        raise ValueError(f"draws={draws} with mode={mode!r}, whose augmentation draws its own; draws are for 'deploy'.")
    dense = merge(model) if mode == "finetune" else _fresh(model, seed)
    for parameter in hyperparameters(dense):
        parameter.requires_grad_(False)
    return dense


def _fresh(model: nn.Module, seed: int) -> nn.Module:
    """Return a dense copy with initial values."""
    last = num_partitions(model)
    model, stuck = copy.deepcopy(model), _unpartitioned(model)
    modules = {path: module for path, module in model.named_modules() if state_of(module) is not None}
    states = {module: state_of(module) for module in modules.values()}
    drawn = {
        (module, name): defaults
        for module, state in states.items()
        for name, defaults in state.weights.items()
        if isinstance(defaults, Uniform | Normal) and getattr(module, "seed_defaults", None) is None
    }
    for path, module in modules.items():
        rule = known_rule(type(module))
        if rule is not None and any(d is None and rule.knows(name) for name, d in states[module].weights.items()):
            stuck[path] = (
                "its defaults are stored: it started at weights that were given, and of its bias they are lost; start"
                " from those weights instead."
            )
    remove(model)
    frozen = [buffer for module in model.modules() if is_frozen(module) for buffer in module.buffers()]
    frozen += hyperparameters(model) + [parameter for parameter in model.parameters() if not parameter.requires_grad]
    kept = [(tensor, tensor.detach().clone()) for tensor in frozen]  # a module may reset others in it
    with preserved(device_of(model)):
        torch.manual_seed(seed)
        for path, module in reversed(modules.items()):
            if path not in stuck:
                try:
                    _start_again(module, states[module], {name: d for (m, name), d in drawn.items() if m is module})
                except ValueError as error:
                    stuck[path] = str(error)
    kept += [(holder_of(one, name)[name], value) for one in states for name, value in states[one].initial.items()]
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    if stuck:
        listed = "\n".join(f"  {path or 'the model itself'}: {why}" for path, why in stuck.items())
        raise ValueError(f"this model cannot start again:\n{listed}")
    return without_ensembles(model, last)


@torch.no_grad()
def _start_again(module: nn.Module, state: PartitionState, drawn: dict[str, Defaults]) -> None:
    """Give a module's own parameters their initial values."""
    before = {name: p.detach().clone() for name, p in module.named_parameters(recurse=False)}
    reset = reset_of(module)
    start = declared(module, seeds.random())
    learning = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    if learning and reset is None and start is None:
        raise ValueError(
            f"its {', '.join(learning)} have no initial values; give {type(module).__name__} a reset_parameters() that"
            " sets them."
        )
    if reset is not None:
        reset()
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            continue
        if start is not None and name in rule_of(type(module)).scales:
            nn.init.ones_(parameter)
        elif start is not None:
            fill(parameter, start if parameter.dim() > 1 else Zeros())
        elif name in state.starts:
            state.starts[name].fill(parameter)
        elif name in drawn:
            fill(parameter, dataclasses.replace(drawn[name], seed=seeds.random()))
        elif torch.equal(parameter, before[name]) and (parameter != parameter.flatten()[0]).any():
            raise ValueError(
                f"its reset_parameters() leaves {name} as it is, which has learned; let it set all that learns."
            )
        if (padding := padding_of(module, parameter)) is not None:
            parameter[padding] = 0


def _unpartitioned(model: nn.Module) -> dict[str, str]:
    """Return the paths of modules with trainable parameters outside of partitions and ψ, with an explanation."""
    psi = {inner for one in model.modules() if isinstance(one, Hyperparameter) for inner in one.modules()}
    known = psi | set(partitioned_modules(model))
    return {
        path: f"a {type(module).__name__} that trains without being partitioned; partition or freeze it."
        for path, module in model.named_modules()
        if module not in known and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    }
