"""partition: partition the parameters of a model in place."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm

import partkernels
from partkernels import Zeros
from partkernels.arguments import check_seed, sizes
from partnets.hyper import Hyperparameter
from partnets.subnetworks.assignment import SCHEMES, Assignment, drawn_entries
from partnets.subnetworks.channel_search import find_channels
from partnets.subnetworks.channels import MEASURES, Narrow
from partnets.subnetworks.initial_values import looks_learned
from partnets.subnetworks.rules import REFUSED, known_rule, rule_of
from partnets.subnetworks.state import ENDS, ESTIMATED, LEARNED, ROWS, holder_of, state_of
from partnets.subnetworks.switch import partitioned_elsewhere, switch_of
from partnets.utils import seeds
from partnets.utils.modules import Model, is_frozen, overlapping

# A warning names at most so many modules.
MOST_NAMED = 10


class Obstacle(NamedTuple):
    """The reason why a module cannot be partitioned, as words after "a {kind}", and the cure."""

    kind: str
    what: str
    cure: str


@torch.inference_mode(False)
def partition(
    model: Model,
    proportions: Sequence[float],
    *,
    defaults: str | partkernels.Defaults | None = None,
    seed: int = 0,
    skip: Iterable[str | nn.Module] = (),
    stateful: Iterable[str | nn.Module] = (),
    scheme: str = "weight",
    example: Any = None,
    channels: Sequence[Mapping[str, Any]] | None = None,
    proportions_of: str = "channels",
    frozen: bool = False,
) -> Model:
    """Partition the parameters of a model in place, a fixed proportion of each weight at random (Appendix C).

    Modules keep their classes and their code; buffers beside the parameters hold the partitions, so state_dict, copies
    and moves to other devices include them. How a parameter is partitioned depends on its module's type:

    - Weights of torch's layers: each entry belongs to a partition. Where that is inactive, the entry has its default.
    - Biases: b_1 + ... + b_k, a vector for each partition. Scales of normalisation layers: s_1 * ... * s_k.
    - BatchNorm's running statistics: each subnetwork has its own.
    - Parameters of other modules: vectors that are added, if they are broadcast (scalars, vectors, or a first dimension
      of 1, such as class tokens), otherwise weights. `register` sets other rules.

    Modules of partnets.hyper are left unchanged. Parameters that require no gradient are the same in every subnetwork.
    Modules that share a parameter share its partition. The same call on the same architecture gives the same partitions
    everywhere.

    Args:
        model: a dense model.
        proportions: C numbers that sum to 1. The paper matches them to the chunks' (Appendix I.2).
        defaults: 'seed' draws weights and biases again from the module's seed, so that the weight starts at its
            defaults, which no file needs to contain. Weights are drawn as torch draws them, or as `seed_defaults` says;
            if the current values were not drawn like that, from a uniform or normal distribution with their standard
            deviation. Weights of modules without a rule, and constants of others than torch's, are unchanged, and
            stored. 'zero' keeps the current weights,
            with defaults of 0. 'stored' keeps the current weights and a copy as defaults, for models that were
            pretrained on other data; L_ML has no meaning for weights that have seen D_2..D_C. Or one of partkernels'
            Zeros, Uniform, Normal, Stored. None is 'seed', with a warning that names modules with weights that do not
            look freshly drawn.
        seed: an int in [0, 2**63).
        skip: dotted paths or modules that stay as they are, with everything inside them.
        stateful: dotted paths or modules whose code keeps something of the batches that it has seen (a running mean, a
            codebook, loads of experts, an average of weights): each subnetwork gets its own buffers and frozen
            parameters of these modules and of everything inside them, as for BatchNorm. They must keep their shapes.
        scheme: 'weight' gives each entry of a weight to a partition at random; 'node' each output of a layer, with all
            weights that it depends on (Appendix C). 'nested' gives the first channels of each layer to partition 1, the
            next ones to partition 2, and so on, so that subnetwork k is narrower and skips all other channels: see
            partnets.subnetworks.channels.
        example: for 'nested', an input with which the model is called to find the channels, and to check that narrow
            subnetworks run: a tensor, a tuple of arguments, or a dict of arguments by name.
        channels: for 'nested', groups of channels that are partitioned alike. Each is a dict of dotted paths: 'outputs'
            of layers and norms that return the channels, and of parameters that are added to them; 'inputs' of layers
            that take them. If 'block' is a number, so many channels stay together, such as those of a head. Other
            channels are in all subnetworks. If None, torch-pruning finds the groups.
        proportions_of: for 'nested': 'channels' if the proportions are shares of each layer's channels, 'weights' if
            they are shares of its weights; the shares of channels are then square roots. Numbers of channels are
            rounded to multiples of 16, 8, 4 or 2 if there are many.
        frozen: whether parameters that require no gradient are partitioned as well, for a model that is unfrozen later.

    An attribute `seed_defaults` on a module, set before this call, says how it starts: partkernels.Zeros(), or a
    function that is called with seed= and returns such an object. Then 'seed' draws weights from it, biases stay, and
    partnets.finalize(model, "retrain") draws from it too:

        layer.seed_defaults = functools.partial(partkernels.Normal, 0.02)

    Returns:
        The model.

    Warns:
        UserWarning: without `defaults`, weights are drawn again that may be pretrained.

    Raises:
        ValueError: a module cannot be partitioned (each type is named once), is partitioned already, or shares a
            parameter that has no one partition; a path in skip does not exist; or an argument is out of range. The
            model has not changed then.
        TypeError: the model is not a module.

    Example:
        >>> import partnets
        >>> model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
        >>> partnets.partitions(partition(model, (0.8, 0.1, 0.1)))["0.weight"].sizes()
        [58, 7, 7]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {model!r}; pass a module, such as nn.Linear(4, 3).")
    if not (isinstance(defaults, partkernels.Defaults) or defaults in (None, "seed", "zero", "stored")):
        raise ValueError(
            f"defaults={defaults!r}; pass 'seed', 'zero', 'stored', or one of partkernels' Zeros, Uniform, Normal,"
            " Stored."
        )
    check_seed("seed", seed)
    proportions = proportions.tolist() if isinstance(proportions, Tensor) else proportions
    sizes(0, proportions)
    _check_scheme(scheme, proportions, defaults, example, channels, proportions_of)
    skipped, keeping = named(model, skip, "skip"), named(model, stateful, "stateful")
    found, obstacles = find(model, skipped, frozen, keeping)
    if obstacles:
        raise ValueError(_refusal(obstacles))
    _check_parameters(model, found, skipped, frozen)
    statistics = _statistics(model, found, keeping, frozen)
    narrow: dict[nn.Module, Narrow] = {}
    if scheme == "nested":
        if defaults is None:
            _warn_of_learned(found)
        scheme, defaults = "weight", "zero"
        if len(proportions) > 1:
            without = {module for module in model.modules() if not any(True for _ in module.parameters(recurse=False))}
            among = {*found.values(), *(without - skipped)} - keeping
            narrow = find_channels(model, example, proportions, proportions_of, among, channels)
            # A norm without parameters is narrowed as well.
            found = {path: module for path, module in model.named_modules() if module in {*found.values(), *narrow}}
    chosen = "seed" if defaults is None else defaults
    options = {"defaults": chosen, "scheme": scheme, "frozen": frozen}
    assignments = {
        path: Assignment(
            module,
            proportions,
            seed=seeds.derived(seed, path),
            statistics=statistics.get(path, ()),
            narrow=narrow.get(module),
            **options,
        )
        for path, module in found.items()
    }
    tied = _tied(assignments)
    _check_weight_norms(assignments)
    if defaults is None:
        _warn_of_lost(assignments, tied)
    for assignment in assignments.values():
        assignment.apply()
    for first, first_name, assignment, name in tied:
        share(first.module, first_name, assignment.module, name)
    switch_of(model)  # which remembers where partitioned modules are
    return model


