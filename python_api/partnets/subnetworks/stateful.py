"""Per-subnetwork buffers and attributes of modules whose code keeps something of the batches that it has seen.

Each subnetwork has a copy: of buffers, of parameters that do not learn, and of attributes with whatever is in them. The
active one is where the module's code expects it. Buffers and parameters of subnetwork k are registered beside it as
`name_of_k`, so that state_dicts and moves to other devices include them; attributes are in the module's PartitionState.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from partnets.hyper import Hyperparameter
from partnets.subnetworks.state import ATTRIBUTE, ESTIMATED, LEARNED, PartitionState, state_of

# What every module has of torch, and what this library adds.
_OF_TORCH = {*vars(nn.Module()), ATTRIBUTE, "forward", "_compiled_call_impl", "seed_defaults"}
_REGISTERED = "_buffers", "_parameters"


def stateful_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of the partitioned modules that have per-subnetwork buffers or attributes."""
    return [module for module in modules if state_of(module).is_stateful]


def keeps_something(module: nn.Module) -> bool:
    """Return whether a module that is not partitioned has buffers, frozen parameters or attributes of its own."""
    parameters = (p for p in module._parameters.values() if p is not None)
    return bool(module._buffers or vars(module).keys() - _OF_TORCH) or not all(p.requires_grad for p in parameters)


def keep_for_each(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Give each subnetwork a copy of what these modules keep; all start as it is now.

    Args:
        model: what the modules are in.
        modules: with a PartitionState.
    """
    modules = [module for module in modules if _kept(module)]
    for module in modules:
        state = state_of(module)
        state.is_stateful = True
    if not modules:
        return
    count = state_of(modules[0]).count
    for k in range(1, count):
        for module, kept in zip(modules, copies(model, modules), strict=True):
            _store(module, k, kept)
    remember(modules)


def move(module: nn.Module, new: int) -> None:
    """Put aside what the module keeps for its active subnetwork, and take that of another one."""
    state = state_of(module)
    kept = _kept(module)
    taken = _fetch(module, new)
    _remove(module, kept)
    _put(module, taken)
    _store(module, state.active, kept)


def copies(model: nn.Module, modules: list[nn.Module]) -> list[dict[str, dict[str, Any]]]:
    """Return copies of what the active subnetwork keeps; what several modules share, the copies share."""
    return _copies(model, [_kept(module) for module in modules])


def _copies(model: nn.Module, kept: list[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    still = {id(part): part for part in (*model.modules(), *model.parameters())}
    for one in kept:
        for parameter in one["_parameters"].values():
            still.pop(id(parameter), None)
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


def put_back(modules: list[nn.Module], kept: list[dict[str, dict[str, Any]]]) -> None:
    """Replace what the active subnetwork keeps."""
    for module, one in zip(modules, kept, strict=True):
        _remove(module, _kept(module))
        _put(module, one)


def remember(modules: Iterable[nn.Module]) -> None:
    """Note what is kept now, outside of any subnetwork, to see what is assigned there later."""
    for module in modules:
        state_of(module).left = _kept(module)


def assign_to_all(model: nn.Module, modules: list[nn.Module]) -> None:
    """Give all subnetworks what was assigned, outside of any, since `remember`."""
    for module in modules:
        state, kept = state_of(module), _kept(module)
        for group, values in kept.items():
            before = state.left.get(group, {})
            assigned = {name for name, value in values.items() if name not in before or before[name] is not value}
            if assigned:
                still = {id(part): part for part in (*model.modules(), *model.parameters())}
                for k in range(1, state.count):
                    others = copy.deepcopy({name: values[name] for name in assigned}, dict(still))
                    if group in _REGISTERED:
                        for name, value in others.items():
                            getattr(module, group)[f"{name}_of_{k}"] = value
                    else:
                        state.attributes[k].update(others)
    remember(modules)


def _kept(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a module keeps for its active subnetwork, by groups: buffers, parameters, attributes."""
    state: PartitionState = state_of(module)
    own = vars(module)
    hidden = (*state.weights, *state.vectors, *state.wholes, *state.statistics, ESTIMATED, LEARNED)
    ends = _ends(state)
    buffers = {
        name: value
        for name, value in own["_buffers"].items()
        if name not in hidden and not name.endswith(ends) and not name.startswith(tuple(f"{one}_" for one in hidden))
    }
    parameters = {
        name: value
        for name, value in own["_parameters"].items()
        if value is not None and not value.requires_grad and name not in hidden and not name.endswith(ends)
    }
    attributes = {
        name: value for name, value in own.items() if name not in _OF_TORCH and not isinstance(value, Hyperparameter)
    }
    found = {"_buffers": buffers, "_parameters": parameters, "attributes": attributes}
    return found if any(found.values()) else {}


def _stored(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what a module keeps for the subnetworks that are not active, by groups, with the names that it has."""
    state = state_of(module)
    found = {
        group: {name: value for name, value in getattr(module, group).items() if name.endswith(_ends(state))}
        for group in _REGISTERED
    }
    return found | {"attributes": state.attributes}


def _ends(state: PartitionState) -> tuple[str, ...]:
    """Return the ends of the names of what is kept for subnetworks that are not active."""
    return tuple(f"_of_{k}" for k in range(1, state.count + 1))


def _remove(module: nn.Module, kept: dict[str, dict[str, Any]]) -> None:
    for name in kept.get("attributes", {}):
        del vars(module)[name]


def _put(module: nn.Module, kept: dict[str, dict[str, Any]]) -> None:
    for group in _REGISTERED:
        getattr(module, group).update(kept.get(group, {}))
    vars(module).update(kept.get("attributes", {}))


def _store(module: nn.Module, k: int, kept: dict[str, dict[str, Any]]) -> None:
    for group in _REGISTERED:
        for name, value in kept.get(group, {}).items():
            getattr(module, group)[f"{name}_of_{k}"] = value
            if name in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(f"{name}_of_{k}")
    state_of(module).attributes[k] = kept.get("attributes", {})


def _fetch(module: nn.Module, k: int) -> dict[str, dict[str, Any]]:
    end, found = f"_of_{k}", {}
    for group in _REGISTERED:
        own = getattr(module, group)
        found[group] = {name.removesuffix(end): own.pop(name) for name in list(own) if name.endswith(end)}
    return found | {"attributes": state_of(module).attributes.pop(k, {})}
