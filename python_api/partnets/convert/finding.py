"""find: which modules of a model partition divides, by which rules, and why it cannot divide others."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrizations import _SpectralNorm

from partnets.convert.reads import globals_of, written_by
from partnets.hyper import Hyperparameter
from partnets.nn.layer import PartitionedLayer
from partnets.nn.own_parameters import OwnParameters, is_broadcast
from partnets.nn.own_state import OwnState
from partnets.nn.partitioned import Partitioned
from partnets.nn.registry import known, rule_of
from partnets.utils.held import inside, is_of_library
from partnets.utils.modules import is_frozen, overlapping

# Their code goes through all modules in them.
GOES_THROUGH = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What a class may have and OwnParameters has too: it calls the class's, or reads it.
SHARED = {"reset_parameters", "seed_defaults"}
RULE = "give its type a rule with partnets.register"


def named(model: nn.Module, entries: Iterable[str | nn.Module], argument: str) -> set[nn.Module]:
    """The modules that an argument names, and all that are inside."""
    modules = dict(model.named_modules(remove_duplicate=False))
    named = set()
    for entry in [entries] if isinstance(entries, str | nn.Module) else entries:
        module = modules.get(entry) if isinstance(entry, str) else entry
        if module not in modules.values():
            given = repr(entry) if isinstance(entry, str) else f"a {type(entry).__name__}"
            known = ", ".join(repr(path) for path in modules if path)
            raise ValueError(f"{argument} names {given}, which is not in this model; its modules are {known}.")
        named.update(module.modules())
    return named


def without_rule(
    model: nn.Module,
    *,
    skip: Iterable[str | nn.Module] = (),
    stateful: Iterable[str | nn.Module] = (),
    frozen: bool = False,
) -> dict[str, str]:
    """The path of each module that `partition` cannot divide and would raise for, and why.

    Args:
        model, skip, stateful, frozen: as in `partition`.

    Example:
        >>> import partnets
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyLinear(3))
        >>> without_rule(model)
        {'1': 'a LazyLinear whose parameters are made by its first call; call it first'}
        >>> partnets.partition(model, (0.5, 0.5), skip=without_rule(model))[0].count
        2
    """
    obstacles = find(model, named(model, skip, "skip"), named(model, stateful, "stateful"), frozen).obstacles
    return {path: f"a {kind} {what}; {cure}" for path, (kind, what, cure) in obstacles.items()}


class Obstacle(NamedTuple):
    """Why a module cannot be divided, and what helps.

    Attributes:
        kind: the name of its class.
        what: what of it is in the way, in words that follow "a {kind}".
        cure: what to do.
    """

    kind: str
    what: str
    cure: str


class Found(NamedTuple):
    """What `partition` finds in a model, by dotted paths.

    Attributes:
        layers: those that rules replace.
        owning: modules without a rule that have parameters of their own, or state.
        kept: of each of these that has state, the names of the parameters, buffers and modules that are state.
        obstacles: why each of the other modules that have something to divide cannot be divided.
    """

    layers: dict[str, nn.Module]
    owning: dict[str, nn.Module]
    kept: dict[nn.Module, tuple[str, ...]]
    obstacles: dict[str, Obstacle]


def find(
    model: nn.Module,
    skipped: Collection[nn.Module] = (),
    stateful: Collection[nn.Module] = (),
    frozen: bool = False,
) -> Found:
    """What `partition` would do with each module of a model, except those that are skipped, or frozen without `frozen`.

    A frozen module is one with parameters, of its own or inside, none of which requires a gradient.
    """
    layers, owning, kept, obstacles = {}, {}, {}, {}
    seen = set()
    parents = Counter(child for module in model.modules() for child in module._modules.values())
    # What several modules hold stays one module, with a state of its own.
    apart = {child for child, number in parents.items() if number > 1}.union(skipped)

    # A function that called itself would keep the model alive until the next garbage collection.
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in skipped or module in seen or isinstance(module, Hyperparameter):
            continue
        is_left_alone = not frozen and is_frozen(module)
        if is_left_alone and module not in stateful:
            continue
        seen.add(module)
        kind = type(module).__name__
        if obstacle := _lost(module, frozen):
            obstacles[path] = obstacle
        if isinstance(module, Partitioned):
            obstacles[path] = Obstacle(kind, "that is partitioned already", "merge the model first")
            continue
        if rule_of(type(module)) is not None and not is_left_alone:
            if any(child in skipped for child in module.modules()):
                obstacles[path] = Obstacle(kind, "of which a part is skipped", "skip all of it")
            if unreal := _unreal(module):
                obstacles[path] = unreal
            layers[path] = module
            continue
        names = _kept(module, apart, frozen) if module in stateful else None
        if names is not None:
            kept[module] = names
        if module in stateful and isinstance(module, GOES_THROUGH) and _has_more(module):
            what = "whose code goes through the modules in it, and would meet its state there"
            obstacles[path] = Obstacle(kind, what, "let a module inside it keep what is kept, and name that")
        obstacle = _obstacle(module, skipped, names, frozen)
        if obstacle is not None:
            obstacles[path] = obstacle
        elif names is not None or _owned(module, frozen):
            owning[path] = module
        children = [(name, child) for name, child in module.named_children() if name not in (names or ())]
        waiting += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
    for path in out_of_reach(model, layers):
        what = "that an object, a function or a method keeps too, which would go on with it as it was"
        obstacles[path] = Obstacle(type(layers[path]).__name__, what, "call it as a module's attribute")
    return Found(layers, owning, kept, obstacles)


def out_of_reach(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """The paths of those layers that a model keeps where replace_modules does not replace them."""
    paths = {layer: path for path, layer in layers.items()}
    held = [value for _, _, value, is_reached in _held(model) if isinstance(value, nn.Module) and not is_reached]
    return [paths[module] for module in held if module in paths]


def _held(model: nn.Module) -> Iterator[tuple[str, str, Any, bool]]:
    """All that modules hold in attributes, and in what these hold: containers, functions, objects of one's own.

    Yields:
        A module's path, its attribute, a value that is there, and whether replace_modules looks there.
    """
    seen = set(map(id, model.modules()))
    for path, module in model.named_modules():
        for attribute, held in vars(module).items():
            if attribute not in ("_modules", "_parameters", "_buffers"):
                for value, is_reached in _parts(held, True, seen):
                    yield path, attribute, value, is_reached


def _parts(value: Any, is_reached: bool, seen: set[int]) -> Iterator[tuple[Any, bool]]:
    """Yield a value and all that it holds, but for what is `seen`, each with whether replace_modules looks there."""
    yield value, is_reached
    if id(value) not in seen:
        seen.add(id(value))
        for _, part in inside(value):
            yield from _parts(part, is_reached and isinstance(value, list | tuple | dict), seen)
        # In a notebook, `inner = layer.forward; layer.forward = lambda x: 2 * inner(x)` reads it there.
        for part in globals_of(value) if isinstance(value, FunctionType) and not is_of_library(value) else ():
            yield from _parts(part, False, seen)


def _lost(module: nn.Module, frozen: bool) -> Obstacle | None:
    """What a module does with its parameters that those of its subnetworks would not know of."""
    kind = type(module).__name__
    learning = [(name, p) for name, p in module.named_parameters(recurse=False) if frozen or p.requires_grad]
    if hooked := [name for name, p in learning if p._backward_hooks or p._post_accumulate_grad_hooks]:
        return Obstacle(kind, f"with hooks on its {hooked[0]}", "register them on the new parameter, afterwards")
    written = {} if isinstance(module, Partitioned) else written_by(module)
    if written := [name for name, parameter in written.items() if frozen or parameter.requires_grad]:
        what = f"whose forward writes {written[0]} in place, which a subnetwork's weight would forget"
        return Obstacle(kind, what, "compute with the changed value (weight = torch.renorm(self.weight, ...)) instead")
    return None


def _unreal(module: nn.Module) -> Obstacle | None:
    """That a layer of one of partnets' rules, which compute with real numbers, has other parameters."""
    if not issubclass(getattr(rule_of(type(module)), "__self__", object), PartitionedLayer):
        return None
    unreal = [f"{name} of {p.dtype}" for name, p in module.named_parameters() if not p.is_floating_point()]
    if not unreal:
        return None
    what = f"with parameters that are no real numbers: {', '.join(unreal)}"
    return Obstacle(type(module).__name__, what, "keep real and imaginary parts as two layers, or skip it")