def _check_weight_norms(assignments: dict[str, Assignment]) -> None:
    """Raise ValueError where weight_norm would divide by 0: all entries of an output are inactive, and 0."""
    for path, assignment in assignments.items():
        norm = next((one for one in assignment.module.children() if isinstance(one, _WeightNorm)), None)
        partition = assignment.partitions.get("original1")
        if norm is None or partition is None or partition.is_meta or not isinstance(partition.defaults, Zeros):
            continue
        ids = partition.ids()
        others = [d for d in range(ids.dim()) if d != norm.dim]
        if ((ids.amin(others) if others else ids) > 1).any():
            raise ValueError(
                f"{path} makes a weight that is not finite: weight_norm divides by the norm of each output, and all"
                " entries of an output are inactive and 0; pass it in skip, or pass defaults='stored'."
            )


def _check_scheme(
    scheme: str, proportions: Sequence[float], defaults: Any, example: Any, channels: Any, proportions_of: str
) -> None:
    if scheme not in (*SCHEMES, "nested"):
        raise ValueError(f"scheme={scheme!r}; pass 'weight', 'node' or 'nested'.")
    if proportions_of not in MEASURES:
        raise ValueError(f"proportions_of={proportions_of!r}; pass 'channels' or 'weights'.")
    if scheme != "nested":
        if example is not None or channels is not None or proportions_of != "channels":
            raise ValueError(
                f"example, channels and proportions_of are for scheme='nested'; leave them out with {scheme!r}."
            )
        return
    if example is None:
        raise ValueError(
            "scheme='nested' without example; pass what the model takes: a tensor, a tuple of its arguments or a dict"
            " of them by name."
        )
    if not proportions[0]:
        raise ValueError(
            f"proportions={tuple(proportions)} with scheme='nested': subnetwork 1 would have no channels; let the first"
            " be above 0."
        )
    if defaults not in (None, "zero") and not isinstance(defaults, Zeros):
        raise ValueError(
            f"defaults={defaults!r} with scheme='nested', whose inactive channels are left out; pass None."
        )


