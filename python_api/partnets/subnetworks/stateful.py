"""Per-subnetwork buffers and attributes of modules whose code stores something of the batches that it has seen.

Each subnetwork has a copy of buffers, frozen parameters and attributes with everything inside them; so has subnetwork
START, which has seen no batch. The active copy is where the module's code expects it. Buffers and parameters of
subnetwork k are registered beside it as `name_of_k`, so that state_dicts and moves to other devices include them;
attributes are in the module's PartitionState.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partnets.hyper import Hyperparameter
from partnets.subnetworks.state import (
    ATTRIBUTE,
    DEFAULTS,
    ESTIMATED,
    LEARNED,
    MAP,
    ROWS,
    STORED,
    PartitionState,
    partitioned_modules,
    state_of,
)
from partnets.utils.tree_leaves import tensors

# The subnetwork that keeps what modules had before any batch.
START = 0
# What every module has of torch, and what this library adds.
_OF_TORCH = {*vars(nn.Module()), ATTRIBUTE, "forward", "_compiled_call_impl", "seed_defaults"}
_REGISTERED = "_buffers", "_parameters"

# Values that are compared, as copies of them may be other objects.
_PLAIN = bool, int, float, complex, str, bytes
# What a module keeps: by the groups "_buffers", "_parameters" and "attributes", values by their names.
Kept = dict[str, dict[str, Any]]


def stateful_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of the partitioned modules that have per-subnetwork buffers or attributes."""
    return [module for module in modules if state_of(module).is_stateful]


def taken_name(module: nn.Module) -> str | None:
    """Return the name of a buffer or parameter that would be taken for one of subnetwork k, or None."""
    names = (name for group in _REGISTERED for name in getattr(module, group))
    return next((name for name in names if re.search(r"_of_\d+$", name)), None)


