"""partition: makes the layers of an ordinary model partitioned ones, in place."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

import partkernels
from partkernels.defaults import check_seed
from partkernels.partition import sizes
from partnets.hyper import Hyperparameter
from partnets.nn import broadcast, state_dict
from partnets.nn.initial_values import distribution_of
from partnets.nn.layer import PartitionedLayer
from partnets.nn.partitioned import Partitioned
from partnets.nn.registry import known, rule_of
from partnets.utils import seeds

# Layers that a warning names one by one.
MOST_NAMED = 10


def partition(
    model: nn.Module,
    proportions: Sequence[float],
    *,
    defaults: str | partkernels.Defaults | None = None,
    seed: int = 0,
    skip: Iterable[str | nn.Module] = (),
    scheme: str = "weight",
) -> nn.Module:
    """Replaces the layers of a model by partitioned ones, a fixed proportion of each at random (Appendix C).

    torch's layers have rules: Linear, Bilinear, convolutions and transposed ones, Embedding and EmbeddingBag,
    MultiheadAttention, RNN, LSTM and GRU, GroupNorm, LayerNorm, RMSNorm and BatchNorm; so have FixUp's scalars of
    partnets.models and transformers' Conv1D. `register` adds others. Any other module's own parameters are taken for
    shifts, b_1 + ... + b_k, if they are broadcast: scalars, vectors, and those whose first dimension is 1, such as
    class tokens and position embeddings. Layers that share a weight share its partition. Modules of partnets.hyper
    stay, and so do modules without parameters.

    A layer's own seed is derived from (seed, its dotted path), so the same call on the same architecture gives the same
    partitions everywhere.

    Args:
        model: changed in place.
        proportions: C numbers that sum to 1. The paper matches them to the chunks' (Appendix I.2).
        defaults: 'seed' re-initialises weights and biases from the layer's seed, so that the weight starts at its
            defaults at no memory: as torch does, or, where the present values were not drawn like that, from a uniform
            or normal distribution of their standard deviation, or as `seed_defaults` says. 'zero' keeps the present
            weights, with defaults of 0; 'stored' keeps the present weights and a copy of them as defaults, for
            pretrained models. Or an object, as in partnets.Linear. Shifts and scales have no defaults. None is 'seed',
            with a warning that names the layers whose weights don't look as their own initialisation draws them:
            what they had learned is lost.
        seed: an int in [0, 2**63).
        skip: dotted paths or modules that stay as they are, with everything inside them.
        scheme: 'weight' gives each entry of a weight to a partition at random; 'node' each output of a layer, with all
            weights that it depends on (Appendix C).

    A layer can say how it starts when it is drawn from a seed: with an attribute `seed_defaults` on the ordinary layer,
    before this call, which is partkernels.Zeros(), or is called with seed= and returns such an object. Then 'seed'
    draws its weights from it, and the bias stays; partnets.finalize's 'retrain' draws them as well, with a bias of 0.
    It survives copies and pickling if it is a functools.partial:

        layer.seed_defaults = functools.partial(partkernels.Normal, 0.02)

    From here on, model.load_state_dict raises before anything is copied if an entry of the state_dict does not fit its
    layer: another shape, a partition of another count, or none. (Missing keys are torch's matter: with strict=True it
    loads what is there, and then raises.)

    Returns:
        The model; if it is a layer itself, the new layer.

    Warns:
        UserWarning: without `defaults`, weights are redrawn that may be pretrained.

    Raises:
        ValueError: a module has neither a rule nor only parameters that are broadcast, or keeps running statistics (all
            of them are named); a layer is partitioned already; a shared parameter has no one partition; a path in skip
            does not exist; or an argument is out of range. The model has not changed then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        >>> partition(model, (0.8, 0.1, 0.1))[0]
        Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), partitions=[58, 7, 7])
    """
    check_seed("seed", seed)
    sizes(0, proportions)
    found = _found(model, _skipped(model, skip))
    options = {"defaults": "seed" if defaults is None else defaults, "scheme": scheme}
    new = {
        layer: rule_of(type(layer))(layer, proportions, seed=seeds.derived(seed, path), **options)
        for path, layer in found.layers.items()
    }
    if defaults is None:
        redrawn = {path: dict(_redrawn(layer, new[layer])) for path, layer in found.layers.items()}
        # Of tied layers one drew the weight that they share.
        usual = {weight for weights in redrawn.values() for weight, is_usual in weights.items() if is_usual}
        _warn_of_lost([path for path, weights in redrawn.items() if weights.keys() - usual])
    _share_tied(model, new, found.broadcasting.values())
    for module in found.broadcasting.values():
        broadcast.divide(module, len(proportions))
    model = replace_modules(model, new)
    if not isinstance(model, PartitionedLayer):  # which look after themselves
        state_dict.guard(model)
    return model


def _redrawn(layer: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The weights of a layer that its partitioned one draws anew; whether they look as torch draws such a layer's."""
    before = dict(layer.named_modules())
    for path, inner in new.named_modules():
        if not isinstance(inner, PartitionedLayer) or inner.seed_defaults is not None or path not in before:
            continue
        for name in inner.partitions:
            weight, usual = before[path]._parameters[name], inner.usual_distribution(name)
            if inner._parameters[name] is not weight:
                yield weight, distribution_of(weight, usual) is usual or not weight.any()


