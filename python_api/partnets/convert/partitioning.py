"""partition: makes the layers of an ordinary model partitioned ones, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.utils._pytree import tree_leaves

import partkernels
from partkernels.arguments import check_seed, sizes
from partnets.convert.finding import find_or_refuse, named
from partnets.convert.narrowing import narrow
from partnets.convert.planning import Plan
from partnets.convert.planning import plan as plan_units
from partnets.convert.reads import read_by
from partnets.convert.replacing import replace_modules
from partnets.nn import state_dict
from partnets.nn.initial_values import looks_learned
from partnets.nn.layer import SCHEMES, PartitionedLayer
from partnets.nn.live import subnetwork
from partnets.nn.nesting import MEASURES, no_defaults
from partnets.nn.own_parameters import OwnParameters, is_broadcast, own_parameters_class
from partnets.nn.own_state import own_state_class, sharing
from partnets.nn.partitioned import EXISTING, REPLACED, Partitioned, take_over
from partnets.nn.registry import Rule, rule_of
from partnets.utils import seeds
from partnets.utils.eager import eagerly
from partnets.utils.modules import device_of, disagreeing, evaluating, learning
from partnets.utils.random_state import preserved

# Layers that a warning names one by one.
MOST_NAMED = 10


@contextmanager
def _ordinarily() -> Iterator[None]:
    """Inside, parameters are made that can learn, and what is compiled runs as it is written."""
    with torch.inference_mode(False), eagerly():
        yield


@_ordinarily()
def partition(
    model: nn.Module,
    proportions: Sequence[float],
    *,
    defaults: str | partkernels.Defaults | None = None,
    seed: int = 0,
    skip: Iterable[str | nn.Module] = (),
    stateful: Iterable[str | nn.Module] = (),
    scheme: str = "weight",
    example: Any = None,
    proportions_of: str = "units",
    frozen: bool = False,
) -> nn.Module:
    """Replaces the layers of a model by partitioned ones, a fixed proportion of each at random (Appendix C).

    torch's layers have rules: Linear, Bilinear, convolutions and transposed ones, Embedding and EmbeddingBag,
    MultiheadAttention, RNN, LSTM and GRU, GroupNorm, LayerNorm, RMSNorm and BatchNorm; so have FixUp's scalars of
    partnets.models, and some layers of transformers and timm. `register` adds others. Any other module's code goes on
    reading its own parameters as attributes, and gets those of the live subnetwork: shifts, b_1 + ... + b_k, if they
    are broadcast (scalars, vectors, and those whose first dimension is 1, such as class tokens and position
    embeddings), and else weights. Of layers whose parents read their parameters, as F.linear(x, self.proj.weight) does,
    they get those of the live subnetwork too. Layers that share a weight share its partition. Modules of partnets.hyper
    stay, and so do modules without parameters. Parameters that require no gradient stay as they are, in every
    subnetwork: a module all of which is frozen is left alone, like one that `skip` names.

    A layer's own seed is derived from (seed, its dotted path), so the same call on the same architecture gives the same
    partitions everywhere.

    Args:
        model: changed in place.
        proportions: C numbers that sum to 1. The paper matches them to the chunks' (Appendix I.2).
        defaults: 'seed' re-initialises weights and biases from the layer's seed, so that the weight starts at its
            defaults at no memory: as torch does, or, where the present values were not drawn like that, from a uniform
            or normal distribution of their standard deviation, or as `seed_defaults` says; weights of modules without
            a rule stay, and are stored. 'zero' keeps the present weights, with defaults of 0; 'stored' keeps the
            present weights and a copy of them as defaults, for models that were pretrained on other data: of weights
            that have seen D_2..D_C, L_ML means nothing. Or an object, as in partnets.Linear. Shifts and scales have no
            defaults. None is 'seed', with a warning that names the layers whose weights don't look as their own
            initialisation draws them: what they had learned is lost.
        seed: an int in [0, 2**63).
        skip: dotted paths or modules that stay as they are, with everything inside them.
        stateful: dotted paths or modules whose code keeps something of the batches that it has seen (a running mean, a
            codebook, loads of experts, an average of weights): each subnetwork gets a copy of it, as of BatchNorm's
            statistics. That is all that they keep, with everything inside them, but for what learns and for layers with
            rules: buffers, frozen parameters, and attributes that are numbers, tensors, containers or objects of one's
            own. Copies start as it is now; what is assigned later, outside of any subnetwork, is assigned to all.
        scheme: 'weight' gives each entry of a weight to a partition at random; 'node' each output of a layer, with all
            weights that it depends on (Appendix C). 'nested' gives the first outputs of each layer to partition 1, the
            next ones to partition 2, and so on, so that subnetwork k is the first units of each layer and computes with
            nothing else. Defaults are 0 then, biases, norms and scales go with their unit, norms are over live units
            alone, and the model's inputs and outputs are live in all subnetworks. See explain_partition.
        example: for 'nested', what the model is called with to see which layer computes with whose outputs: a tensor, a
            tuple of its arguments, or a dict of them by name. Of its values nothing is kept.
        proportions_of: for 'nested', of what the proportions are: the 'units' of each layer, or its 'weights', so that
            subnetwork k has the square root of its share of the units. Numbers of units are rounded to multiples of 16,
            8, 4 or 2 where they are many.
        frozen: partitions parameters that require no gradient as well, for a model that is to be unfrozen later.

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
        UserWarning: without `defaults`, weights are redrawn that may be pretrained; or kept, of nested partitions.

    Raises:
        ValueError: modules without a rule cannot be divided, since they keep running statistics, for example (each type
            is named once); a layer is partitioned already; a shared parameter has no one partition; a path in skip
            does not exist; or an argument is out of range. The model has not changed then.
        TypeError: the model is no module.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        >>> partition(model, (0.8, 0.1, 0.1))[0]
        Conv2d(1, 8, kernel_size=(3, 3), stride=(1, 1), partitions=[58, 7, 7])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {model!r}; pass a module, as nn.Linear(4, 3) makes one.")
    check_seed("seed", seed)
    if isinstance(proportions, Tensor):
        proportions = proportions.tolist()
    sizes(0, proportions)
    _check_scheme(scheme, proportions, example, proportions_of)
    stateful = named(model, stateful, "stateful")
    found = find_or_refuse(model, named(model, skip, "skip"), stateful, frozen)
    if scheme == "nested" and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, where nothing can be run, and scheme='nested' runs the example; partition"
            " it where it has memory, as after model.to_empty(device='cpu')."
        )
    keeps_silently = scheme == "nested" and defaults is None
    defaults = no_defaults(defaults) if scheme == "nested" else defaults
    is_nested, scheme = scheme == "nested" and len(proportions) > 1, "weight" if scheme == "nested" else scheme
    plan, apart = Plan(), set()

    def options(module: nn.Module) -> dict[str, Any]:
        own = plan.nestings.get(module, plan.own.get(module, scheme))
        return {"defaults": "seed" if defaults is None else defaults, "scheme": own}

    while True:
        if is_nested:
            with learning(parameter for layer in found.layers.values() for parameter in layer.parameters() if frozen):
                own = [module for module in found.owning.values() if module not in found.kept]
                plan = plan_units(model, found.layers.values(), own, proportions, example, proportions_of, apart)
        new = {
            layer: _divided(rule_of(type(layer)), layer, frozen, proportions, seeds.derived(seed, path), options(layer))
            for path, layer in found.layers.items()
        }
        if not (torn := disagreeing(_units(new))):
            break
        apart |= torn
    if defaults is None:
        redrawn = {path: dict(_redrawn(layer, new[layer])) for path, layer in found.layers.items()}
        # Of tied layers one drew the weight that they share.
        usual = {weight for weights in redrawn.values() for weight, is_usual in weights.items() if is_usual}
        _warn_of_lost([path for path, weights in redrawn.items() if weights.keys() - usual])
    if keeps_silently and is_nested:
        _warn_of_learned(
            [path for path, layer in (found.layers | found.owning).items() if _has_learned(layer, new.get(layer))]
        )
    before = set(model.parameters())
    with sharing():
        own = {
            module: _divided(
                plan.norms.get(module, _class_for(module, found.kept.get(module))).from_ordinary,
                module,
                frozen,
                proportions,
                seeds.derived(seed, path),
                options(module),
            )
            for path, module in found.owning.items()
        }
    for path, module in found.owning.items():
        if isinstance(module, ParametrizationList):
            _check_finite(path, own[module])
    _share_tied(model, new | own, frozen)
    _change_classes(own)
    for module, divided in own.items():  # others may hold the module itself, and it stays
        compiled = {name: vars(module)[name] for name in vars(module).keys() & {"_compiled_call_impl"}}  # its own call
        take_over(module, divided)
        vars(module).update(compiled)
        EXISTING.add(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # its nested tensors are for torch's own layers
            module.use_nested_tensor = False
        if rule_of(type(module)) is None:
            for layer in read_by(module) & new.keys():
                new[layer].is_read = True
    model = replace_modules(model, _inside(new) | new)
    _compute_at_each_reading(model)
    REPLACED.update(dict.fromkeys(before.difference(model.parameters())))
    if not isinstance(model, PartitionedLayer):  # which look after themselves
        state_dict.guard(model)
    if is_nested:
        renewed = [{new.get(layer, layer) for layer in one} for one in plan.narrow]
        makers = {new.get(of, of): {new.get(one, one) for one in by} for of, by in plan.makers.items()}
        narrow(model, renewed, makers, {new.get(one, one) for one in plan.taking}, example)
        for layer, why in plan.why.items():
            new.get(layer, layer).whole_because = why
        _warn_of_nothing(new.values(), proportions)
    return model


def _check_finite(path: str, parametrized: nn.Module) -> None:
    """Raises ValueError if a subnetwork's parameters make a weight that is not finite, as weight_norm of a row of 0."""
    with torch.no_grad(), evaluating(parametrized), preserved(device_of(parametrized)):
        for k in range(parametrized.count, 0, -1):
            with subnetwork(parametrized, k):
                is_finite = bool(parametrized().isfinite().all())
            if k == parametrized.count and not is_finite:
                return  # so it was before
            if not is_finite:
                raise ValueError(
                    f"{path} makes a weight that is not finite of the entries of subnetwork {k}, as weight_norm does"
                    " where all entries of an output are of later partitions, and so are 0: skip it, give its outputs"
                    " more inputs, or keep to schemes 'weight' and 'node' without defaults='zero'."
                )


def _compute_at_each_reading(model: nn.Module) -> None:
    """Has parametrizations that partitions own compute their tensor whenever it is read.

    torch.nn.utils.parametrize.cached() keeps one by its name alone, which would be that of another subnetwork. torch
    makes a class for each parametrized module, so that nothing else reads by this property.
    """
    for module in model.modules():
        for name, made in module.parametrizations.items() if is_parametrized(module) else ():
            if isinstance(made, ParametrizationList) and any(isinstance(part, Partitioned) for part in made.modules()):
                present = property(lambda self, name=name: self.parametrizations[name]())
                setattr(type(module), name, present.setter(getattr(type(module), name).fset))


def _inside(new: dict[nn.Module, nn.Module]) -> dict[nn.Module, nn.Module]:
    """What is in layers, and what takes its place in new ones: others may hold an attention's last layer."""
    found = {}
    for layer, made in new.items():
        there = dict(made.named_modules())
        for path, module in layer.named_modules():
            if path and there.get(path, module) is not module:
                found[module] = there[path]
    return found


def _warn_of_nothing(layers: Iterable[nn.Module], proportions: Sequence[float]) -> None:
    divided = [p for layer in layers for p in getattr(layer, "partitions", {}).values()]
    units = [p.row_units for p in divided if isinstance(p, partkernels.NestedPartition) and not p.row_units.is_whole]
    owned = [sum(sizes) for sizes in zip(*(one.sizes() for one in units), strict=True)]
    if none := [k for k, (size, share) in enumerate(zip(owned, proportions, strict=False), 1) if share and not size]:
        warnings.warn(
            f"partition {', '.join(map(str, none))} of proportions {tuple(proportions)} has no unit of any layer: they"
            " are too narrow for so small a share. Give it a larger one, or make the layers wider.",
            stacklevel=4,  # past the decorator
        )


def _units(new: dict[nn.Module, nn.Module]) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """Of each weight of a layer, whose units its partitions are, if it would be nested."""
    for layer, divided in new.items():
        for name, partition in getattr(divided, "partitions", {}).items():
            if layer._parameters.get(name) is not None:
                is_nested = isinstance(partition, partkernels.NestedPartition)
                yield layer._parameters[name], layer, repr(partition) if is_nested else "at random"


def _check_scheme(scheme: str, proportions: Sequence[float], example: Any, proportions_of: str) -> None:
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r}; pass 'weight', 'node' or 'nested'.")
    if proportions_of not in MEASURES:
        raise ValueError(f"proportions_of={proportions_of!r}; pass 'units' or 'weights'.")
    if scheme == "nested" and example is None:
        raise ValueError(
            "scheme='nested' without example; pass what the model takes, a tensor, a tuple of its arguments or a dict"
            " of them by name: a call shows which layer computes with whose outputs."
        )
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if scheme == "nested" and any(not tensor.numel() or tensor.is_meta for tensor in tensors):
        raise ValueError(
            "example has a tensor without entries, or on the meta device; pass one with some numbers in it."
        )
    if scheme == "nested" and not proportions[0]:
        raise ValueError(
            f"proportions={tuple(proportions)} with scheme='nested': subnetwork 1 would have no units; let the first be"
            " above 0."
        )
    if scheme != "nested" and (example is not None or proportions_of != "units"):
        raise ValueError(f"example and proportions_of are for scheme='nested'; leave them out with {scheme!r}.")