def _owned(module: nn.Module, frozen: bool) -> dict[str, nn.Parameter]:
    """The parameters that a module keeps for itself; none if all of them are frozen, without `frozen`."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    return own if frozen or any(parameter.requires_grad for parameter in own.values()) else {}


def _kept(module: nn.Module, apart: Collection[nn.Module], frozen: bool) -> tuple[str, ...] | None:
    """The names of the parameters, buffers and modules that are a module's state; None if it can have none."""
    if isinstance(module, (*GOES_THROUGH, torch.jit.ScriptModule)):
        return None

    def is_state(child: nn.Module) -> bool:
        parts = list(child.modules())
        others = any(part in apart or isinstance(part, Partitioned | Hyperparameter) for part in parts)
        keeps = any(part._parameters or part._buffers or not _is_torchs(part) for part in parts)
        return keeps and not others and not any(frozen or p.requires_grad for p in child.parameters())

    names = [name for name, p in module._parameters.items() if not (p is None or frozen or p.requires_grad)]
    names += module._buffers
    names += [name for name, child in module.named_children() if is_state(child)]
    return tuple(names) if names or not _is_torchs(module) else None


def _has_more(module: nn.Module) -> bool:
    """Whether there are buffers or attributes beside what every module has."""
    return bool(module._buffers or vars(module).keys() - vars(nn.Module()).keys())


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _obstacle(
    module: nn.Module, skipped: Collection[nn.Module], kept: Collection[str] | None, frozen: bool
) -> Obstacle | None:
    """Why the parameters that a module keeps for itself cannot be divided; None if they can be, or there are none.

    Args:
        module: without a rule.
        skipped: modules that stay as they are.
        kept: what of it is state, or None if it is to have none.
        frozen: whether parameters that require no gradient count.
    """
    kind = type(module).__name__
    own = _owned(module, frozen)
    if isinstance(module, nn.TransformerEncoderLayer):
        attention = module.self_attn
        left_alone = not frozen and is_frozen(attention)
        if attention in skipped or left_alone or rule_of(type(attention)) is None:
            what = "which reads its children's weights unless a rule replaces its self_attn"
            return Obstacle(kind, what, "skip or freeze all of it")
    if isinstance(module, _SpectralNorm):
        what = "whose power iteration would carry data between chunks"
        return Obstacle(kind, what, "remove the spectral normalisation first")
    running = [name for name, buffer in module._buffers.items() if name.startswith("running_") and buffer is not None]
    if running and kept is None and (own or isinstance(module, _NormBase)):
        what = "whose running statistics would carry data between chunks"
        cure = "replace it by one that keeps none, as GroupNorm, or has a rule, as BatchNorm2d; or name it in stateful="
        return Obstacle(kind, what, cure)
    if kept is not None and type(module).get_extra_state is not nn.Module.get_extra_state:
        return Obstacle(kind, "with an extra state of its own (get_extra_state)", "keep that in buffers")
    if kept is not None and any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return Obstacle(kind, "with a ScriptModule, whose state is out of reach", "take the module that it was made of")
    if kept is not None and type(module).__setattr__ is not nn.Module.__setattr__:
        return Obstacle(kind, "with a __setattr__ of its own", "name a module inside it that keeps what is kept")
    if any(isinstance(parameter, UninitializedParameter) for parameter in own.values()):
        return Obstacle(kind, "whose parameters are made by its first call", "call it first")
    others = [name for name, value in vars(module).items() if name != "_parameters" and _holds(value, own.values())]
    if others:
        return Obstacle(kind, f"without a rule, which keeps its parameters in {', '.join(others)} too", RULE)
    if len(set(own.values())) < len(own):
        return Obstacle(kind, f"without a rule, with one parameter under several names of {', '.join(own)}", RULE)
    if own and isinstance(module, torch.fx.GraphModule):
        what = "whose graph was made by torch.fx and reads parameters of its own"
        return Obstacle(kind, what, "take the model that it was made of")
    if own and isinstance(module, torch.jit.ScriptModule):
        return Obstacle(kind, "whose compiled code reads its own parameters", "take the module that it was made of")
    if (own or kept is not None) and (taken := _taken_names(module, OwnParameters if kept is None else OwnState)):
        return Obstacle(
            kind, f"without a rule, whose {', '.join(taken)} is partnets' own name", f"rename it, or {RULE}"
        )
    unreal = {name: p for name, p in own.items() if not p.is_floating_point()}
    if whole := [f"{name} of {p.dtype}" for name, p in unreal.items() if not p.is_complex()]:
        what = f"without a rule, whose {', '.join(whole)} cannot learn while others do"
        return Obstacle(kind, what, "freeze those too, as a quantised layer's bias, or skip it")
    if unreal := [f"{name} of {p.dtype}" for name, p in unreal.items() if not is_broadcast(p)]:
        return Obstacle(kind, f"without a rule, with parameters that are no real numbers: {', '.join(unreal)}", RULE)
    return None