def check_copies(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Raise ValueError if attributes of modules, given by their paths, cannot be copied."""
    for path, module in modules.items():
        try:
            _copies(model, [{"_parameters": {}, "attributes": _attributes(module)}])
        except Exception as error:
            raise ValueError(
                f"an attribute of {path or 'the model itself'} ({type(module).__name__}) cannot be copied for each"
                f" subnetwork: {error}; leave the module out of stateful=, or let it be copied."
            ) from error


def keep_for_each(model: nn.Module, modules: list[nn.Module]) -> None:
    """Give each subnetwork a copy of what these modules keep; all start as it is now.

    Args:
        model: what the modules are in.
        modules: with a PartitionState.
    """
    for module in modules:
        state_of(module).is_stateful = True
        module.register_forward_pre_hook(_before_call)
        module.register_forward_hook(_after_call, always_call=True)
    for k in range(START, state_of(modules[0]).count):
        for module, kept in zip(modules, copies(model, modules), strict=True):
            _store(module, k, kept)
    remember(modules)


def move(module: nn.Module, old: int, new: int) -> None:
    """Put aside what the module keeps for its active subnetwork, and take that of another one."""
    kept, taken = _kept(module), _fetch(module, new)
    _replace(module, kept, taken)
    _store(module, old, kept)


@contextmanager
def moved(model: nn.Module, modules: list[nn.Module], active: int, learns: bool) -> Iterator[None]:
    """Let modules keep in the context what subnetwork `active` does, or a copy of that where nothing learns."""
    count = state_of(modules[0]).count if modules else active
    for module in modules if active != count else ():
        move(module, count, active)
    kept = [] if learns else with_copies(model, modules)
    try:
        yield
    finally:
        if kept:
            put_back(modules, kept)
        for module in modules if active != count else ():
            move(module, active, count)


def settle(module: nn.Module, k: int) -> None:
    """Leave a module, outside of any subnetwork, what subnetwork k keeps, and nothing of the others."""
    state = state_of(module)
    if k != state.count:
        move(module, state.count, k)
    for group in _REGISTERED:
        own = getattr(module, group)
        for name in [name for name in own if name.endswith(_ends(state.count))]:
            del own[name]
            module._non_persistent_buffers_set.discard(name)
    for hooks, ours in ((module._forward_pre_hooks, _before_call), (module._forward_hooks, _after_call)):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
    state.is_stateful = False


def copies(model: nn.Module, modules: list[nn.Module]) -> list[Kept]:
    """Return copies of what the active subnetwork keeps; what several modules share, the copies share."""
    return _copies(model, [_kept(module) for module in modules])


class _Deleted:
    """Stands for the value of a name that was deleted; a class, which copies leave as it is."""


class _Detaching(TorchFunctionMode):
    """Inside, copies of tensors with a graph have none; torch copies only leaves."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            args = args[0].detach(), *args[1:]
        return func(*args, **(kwargs or {}))


def _copies(model: nn.Module, kept: list[Kept]) -> list[Kept]:
    still = {id(part): part for part in (*model.modules(), *model.parameters())}
    for one in kept:
        for parameter in one["_parameters"].values():
            still.pop(id(parameter), None)
    with _Detaching():
        return copy.deepcopy(kept, still)


@contextmanager
def kept_for_all(model: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """Restore on exit what modules keep for all subnetworks; the model is the whole network on entry and exit."""
    kept = _copies(model, [_kept(module) for module in modules] + [_stored(module) for module in modules])
    try:
        yield
    finally:
        put_back(modules, kept[: len(modules)])
        for module, stored in zip(modules, kept[len(modules) :], strict=True):
            for group in _REGISTERED:
                getattr(module, group).update(stored[group])
            state_of(module).attributes = stored["attributes"]
        remember(modules)


def with_copies(model: nn.Module, modules: list[nn.Module]) -> list[Kept]:
    """Let modules go on with a copy of what the active subnetwork keeps; return the original, for `put_back`."""
    kept = [_kept(module) for module in modules]
    put_back(modules, _copies(model, kept))
    return kept


def put_back(modules: list[nn.Module], kept: list[Kept]) -> None:
    """Replace what the active subnetwork keeps."""
    for module, one in zip(modules, kept, strict=True):
        _replace(module, _kept(module), one)


def remember(modules: Iterable[nn.Module]) -> None:
    """Note what is kept now, outside of any subnetwork, to see what is assigned there later."""
    for module in modules:
        state_of(module).left = _kept(module)


def assign_to_all(model: nn.Module, modules: list[nn.Module]) -> None:
    """Give all subnetworks what was assigned or deleted outside of any since `remember`, other than by calls."""
    for module in modules:
        _note_assigned(module)
    modules = [module for module in modules if state_of(module).assigned]
    assigned = [{"_parameters": {}} | state_of(module).assigned for module in modules]
    for k in range(START, state_of(modules[0]).count) if modules else ():
        for module, one in zip(modules, _copies(model, assigned), strict=True):
            for group, values in one.items():
                own = getattr(module, group) if group in _REGISTERED else state_of(module).attributes[k]
                for name, value in values.items():
                    name = f"{name}_of_{k}" if group in _REGISTERED else name
                    own.pop(name, None) if value is _Deleted else own.update({name: value})
    for module in modules:
        state_of(module).assigned = {}
    remember(modules)


def _note_assigned(module: nn.Module) -> None:
    """Note what was assigned or deleted since `remember`."""
    state, kept, found = state_of(module), _kept(module), dict(state_of(module).assigned)
    for group, values in kept.items():
        before = state.left.get(group, {})
        new = {name: value for name, value in values.items() if not _is_same(before.get(name, _Deleted), value)}
        new |= dict.fromkeys(before.keys() - values.keys(), _Deleted)
        if new:
            found[group] = found.get(group, {}) | new
    state.assigned = found
    state.left = kept


def _is_same(before: Any, value: Any) -> bool:
    return before is value or (type(before) is type(value) and isinstance(value, _PLAIN) and before == value)


def _is_outside(module: nn.Module) -> bool:
    """Return whether a module is called outside of any subnetwork; compiled code does not ask."""
    state = state_of(module)
    return not torch.compiler.is_compiling() and state.thread is None and state.active == state.count


def _before_call(module: nn.Module, args: tuple) -> None:
    """Note, outside of any subnetwork, what was assigned before a call: what calls assign is subnetwork C's."""
    if _is_outside(module):
        for one in stateful_modules(partitioned_modules(module)):
            state = state_of(one)
            if not state.calls:
                _note_assigned(one)
            state.calls += 1


def _after_call(module: nn.Module, args: tuple, output: Any) -> None:
    if _is_outside(module):
        for one in stateful_modules(partitioned_modules(module)):
            state_of(one).calls -= 1
            remember([one])


def attributes_with_tensors(model: nn.Module) -> list[str]:
    """Return the paths of modules that keep tensors for each subnetwork in attributes, which are in no state_dict."""
    found = {path: module for path, module in model.named_modules() if (s := state_of(module)) and s.is_stateful}
    return [path for path, one in found.items() if tensors([_attributes(one), state_of(one).attributes])]


def _kept(module: nn.Module) -> Kept:
    """Return what a module keeps for its active subnetwork."""
    state: PartitionState = state_of(module)
    partitioned = *state.weights, *state.vectors, *state.wholes, *state.statistics
    hidden = {name + end for name in partitioned for end in ("", MAP, DEFAULTS, STORED, ROWS)} | {ESTIMATED, LEARNED}
    ends, own = _ends(state.count), vars(module)
    buffers, parameters = (
        {name: value for name, value in own[group].items() if name not in hidden and not name.endswith(ends)}
        for group in _REGISTERED
    )
    parameters = {name: value for name, value in parameters.items() if value is not None and not value.requires_grad}
    return {"_buffers": buffers, "_parameters": parameters, "attributes": _attributes(module)}


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = vars(module).items()
    return {name: value for name, value in own if name not in _OF_TORCH and not isinstance(value, Hyperparameter)}


def _stored(module: nn.Module) -> Kept:
    """Return what a module keeps for the subnetworks that are not active, with the names that it has."""
    state = state_of(module)
    found = {
        group: {name: value for name, value in getattr(module, group).items() if name.endswith(_ends(state.count))}
        for group in _REGISTERED
    }
    return found | {"attributes": state.attributes}


def _ends(count: int) -> tuple[str, ...]:
    """Return the ends of the names of what is kept for subnetworks that are not active."""
    return tuple(f"_of_{k}" for k in range(START, count + 1))


def _replace(module: nn.Module, kept: Kept, taken: Kept) -> None:
    """Give a module what it takes for what it keeps; names that both have keep their order."""
    own = vars(module)
    for group, values in kept.items():
        items = own[group] if group in _REGISTERED else own
        for name in values.keys() - taken[group].keys():
            del items[name]
        items.update(taken[group])


def _store(module: nn.Module, k: int, kept: Kept) -> None:
    for group in _REGISTERED:
        for name, value in kept[group].items():
            getattr(module, group)[f"{name}_of_{k}"] = value
            if name in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(f"{name}_of_{k}")
    state_of(module).attributes[k] = kept["attributes"]


def _fetch(module: nn.Module, k: int) -> Kept:
    end, found = f"_of_{k}", {}
    for group in _REGISTERED:
        own = getattr(module, group)
        found[group] = {name.removesuffix(end): own.pop(name) for name in list(own) if name.endswith(end)}
    return found | {"attributes": state_of(module).attributes.pop(k, {})}