def _change_classes(new: dict[nn.Module, nn.Module]) -> None:
    """Makes modules those of the classes of new ones; all of them or none."""
    before = {module: type(module) for module in new}
    try:
        for module, divided in new.items():
            module.__class__ = type(divided)
    except TypeError as error:
        for module, cls in before.items():
            module.__class__ = cls
        raise ValueError(
            f"a {before[module].__name__} cannot be changed in place ({error}); leave it out with skip=, or name a"
            " module around it."
        ) from None


def _divided(
    rule: Rule, layer: nn.Module, frozen: bool, proportions: Sequence[float], seed: int, options: dict[str, Any]
) -> nn.Module:
    """What a rule makes of a layer; with `frozen`, of parameters that require no gradient as of the others."""
    still = [name for name, parameter in layer.named_parameters() if frozen and not parameter.requires_grad]
    with learning(parameter for name, parameter in layer.named_parameters() if name in still):
        new = rule(layer, proportions, seed=seed, **options)
    for name, parameter in new.named_parameters():
        if name in still:
            parameter.requires_grad_(False)
    return new


def _redrawn(layer: nn.Module, new: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The weights of a layer that its partitioned one draws anew; whether nothing can be lost by it.

    Who freezes a weight wants to keep it; others look as torch draws such a layer's, or not.
    """
    before = dict(layer.named_modules())
    for path, inner in new.named_modules():
        if not isinstance(inner, PartitionedLayer) or inner.seed_defaults is not None or path not in before:
            continue
        for name in inner.partitions:
            weight = before[path]._parameters[name]
            if inner._parameters[name] is not weight:
                is_kept = weight.is_meta or not weight.any()
                yield weight, is_kept or (weight.requires_grad and inner.looks_drawn(name, weight))


def _has_learned(layer: nn.Module, new: nn.Module | None) -> bool:
    """Whether weights look as if they had learned: of a layer with a rule, that made the new one, or derived from one.

    Those that other modules have of their own may begin as anything.
    """
    is_derived = isinstance(layer, ParametrizationList) or any(map(rule_of, type(layer).__mro__[1:]))
    if new is None and not is_derived:
        return False
    weights = [weight for weight in layer._parameters.values() if weight is not None and weight.requires_grad]
    drawn = new.drawn_entries if isinstance(new, PartitionedLayer) else lambda weight: weight
    return any(looks_learned(drawn(weight)) for weight in weights if not is_broadcast(weight))


def _warn_of_learned(paths: list[str]) -> None:
    if not paths:
        return
    warnings.warn(
        f"nested partitions keep the weights that they divide, and those of {_listed(paths)} look as if they had"
        " learned: partition 1 would begin with what they know, of all chunks if it is from these data. Draw them anew,"
        " or pass defaults='zero' if they know other data alone.",
        stacklevel=4,  # past the decorator
    )


def _listed(paths: list[str]) -> str:
    named = ", ".join(path or "the model itself" for path in paths[:MOST_NAMED])
    return f"{named} and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else named


def _warn_of_lost(paths: list[str]) -> None:
    if not paths:
        return
    warnings.warn(
        f"partition draws the weights of {_listed(paths)} anew, and they don't look as these layers' own initialisation"
        " draws them. If they are pretrained, pass defaults='stored', which keeps them; defaults='seed' draws them anew"
        " without this warning.",
        stacklevel=4,  # past the decorator
    )


def _class_for(module: nn.Module, kept: tuple[str, ...] | None) -> type[OwnParameters]:
    own = {name: p for name, p in module._parameters.items() if p is not None and name not in (kept or ())}
    shifts = tuple(name for name in module._parameters if name not in own or is_broadcast(own[name]))
    weights = tuple(name for name in own if name not in shifts)
    if kept is not None:
        return own_state_class(type(module), weights, shifts, kept)
    return own_parameters_class(type(module), weights, shifts, _caches(module))


def _caches(module: nn.Module) -> tuple[str, ...]:
    """The dicts in which a module keeps what it makes of its parameters, as timm's attention biases, and which it
    empties in its own train()."""
    if type(module).train is nn.Module.train:
        return ()
    named = {name: value for name, value in vars(module).items() if "cache" in name and type(value) is dict}
    return tuple(
        name
        for name, value in named.items()
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in value.values())
    )


def _share_tied(model: nn.Module, new: dict[nn.Module, nn.Module], frozen: bool) -> None:
    """Gives new layers whose ordinary ones share a parameter one parameter and one partition; raises if it can't."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, module, name))
    for parameter, tied in owners.items():
        if not frozen and not parameter.requires_grad:
            continue  # every layer has kept it
        if len(tied) == 1 or not any(module in new for _, module, _ in tied):
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