def _holds(value: object, parameters: Collection[nn.Parameter]) -> bool:
    """Whether a value is one of these parameters, or a container with one in it."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, Tensor) and any(one is parameter for parameter in parameters) for one in values)


def _taken_names(module: nn.Module, base: type[OwnParameters]) -> list[str]:
    """The names of a module's attributes, methods and children that OwnParameters hides, or that hide its."""
    theirs = {name for cls in _above(nn.Module, type(module)) for name in vars(cls)}
    theirs |= {*vars(module), *module._modules, *module._parameters, *module._buffers}
    if isinstance(module, nn.ParameterDict):  # peft keeps adapters in some; a divided one takes no more of them
        theirs.discard("update")
    classes = _above(nn.Module, base)
    ours = {name for cls in classes for name in (*vars(cls), *inspect.get_annotations(cls))}
    ours -= vars(nn.Module).keys() | SHARED
    return sorted(name for name in theirs & ours if not name.startswith("__"))


def _above(base: type, cls: type) -> list[type]:
    """A class and its bases, but for those that `base` has as well."""
    return [one for one in cls.__mro__ if not issubclass(base, one)]


def find_or_refuse(model: nn.Module, skipped: set[nn.Module], stateful: set[nn.Module], frozen: bool) -> Found:
    """What `find` finds; raises for all that need a rule and have none."""
    found = find(model, skipped, stateful, frozen)
    divided = {
        parameter: f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if module not in skipped
        for name, parameter in module.named_parameters(recurse=False)
        if frozen or parameter.requires_grad
    }
    if shared := overlapping({name: parameter for parameter, name in divided.items()}):
        first, second = shared[0]
        raise ValueError(
            f"{first} and {second} are two parameters that share memory, and would have two partitions; tie them by"
            f" assigning one Parameter to both, or copy it."
        )
    if found.obstacles:
        raise ValueError(_refusal(found.obstacles))
    for path, layer in found.layers.items():
        for name, weight in layer.named_parameters():
            if weight in divided and weight.dim() > 1 and not weight.numel():
                raise ValueError(
                    f"{name} of {path or 'the model itself'} has shape {tuple(weight.shape)}, and no entries to divide;"
                    " make it wider, or leave that layer out with skip=."
                )
    if kept := _kept_elsewhere(model, divided):
        path, attribute, name = kept[0]
        raise ValueError(
            f"{path or 'the model'} keeps {name} in {attribute} too, which would have what all partitions learn, or"
            " what nobody does: read the parameter from its module where it is used, and keep it nowhere else."
        )
    if apart := _views_of_state(model, found):
        raise ValueError(
            f"{apart[0]} and {apart[1]} share memory, and what is kept for each subnetwork would not: keep one of them,"
            " and take views of it where it is used."
        )
    if stateful and not found.kept:
        kinds = ", ".join(sorted({type(module).__name__ for module in stateful}))
        raise ValueError(f"stateful names {kinds}, which keep nothing from call to call; name what does, or nothing.")
    if not found.layers and not found.owning and is_frozen(model) and not frozen:
        raise ValueError(
            f"no parameter of this {type(model).__name__} requires a gradient, so that none is partitioned; unfreeze"
            " what is to learn, or pass frozen=True to partition all of it."
        )
    if not found.layers and not found.owning:
        names = ", ".join(layer_type.__name__ for layer_type in known() if layer_type.__module__.startswith("torch."))
        raise ValueError(f"this {type(model).__name__} has no layer to partition; known are {names}.")
    return found