def find(
    model: nn.Module,
    skipped: Collection[nn.Module] = (),
    frozen: bool = False,
    keeping: Collection[nn.Module] = (),
) -> tuple[dict[str, nn.Module], dict[str, Obstacle]]:
    """Return the modules that `partition` would partition, and the obstacles of others, both by their paths."""
    found, obstacles = {}, {}
    inside_hyper = {inner for one in model.modules() if isinstance(one, Hyperparameter) for inner in one.modules()}
    for path, module in model.named_modules():
        if module in skipped or module in inside_hyper:
            continue
        own = [p for p in module._parameters.values() if p is not None and (frozen or p.requires_grad)]
        is_kept = module in keeping
        is_still = is_frozen(module) and not frozen and not is_kept
        if obstacle := _obstacle(module, own, is_kept):
            obstacles[path] = obstacle
        elif own or (_own_statistics(module, is_kept, frozen) and not is_still):
            found[path] = module
    return found, obstacles


def _own_statistics(module: nn.Module, is_kept: bool, frozen: bool) -> list[str]:
    """Return the names of a module's buffers and frozen parameters with a separate value for each subnetwork."""
    present = [name for name, buffer in module._buffers.items() if buffer is not None]
    if not is_kept:
        return [name for name in rule_of(type(module)).statistics if name in present]
    still = [name for name, p in module._parameters.items() if p is not None and not (frozen or p.requires_grad)]
    return [*present, *still]


def _statistics(
    model: nn.Module, found: dict[str, nn.Module], keeping: Collection[nn.Module], frozen: bool
) -> dict[str, list[str]]:
    """Return the names of buffers and frozen parameters with a value for each subnetwork, by the modules' paths.

    Raises:
        ValueError: modules named in stateful= have nothing of the kind, or modules share it.
    """
    names = {path: _own_statistics(module, module in keeping, frozen) for path, module in found.items()}
    kept = {
        f"{path}.{name}".lstrip("."): holder_of(module, name)[name]
        for path, module in found.items()
        for name in names[path]
    }
    if keeping and not any(names[path] for path, module in found.items() if module in keeping):
        raise ValueError(
            "the modules that stateful names have no buffers or frozen parameters, of which each subnetwork could have"
            " its own; register what their code keeps by register_buffer."
        )
    tensors = {
        f"{path}.{name}".lstrip("."): tensor
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.layout == torch.strided
    }
    for one, other in overlapping(tensors) if kept else ():
        if one in kept or other in kept:
            raise ValueError(f"{one} and {other} share memory, so that subnetworks cannot have their own; copy one.")
    return names


