"""Own state: what a module of any class keeps from call to call, apart for each subnetwork."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from partnets.nn.live import passing
from partnets.nn.own_parameters import OwnParameters, class_of
from partnets.nn.partitioned import as_class, partitioned_layers
from partnets.utils.contained import tensors
from partnets.utils.copied import copied

# Where a module has what it keeps for each subnetwork, by "1".."C"; that of "0" has seen no data.
STATE_OF = "state_of"
REGISTERED = ("_parameters", "_buffers", "_modules")


# Of each subnetwork what has been copied: what two modules keep together they go on keeping together.
_memos: ContextVar[dict[int, dict] | None] = ContextVar("memos", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Inside, states that are copied share what those before share."""
    token = _memos.set(defaultdict(dict))
    try:
        yield
    finally:
        _memos.reset(token)


def _memo(k: int) -> dict:
    memos = _memos.get()
    return {} if memos is None else memos[k]


class State(nn.Module):
    """What a module keeps for one subnetwork: buffers, parameters and modules that do not learn, and attributes."""


class OwnState(OwnParameters):
    """A module of any class, whose code reads and writes what it keeps: it gets that of the live subnetwork.

    That is: its buffers, the parameters and modules that do not learn, and its attributes, with what is in lists, dicts
    and objects of one's own. Each subnetwork has a copy, which follows the batches that it trains on; where nothing
    learns (update is None) a pass goes on from there, and leaves nothing. Outside of any subnetwork, what is read, and
    what a call leaves, is that of subnetwork C; what is set is set for all.

    partnets.partition makes it of modules that `stateful` names. A state_dict has buffers under `state_of.k`. A
    compiled model runs it uncompiled.
    """

    # Of parameters, buffers and modules, those that are state.
    _kept: Sequence[str] = ()
    # Attributes of the class, which its code may set: self.steps += 1.
    _of_class: Sequence[str] = ()

    @classmethod
    def from_ordinary(cls, layer, proportions, **options):
        new = as_class(layer, cls)
        state = new._set_apart() if len(proportions) > 1 else None
        new.divide(proportions, **options)
        if state is not None:  # what holds the layer itself goes on doing so: partnets.partition changes it in place
            memos = [_memo(k) for k in range(new.count + 1)]
            for memo in memos:
                memo[id(layer)] = memo[id(new)] = layer, new
            new._modules[STATE_OF] = nn.ModuleDict({str(k): copied(state, memo) for k, memo in enumerate(memos)})
        return new

    def _set_apart(self) -> State:
        """Moves what this module keeps into one."""
        own, state = self.__dict__, State()
        for group in REGISTERED:
            for name in [name for name in own[group] if name in self._kept]:
                vars(state)[group][name], own[group][name] = own[group][name], None  # which keeps its place
        state._non_persistent_buffers_set = own["_non_persistent_buffers_set"] & state._buffers.keys()
        values = {name: getattr(self, name) for name in self._of_class}
        values |= {name: own.pop(name) for name in [*own] if name not in _NO_STATE}
        vars(state).update(values)
        return state

    def _live_state(self) -> nn.Module:
        """That of the live subnetwork; where nothing learns, a copy for the time of this partnets.subnetwork."""
        active, update = now = self.current_subnetwork()
        if update is not None:
            return states_of(self)[str(active)]
        present = passing(now)
        if self not in present.kept:
            present.kept[self] = self._copy_of(active, present.memo)
        return present.kept[self]

    def _states_to_set(self) -> list[nn.Module]:
        return [self._live_state()] if self.is_inside() else list(states_of(self).values())

    def _copy_of(self, k: int, memo: dict, owner: nn.Module | None = None) -> nn.Module:
        """A copy of the state of subnetwork k, for this module or another owner; what is no state in it is the same."""
        memo.update({id(module): (module, module) for module in self._modules.values()})
        memo[id(self)] = owner or self, self
        return copied(states_of(self)[str(k)], memo)

    def train(self, mode=True):
        """As the module's own, which may set what it keeps: of each subnetwork."""
        states, before = states_of(self), self._live.now
        if not states:
            return super().train(mode)
        try:
            for k, state in states.items():  # each alone, as the only one that there is
                self._modules[STATE_OF], self._live.now = nn.ModuleDict({k: state}), (int(k), int(k))
                super().train(mode)
        finally:
            self._modules[STATE_OF], self._live.now = states, before
        states.training = mode
        now = self.current_subnetwork()
        if (kept := passing(now).kept.get(self)) is not None:
            for one, other in zip(kept.modules(), states[str(now[0])].modules(), strict=False):
                one.training = other.training
        return self

    def __getattr__(self, name: str):
        if states_of(self) and name != STATE_OF:
            state = self._live_state()
            if _has(state, name):
                return getattr(state, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_state(name, value):
            super().__setattr__(name, value)
            return
        states = self._states_to_set()
        for state in states:
            setattr(state, name, value if len(states) == 1 else copied(value))

    def __delattr__(self, name: str) -> None:
        if not self._is_state(name, None):
            super().__delattr__(name)
            return
        for state in self._states_to_set():
            delattr(state, name)

    def register_buffer(self, name, tensor, persistent=True):
        if not self._is_state(name, tensor):
            super().register_buffer(name, tensor, persistent)
            return
        states = self._states_to_set()
        for state in states:
            state.register_buffer(name, tensor if len(states) == 1 else copied(tensor), persistent)

    def _is_state(self, name: str, value: Any) -> bool:
        """Whether what is set under a name is state; else it is torch's, the library's, or learns."""
        states = states_of(self)
        if not states or name in _NO_STATE:
            return False
        if any(_has(state, name) for state in states.values()):
            return True
        learns = isinstance(value, nn.Module) or (isinstance(value, nn.Parameter) and value.requires_grad)
        is_property = hasattr(getattr(type(self), name, None), "__set__")
        return not (learns or is_property or any(name in self.__dict__[group] for group in REGISTERED))

    def _computed(self, forward, *args, **kwargs):
        """What forward gives; outside of any subnetwork, as subnetwork C inside of one."""
        if self.is_inside() or self.count == 1:
            return forward(self, *args, **kwargs)
        self._live.now = self._outside
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._live.now = None

    def to_ordinary(self, active):
        return self._with_state(super().to_ordinary(active), active)

    def to_fresh(self):
        return super().to_fresh() if self._has_parameters() else self._to_start_from()

    def reset_parameters(self) -> None:
        """As of OwnParameters; and what the subnetworks keep is what it was before any data."""
        if self._has_parameters():
            super().reset_parameters()
        states = states_of(self)
        for k in range(1, len(states)):
            states[str(k)] = self._copy_of(0, {})

    def _has_parameters(self) -> bool:
        return next(self.named_parameters(recurse=False), None) is not None

    def _to_start_from(self):
        return self._with_state(super().to_ordinary(self.count), 0)

    def _with_state(self, new: nn.Module, k: int) -> nn.Module:
        """A module of the ordinary class with a copy of the state of subnetwork k, or of none that has seen data."""
        if not states_of(self):
            return new
        state = vars(self._copy_of(k, _memo(k), new))
        new._modules.pop(STATE_OF, None)
        for group in REGISTERED:
            vars(new)[group].update(state[group])
        vars(new).update({name: value for name, value in state.items() if name not in _NO_STATE})
        return new

    def __reduce_ex__(self, protocol):
        cls = type(self)
        return _empty, (cls.ordinary, cls.weights, cls.shifts, cls._kept), self.__dict__


def states_of(module: OwnState) -> Mapping[str, nn.Module]:
    """The state of each subnetwork, by "0".."C"; none of one that is not divided yet, or has one partition."""
    return module.__dict__.get("_modules", {}).get(STATE_OF, {})


def _has(state: nn.Module, name: str) -> bool:
    own = vars(state)
    return (name in own and name not in _NO_STATE) or any(name in own[group] for group in REGISTERED)


class _OfClass:
    """An attribute of a class that is state of its instances."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __get__(self, module: nn.Module | None, cls: type):
        if module is None or not states_of(module):
            return self.value
        return module.__getattr__(self.name)


@functools.cache
def own_state_class(
    ordinary: type[nn.Module], weights: tuple[str, ...], shifts: tuple[str, ...], kept: tuple[str, ...]
) -> type[OwnState]:
    """As own_parameters_class, of a module with state.

    Args:
        kept: the names of parameters, buffers and modules that are state.
    """

    @torch.compiler.disable  # whose guards know nothing of what is kept where
    @functools.wraps(ordinary.forward)
    def forward(self, *args, **kwargs):
        return self._computed(ordinary.forward, *args, **kwargs)

    values = {
        name: value
        for cls in reversed(ordinary.__mro__[: ordinary.__mro__.index(nn.Module)])
        for name, value in vars(cls).items()
        if not (name.startswith("__") or hasattr(nn.Module, name) or callable(value) or hasattr(value, "__get__"))
    }
    attributes = {name: _OfClass(name, value) for name, value in values.items()}
    attributes |= {"forward": forward, "_kept": kept, "_of_class": tuple(values)}
    return class_of(OwnState, ordinary, weights, shifts, (), attributes)


def _empty(*key) -> OwnState:
    cls = own_state_class(*key)
    return cls.__new__(cls)


def _names_of(cls: type) -> set[str]:
    return {*vars(cls), *inspect.get_annotations(cls)}


# What every module has of torch and of this library.
_OF_TORCH = {*vars(nn.Module())}
_NO_STATE = _OF_TORCH.union(*map(_names_of, OwnState.__mro__[: OwnState.__mro__.index(nn.Module)]))


def keeping_attributes(model: nn.Module) -> list[str]:
    """The paths of modules that keep tensors for each subnetwork in attributes, which are in no state_dict."""

    def keeps(layer: OwnState) -> bool:
        states = (module for state in states_of(layer).values() for module in state.modules())
        return any(tensors([value for name, value in vars(one).items() if name not in _OF_TORCH]) for one in states)

    return [path for path, layer in partitioned_layers(model) if isinstance(layer, OwnState) and keeps(layer)]
