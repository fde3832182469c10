"""partition: makes the layers of an ordinary model partitioned ones, in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

import partkernels
from partkernels.defaults import check_seed
from partkernels.partition import sizes
from partnets import models, scalars
from partnets.conv2d import Conv2d
from partnets.hyper import Hyperparameter
from partnets.linear import Linear
from partnets.norms import GroupNorm, LayerNorm
from partnets.partitioned import Partitioned

# By exact type: a subclass may read its weight in a way of its own.
_rules: dict[type[nn.Module], Callable[..., nn.Module]] = {}

# These read the weights of their children directly and would not notice that those are partitioned.
_READ_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def register(layer_type: type[nn.Module], rule: Callable[..., nn.Module]) -> None:
    """Tells `partition` what to make of a type of layer; subclasses of it need rules of their own.

    Args:
        layer_type: a subclass of torch.nn.Module.
        rule: rule(layer, proportions, *, seed, defaults) -> Module, as Linear.from_ordinary is: a new module (or the
            layer itself, if it can stay), without changing the layer. seed is the layer's own.

    Raises:
        TypeError: layer_type is no type of module.

    Example:
        >>> class MyLinear(nn.Linear):
        ...     pass
        >>> register(MyLinear, Linear.from_ordinary)
        >>> partition(nn.Sequential(MyLinear(4, 3)), (0.5, 0.5))[0]
        Linear(in_features=4, out_features=3, bias=True, partitions=[6, 6])
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register got {layer_type!r}; pass a subclass of torch.nn.Module.")
    _rules[layer_type] = rule


register(nn.Linear, Linear.from_ordinary)
register(nn.Conv2d, Conv2d.from_ordinary)
register(nn.GroupNorm, GroupNorm.from_ordinary)
register(nn.LayerNorm, LayerNorm.from_ordinary)
register(models.Bias, scalars.Bias.from_ordinary)
register(models.Scale, scalars.Scale.from_ordinary)


def partition(
    model: nn.Module,
    proportions: Sequence[float],
    *,
    defaults: str | partkernels.Defaults = "seed",
    seed: int = 0,
    skip: Iterable[str | nn.Module] = (),
) -> nn.Module:
    """Replaces the layers of a model by partitioned ones, a fixed proportion of each at random (Appendix C).

    nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm and models.Bias and Scale have rules; `register` adds others.
    Modules of partnets.hyper stay, and so do modules that have neither a rule nor parameters. A layer's own seed is
    derived from (seed, its dotted path), so the same call on the same architecture gives the same partitions
    everywhere.

    A layer can say how it starts when it is drawn from a seed: with an attribute `seed_defaults` on the ordinary layer,
    before this call, which is partkernels.Zeros(), or is called with seed= and returns such an object. Then 'seed'
    draws the weight from it, and the bias stays; partnets.finalize's 'retrain' draws it as well, with a bias of 0. It
    survives copies and pickling if it is a functools.partial:

        layer.seed_defaults = functools.partial(partkernels.Normal, 0.02)

    Args:
        model: changed in place.
        proportions: C numbers that sum to 1. The paper matches them to the chunks' (Appendix I.2).
        defaults: 'seed' re-initialises weights and biases from the layer's seed, as torch does or as `seed_defaults`
            says, so that the weight starts at its defaults at no memory; 'zero' keeps the present weights, with
            defaults of 0; 'stored' keeps the present weights and a copy of them as defaults, for pretrained models. Or
            an object, as in partnets.Linear. Norms and FixUp's scalars have no defaults, and keep their values.
        seed: an int in [0, 2**63).
        skip: dotted paths or modules that stay as they are, with everything inside them.

    Returns:
        The model; if it is a layer itself, the new layer.

    Raises:
        ValueError: a module with parameters or running statistics has no rule (all of them are named), a layer is
            partitioned already, layers share a parameter, a path in skip does not exist, or an argument is out of
            range. The model has not changed then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        >>> partition(model, (0.8, 0.1, 0.1))[0]
        Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), partitions=[58, 7, 7])
    """
    check_seed("seed", seed)
    sizes(0, proportions)
    layers = _find_layers(model, _skipped(model, skip))
    _check_tied(model, layers)
    new = {
        layer: _rules[type(layer)](layer, proportions, seed=_layer_seed(seed, path), defaults=defaults)
        for path, layer in layers.items()
    }
    return replace_modules(model, new)


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """The model with each module of `new` replaced, under every path that it has."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            module._modules[name] = new.get(child, child)
    return new.get(model, model)


def _layer_seed(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ((1 << 63) - 1)


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
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU())
        >>> without_rule(model)
        {'1': 'a PReLU with parameters of its own and no rule'}
        >>> partition(model, (0.5, 0.5), skip=without_rule(model))[0].count
        2
    """
    return layers_and_obstacles(model, _skipped(model, skip))[1]


def layers_and_obstacles(
    model: nn.Module, skipped: Collection[nn.Module] = ()
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers that rules replace, by their paths; and what stands in the way, as without_rule returns it."""
    layers, obstacles = {}, {}

    def visit(path: str, module: nn.Module) -> None:
        if module in skipped or module in layers.values() or isinstance(module, Hyperparameter):
            return
        if isinstance(module, Partitioned):
            obstacles[path] = f"a {type(module).__name__} that is partitioned already"
        elif type(module) in _rules:
            layers[path] = module
        elif isinstance(module, _READ_CHILDREN):
            obstacles[path] = f"a {type(module).__name__}, which reads the weights of its children directly"
        elif next(module.parameters(recurse=False), None) is not None:
            obstacles[path] = f"a {type(module).__name__} with parameters of its own and no rule"
        elif isinstance(module, _NormBase) and module.running_mean is not None:
            obstacles[path] = f"a {type(module).__name__} whose running statistics would carry data between chunks"
        else:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return layers, obstacles


def _find_layers(model: nn.Module, skipped: set[nn.Module]) -> dict[str, nn.Module]:
    """The path and layer of each module that a rule replaces; raises for all that need a rule and have none."""
    layers, obstacles = layers_and_obstacles(model, skipped)
    if obstacles:
        listed = "\n".join(f"  {path or 'the model itself'}: {what}" for path, what in obstacles.items())
        raise ValueError(
            f"this model cannot be partitioned as it is:\n{listed}\nLeave them out with"
            f" skip={[path for path in obstacles if path]!r} and freeze them (parameters without gradients, evaluation"
            " mode), or give their type a rule with partnets.register."
        )
    if not layers:
        known = ", ".join(layer_type.__name__ for layer_type in _rules)
        raise ValueError(f"this {type(model).__name__} has no layer to partition; known are {known}.")
    return layers


def _check_tied(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    owners: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
    partitioned = {parameter for layer in layers.values() for parameter in layer.parameters()}
    tied = [" = ".join(names) for parameter, names in owners.items() if len(names) > 1 and parameter in partitioned]
    if tied:
        raise ValueError(
            f"layers share parameters: {'; '.join(tied)}. A shared weight would get two partitions; give each layer a"
            " parameter of its own, or leave all of these layers out with skip=."
        )