def _obstacle(module: nn.Module, own: list[nn.Parameter], is_kept: bool = False) -> Obstacle | None:
    """Return why a module cannot be partitioned, or None."""
    kind = type(module).__name__
    if state_of(module) is not None:
        return Obstacle(kind, "that is partitioned already", "merge the model first")
    for refused, (what, cure, is_by_parameters) in REFUSED.items():
        is_one = any(isinstance(one, refused) for one in (module, *module._forward_pre_hooks.values()))
        if is_one and (own or is_kept or not is_by_parameters):
            return Obstacle(kind, what, cure)
    if not own and not is_kept:
        return None
    if any(map(is_lazy, own)):
        return Obstacle(kind, "whose parameters are made by its first call", "call it first")
    rule = rule_of(type(module))
    if why := rule.refuses(module):
        return Obstacle(kind, why, "leave these out")
    for name, parameter in module._parameters.items():
        if not any(parameter is one for one in own):
            continue
        if not parameter.is_floating_point():
            return Obstacle(kind, f"with a {name} that is not of real numbers", "keep real and imaginary parts apart")
        if parameter.dim() > 1 and not parameter.numel():
            return Obstacle(kind, f"with a {name} of shape {tuple(parameter.shape)}, without entries", "leave it out")
    running = [name for name, b in module._buffers.items() if name.startswith("running_") and b is not None]
    if running and not is_kept and not set(running) <= set(rule.statistics):
        what = "whose running statistics would carry data between chunks"
        cure = "name it in stateful=, or register a rule with partnets.register that names them as statistics"
        return Obstacle(kind, what, cure)
    loose = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    if is_kept and loose:
        what = f"with a tensor in an attribute {loose[0]}, which subnetworks would share"
        return Obstacle(kind, what, "register it by register_buffer")
    names = {name + end for name in module._parameters for end in ENDS}
    names |= {ESTIMATED, LEARNED} | {name + ROWS for name in module._buffers if is_kept or name in rule.statistics}
    if taken := sorted(name for name in names if hasattr(module, name)):
        return Obstacle(kind, f"with an attribute {taken[0]}, which partnets needs", "rename it")
    return None