def _warn_of_lost(paths: list[str]) -> None:
    if not paths:
        return
    named = ", ".join(path or "the model itself" for path in paths[:MOST_NAMED])
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    warnings.warn(
        f"partition draws the weights of {named}{more} anew, and they don't look as these layers' own initialisation"
        " draws them. If they are pretrained, pass defaults='stored', which keeps them; defaults='seed' draws them anew"
        " without this warning.",
        stacklevel=3,
    )


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """The model with each module of `new` replaced, under every path that it has, also inside of what replaces one."""
    for root in (model, *new.values()):
        for module in list(root.modules()):
            for name, child in module._modules.items():
                module._modules[name] = new.get(child, child)
    return new.get(model, model)


def _skipped(model: nn.Module, skip: Iterable[str | nn.Module]) -> set[nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped = set()
    for entry in [skip] if isinstance(skip, str | nn.Module) else skip:
        module = modules.get(entry) if isinstance(entry, str) else entry
        if module not in modules.values():
            given = repr(entry) if isinstance(entry, str) else f"a {type(entry).__name__}"
            known = ", ".join(repr(path) for path in modules if path)
            raise ValueError(f"skip names {given}, which is not in this model; its modules are {known}.")
        skipped.update(module.modules())
    return skipped


def without_rule(model: nn.Module, *, skip: Iterable[str | nn.Module] = ()) -> dict[str, str]:
    """The path of each module that `partition` cannot divide and would raise for, and why.

    Args:
        model, skip: as in `partition`.

    Example:
        >>> import torch
        >>> class Scaled(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.matrix = nn.Parameter(torch.eye(4))
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), Scaled())
        >>> without_rule(model)
        {'1': 'a Scaled without a rule, and with parameters that are not broadcast: matrix [4, 4]'}
        >>> partition(model, (0.5, 0.5), skip=without_rule(model))[0].count
        2
    """
    return find(model, _skipped(model, skip)).obstacles


class Found(NamedTuple):
    """What `partition` finds in a model, by dotted paths.

    Attributes:
        layers: those that rules replace.
        broadcasting: modules without a rule, whose own parameters are taken for shifts.
        obstacles: why each of the other modules that have something to divide cannot be divided.
    """

    layers: dict[str, nn.Module]
    broadcasting: dict[str, nn.Module]
    obstacles: dict[str, str]


def find(model: nn.Module, skipped: Collection[nn.Module] = ()) -> Found:
    """What `partition` would do with each module of a model, except those that are skipped."""
    layers, broadcasting, obstacles = {}, {}, {}
    seen = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in skipped or module in seen or isinstance(module, Hyperparameter):
            return
        seen.add(module)
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        kind = type(module).__name__
        if isinstance(module, Partitioned):
            obstacles[path] = f"a {kind} that is partitioned already"
            return
        if rule_of(type(module)) is not None:
            if any(child in skipped for child in module.modules()):
                obstacles[path] = f"a {kind} of which a part is skipped; skip all of it"
            layers[path] = module
            return
        if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn in skipped:
            obstacles[path] = (
                f"a {kind}, which reads its children's weights if its self_attn is skipped; skip all of it"
            )
        elif isinstance(module, _NormBase) and module.running_mean is not None:
            obstacles[path] = f"a {kind} whose running statistics would carry data between chunks"
        elif any(isinstance(parameter, UninitializedParameter) for parameter in own.values()):
            obstacles[path] = f"a {kind} whose parameters are made by its first call; call it first"
        elif not all(broadcast.is_broadcast(parameter) for parameter in own.values()):
            listed = ", ".join(f"{name} {[*p.shape]}" for name, p in own.items() if not broadcast.is_broadcast(p))
            obstacles[path] = f"a {kind} without a rule, and with parameters that are not broadcast: {listed}"
        elif own:
            broadcasting[path] = module
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return Found(layers, broadcasting, obstacles)


def _found(model: nn.Module, skipped: set[nn.Module]) -> Found:
    """What `find` finds; raises for all that need a rule and have none."""
    found = find(model, skipped)
    if found.obstacles:
        listed = "\n".join(f"  {path or 'the model itself'}: {what}" for path, what in found.obstacles.items())
        raise ValueError(
            f"this model cannot be partitioned as it is:\n{listed}\nLeave them out with"
            f" skip={[*found.obstacles]!r} and freeze them (parameters without gradients, evaluation mode), or give"
            " their type a rule with partnets.register."
        )
    if not found.layers and not found.broadcasting:
        names = ", ".join(layer_type.__name__ for layer_type in known())
        raise ValueError(f"this {type(model).__name__} has no layer to partition; known are {names}.")
    return found


def _share_tied(model: nn.Module, new: dict[nn.Module, nn.Module], broadcasting: Collection[nn.Module]) -> None:
    """Gives new layers whose ordinary ones share a parameter one parameter and one partition; raises if it can't."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, module, name))
    for tied in owners.values():
        if len(tied) == 1 or not any(module in new or module in broadcasting for _, module, _ in tied):
            continue
        layers = [(new.get(module), name) for _, module, name in tied]
        first, first_name = layers[0]
        if len({_role(layer, name) for layer, name in layers}) > 1 or _role(first, first_name) is None:
            raise ValueError(
                f"layers share parameters: {' = '.join(path for path, *_ in tied)}. As what these are, they cannot"
                " share a partition; give each layer a parameter of its own, or leave all of these layers out with"
                " skip=."
            )
        for layer, name in layers[1:]:
            layer._parameters[name] = first._parameters[first_name]
            if first_name in first.partitions:
                layer.partitions[name] = first.partitions[first_name]


def _role(layer: nn.Module | None, name: str) -> tuple | None:
    """How a partitioned layer divides a parameter; layers that do it alike can share it."""
    if not isinstance(layer, PartitionedLayer):
        return None
    if name in layer.partitions:
        return "weight", layer.partitions[name].shape, layer.oriented(layer._parameters[name]).stride()
    return ("scale",) if name in layer.scales else ("shift",)