def _kept_elsewhere(model: nn.Module, divided: Mapping[nn.Parameter, str]) -> list[tuple[str, str, str]]:
    """Of modules that keep parameters in attributes: their path, the attribute and the parameter's name.

    Those with rules know what they keep, as torch's recurrent layers, but for what hooks on them do.
    """
    of_all_modules = vars(nn.Module()).keys()
    ruled = {path for path, module in model.named_modules() if rule_of(type(module)) is not None}
    return [
        (path, attribute, divided[value])
        for path, attribute, value, _ in _held(model)
        if isinstance(value, nn.Parameter) and value in divided and (path not in ruled or attribute in of_all_modules)
    ]


def _views_of_state(model: nn.Module, found: Found) -> tuple[str, str] | None:
    """The paths of two tensors on one memory of which one is state, if there are some."""
    stateful = {part for module in found.kept for part in module.modules()}
    state, others, seen = {}, {}, set()
    for path, module in model.named_modules() if stateful else ():
        for group in (module._buffers, module._parameters, vars(module)):
            for name, value in group.items():
                is_state = isinstance(value, Tensor) and module in stateful and not value.requires_grad
                if isinstance(value, Tensor) and (id(value), is_state) not in seen:
                    seen.add((id(value), is_state))  # one tensor that several keep stays one
                    (state if is_state else others)[f"{path}.{name}" if path else name] = value
    pairs = overlapping(state | others)
    return next((pair for pair in pairs if pair[0] in state or pair[1] in state), None)


def _refusal(obstacles: dict[str, Obstacle]) -> str:
    """Each type once, with how many there are, where the first is, and what helps."""
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