def named(model: nn.Module, entries: Iterable[str | nn.Module], argument: str) -> set[nn.Module]:
    """Return the modules that an argument names, with all modules inside them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = set()
    for entry in [entries] if isinstance(entries, str | nn.Module) else entries:
        module = modules.get(entry) if isinstance(entry, str) else entry
        if module not in modules.values():
            given = repr(entry) if isinstance(entry, str) else f"a {type(entry).__name__}"
            known = ", ".join(repr(path) for path in modules if path)
            raise ValueError(f"{argument} names {given}, which is not in this model; its modules are {known}.")
        found.update(module.modules())
    return found


def _check_parameters(model: nn.Module, found: dict[str, nn.Module], skipped: set[nn.Module], frozen: bool) -> None:
    """Raise ValueError if there is nothing to partition, or a parameter shares memory or is partitioned elsewhere."""
    if not found:
        if is_frozen(model) and not frozen:
            raise ValueError(
                f"no parameter of this {type(model).__name__} requires a gradient, so that none is partitioned;"
                " unfreeze what is to learn, or pass frozen=True to partition all of it."
            )
        raise ValueError(f"this {type(model).__name__} has no parameter to partition.")
    own = [p for one in found.values() for p in one.parameters(recurse=False) if frozen or p.requires_grad]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if shared := overlapping({names[id(parameter)]: parameter for parameter in own}):
        first, second = shared[0]
        raise ValueError(
            f"{first} and {second} are two parameters that share memory, and would have two partitions; tie them by"
            " assigning one Parameter to both, or copy it."
        )
    elsewhere = partitioned_elsewhere()
    if others := [names[id(parameter)] for parameter in own if id(parameter) in elsewhere]:
        raise ValueError(
            f"{others[0]} is a parameter of another model, which is partitioned already; copy it, or partition a module"
            " that contains both models."
        )
    outside = {id(parameter) for module in skipped for parameter in module.parameters(recurse=False)}
    if both := [names[id(parameter)] for parameter in own if id(parameter) in outside]:
        raise ValueError(f"{both[0]} is a parameter of a skipped module too; skip all of the modules that share it.")


def _tied(assignments: dict[str, Assignment]) -> list[tuple[Assignment, str, Assignment, str]]:
    """Return each tied parameter: the place where it is partitioned, and another place."""
    first: dict[int, tuple[str, Assignment, str]] = {}
    tied = []
    for path, assignment in assignments.items():
        for name in [*assignment.partitions, *assignment.vectors]:
            parameter = assignment.module._parameters[name]
            key = id(parameter)
            if key not in first:
                first[key] = path, assignment, name
                continue
            first_path, other, other_name = first[key]
            kinds = [
                (name in one.partitions, one.vectors.get(of)) for one, of in ((other, other_name), (assignment, name))
            ]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"modules share a parameter: {first_path}.{other_name} = {path}.{name}. As what these are, they"
                    " cannot share a partition; give each a parameter of its own, or skip both."
                )
            tied.append((other, other_name, assignment, name))
            assignment.values.pop(name, None)
    return tied


def share(first: nn.Module, first_name: str, other: nn.Module, name: str) -> None:
    """Give a parameter in a second place the partition of the first."""
    one, two = state_of(first), state_of(other)
    for end in ENDS:
        if first_name + end in first._buffers:
            other.register_buffer(name + end, first._buffers[first_name + end])
        elif name + end in other._buffers:
            del other._buffers[name + end]
    if first_name in one.weights:
        two.weights[name] = one.weights[first_name]
        two.sums_of_maps[name] = one.sums_of_maps.setdefault(first_name, {})


def _warn_of_lost(assignments: dict[str, Assignment], tied: list) -> None:
    drawn = {id(d.module._parameters[name]) for d in assignments.values() for name, ok in d.redrawn.items() if ok}
    paths = [
        path
        for path, assignment in assignments.items()
        if assignment.declared is None
        and any(
            not ok and id(assignment.module._parameters[name]) not in drawn for name, ok in assignment.redrawn.items()
        )
    ]
    if paths:
        warnings.warn(
            f"partition draws the weights of {_listed(paths)} again, and they do not look as these modules' own"
            " initialisation draws them. If they are pretrained, pass defaults='stored', which keeps them;"
            " defaults='seed' draws them again without this warning.",
            stacklevel=4,  # past the decorator
        )


def _warn_of_learned(found: dict[str, nn.Module]) -> None:
    paths = [
        path
        for path, module in found.items()
        if known_rule(type(module)) is not None and any(map(looks_learned, _trained(module)))
    ]
    if paths:
        warnings.warn(
            f"scheme='nested' keeps the weights of {_listed(paths)}, which look as if they had learned: partition 1"
            " would start with knowledge of all chunks if it is from this data. Draw the weights again, or pass"
            " defaults='zero' if they have only learned from other data.",
            stacklevel=4,  # past the decorator
        )


def _trained(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module's own that require gradients, without the rows that stand for padding."""
    return [drawn_entries(module, p) for p in module.parameters(recurse=False) if p.requires_grad and p.dim() > 1]


def _listed(paths: list[str]) -> str:
    names = ", ".join(path or "the model itself" for path in paths[:MOST_NAMED])
    return f"{names} and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else names


def _refusal(obstacles: dict[str, Obstacle]) -> str:
    """Return a message with each type of module, the number of such modules, the path of the first, and the cure."""
    alike: dict[Obstacle, list[str]] = defaultdict(list)
    for path, obstacle in obstacles.items():
        alike[obstacle].append(path or "the model itself")
    lines = [
        f"  {len(paths)} {kind} ({paths[0]}{', ...' if len(paths) > 1 else ''}) {what}; {cure}."
        for (kind, what, cure), paths in alike.items()
    ]
    return (
        "this model cannot be partitioned as it is:\n" + "\n".join(lines) + "\nOr leave them out, with"
        " skip=partnets.without_rule(model), and freeze them (parameters without gradients, evaluation mode)."
    )


def without_rule(model: nn.Module, *, skip: Iterable[str | nn.Module] = (), frozen: bool = False) -> dict[str, str]:
    """Return the path of each module that `partition` would refuse, and why.

    Args:
        model, skip, frozen: as in `partition`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyLinear(3))
        >>> without_rule(model)
        {'1': 'a LazyLinear whose parameters are made by its first call; call it first'}
    """
    _, obstacles = find(model, named(model, skip, "skip"), frozen)
    return {path: f"a {kind} {what}; {cure}" for path, (kind, what, cure) in obstacles.items()}
