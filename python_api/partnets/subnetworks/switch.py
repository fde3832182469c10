"""Switch: makes a model one of its subnetworks by exchanging the entries that differ, in place."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from partkernels.operators.subnetwork_weight import select
from partkernels.backend import dispatch
from partnets.subnetworks.state import MAP, ROWS, STORED, PartitionState, partition_of, partitioned_modules, state_of

INT32_MAX = 2**31 - 1


@dataclass(eq=False)
class Weight:
    """One partitioned weight, and what is exchanged with it.

    Attributes:
        memory: the parameter as one dimension, in the order of its memory.
        places: for each partition 2..C, where its entries are in `memory`: int32, or int64 if that is needed.
        others: for each partition 2..C, the values that are not in the parameter now: its defaults while it is active,
            its learned entries while it is not.
        key: what all of this was made of.
    """

    module: nn.Module
    name: str
    state: PartitionState
    parameter: nn.Parameter
    memory: Tensor = None
    places: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    key: tuple = ()

    def refresh(self) -> bool:
        """Make memory, places and others anew if parameter, map or defaults have changed; return whether they had."""
        parameter, buffers = self.parameter, self.module._buffers
        map, stored = buffers[self.name + MAP], buffers.get(self.name + STORED)
        key = (
            parameter.data_ptr(), parameter.dtype, parameter.stride(), map.data_ptr(), map._version,
            self.state.weights[self.name], None if stored is None else (stored.data_ptr(), stored._version),
        )  # fmt: skip
        if key == self.key:
            return False
        with torch.no_grad():
            partition = partition_of(self.module, self.name)
            self.memory = in_memory(parameter.detach(), parameter)
            if self.memory is None:
                raise ValueError(
                    f"{self.name} of {type(self.module).__name__} has gaps in memory, strides {parameter.stride()} of"
                    f" shape {tuple(parameter.shape)}; make it contiguous before partnets.partition."
                )
            ids = in_memory(partition.ids().to(parameter.device), parameter)
            defaults = partition.defaults.values(parameter.shape, parameter.dtype, parameter.device)
            defaults = in_memory(defaults, parameter)
            index = torch.int32 if parameter.numel() <= INT32_MAX else torch.int64
            found = [(ids == k).nonzero().view(-1) for k in range(2, self.state.count + 1)]
            self.others = [defaults[places].contiguous() for places in found]
            self.places = [places.to(index) for places in found]
        self.key = key
        return True


def in_memory(tensor: Tensor, like: Tensor) -> Tensor | None:
    """Return a tensor of like's shape as one dimension, in the order of like's memory; None if that has gaps."""
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    order = [d for d in order if like.shape[d] != 1]
    expected = 1
    for d in reversed(order):
        if like.stride(d) != expected:
            return None
        expected *= like.shape[d]
    rest = [d for d in range(like.dim()) if like.shape[d] == 1]
    permuted = tensor.permute(*rest, *order)
    return permuted.reshape(-1) if tensor.data_ptr() != like.data_ptr() else permuted.view(-1)


@dataclass(eq=False)
class Vector:
    """A parameter with a vector for each partition, added or multiplied."""

    module: nn.Module
    name: str
    state: PartitionState
    parameter: nn.Parameter
    is_product: bool

    @property
    def rows(self) -> Tensor:
        return self.module._buffers[self.name + ROWS]

    def combined(self, k: int) -> Tensor:
        rows = self.rows[:k]
        return rows.prod(0) if self.is_product else rows.sum(0)


class Switch:
    """All that differs between the subnetworks of a model.

    Args:
        modules: those with a PartitionState.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.states = [state_of(module) for module in modules]
        weights: dict[int, Weight] = {}
        vectors: dict[int, Vector] = {}
        self.aliases: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module, state in zip(modules, self.states, strict=True):
            for name in (*state.weights, *state.vectors):
                parameter = module._parameters[name]
                self.aliases.append((module, name, parameter))
                if id(parameter) in weights or id(parameter) in vectors:
                    continue
                if name in state.weights:
                    weights[id(parameter)] = Weight(module, name, state, parameter)
                else:
                    vectors[id(parameter)] = Vector(module, name, state, parameter, state.vectors[name])
        self.weights, self.vectors = list(weights.values()), list(vectors.values())
        self.statistics = [(module, state) for module, state in zip(modules, self.states, strict=True) if state.statistics]
        self.parameters = [one.parameter for one in (*self.weights, *self.vectors)]
        self._lists: dict[tuple[int, int], tuple] = {}
        self._hooked: set[int] = set()

    def is_of(self, modules: list[nn.Module]) -> bool:
        """Return whether this is still the switch of these modules and their parameters."""
        if len(modules) != len(self.modules) or any(a is not b for a, b in zip(modules, self.modules, strict=True)):
            return False
        return all(module._parameters.get(name) is parameter for module, name, parameter in self.aliases) and all(
            state_of(module) is state for module, state in zip(modules, self.states, strict=True)
        )

    def prepare(self) -> None:
        """Look at everything outside of subnetworks: what has changed there is taken over, or refused."""
        if any([one.refresh() for one in self.weights]):
            self._lists.clear()
        for one in self.vectors:
            if version_of(one) != one.state.versions.get(one.name):
                self._agree(one)
        for one in (*self.weights, *self.vectors):
            parameter = one.parameter
            if parameter.requires_grad and id(one) not in self._hooked:
                self._hooked.add(id(one))
                hook = mask_weight if isinstance(one, Weight) else mask_vector
                parameter.register_hook(lambda grad, one=one, hook=hook: hook(one, grad))

    @torch.no_grad()
    def _agree(self, one: Vector) -> None:
        """Check that a parameter is what its rows make, where one of them was written into."""
        whole = one.combined(one.state.count)
        before = one.state.versions.get(one.name)
        is_kept = before is not None and before[0] == one.parameter._version  # and only the rows have changed
        if not is_kept and not torch.allclose(whole, one.parameter, rtol=1e-5, atol=1e-6):
            raise RuntimeError(
                f"the {one.name} of {type(one.module).__name__} was written into, but is the"
                f" {'product' if one.is_product else 'sum'} of a vector for each partition; write into"
                f" {one.name}_rows [C, ...] instead, through partnets.assign."
            )
        one.parameter.copy_(whole)
        noted([one])

    @torch.no_grad()
    def move(self, now: int, k: int) -> None:
        """Turn subnetwork `now` into subnetwork k."""
        if now == k:
            return
        lists = self._lists.get((now, k))
        if lists is None:
            low, high = min(now, k), max(now, k)
            flat = [(one, j) for one in self.weights for j in range(low - 1, high - 1)]
            flat = [(one, j) for one, j in flat if len(one.places[j])]
            self._lists[now, k] = lists = (
                [one.memory for one, _ in flat], [one.places[j] for one, j in flat], [one.others[j] for one, j in flat],
                list({id(one): one.parameter for one, _ in flat}.values()),
            )  # fmt: skip
        exchange(*lists[:3])
        if lists[3]:
            increment_version([p for p in lists[3] if not p.is_inference()])
        for one in self.vectors:
            one.parameter.copy_(one.combined(k))
        for module, state in self.statistics:
            for name in state.statistics:
                buffer, rows = module._buffers[name], module._buffers[name + ROWS]
                rows[now - 1].copy_(buffer)
                buffer.copy_(rows[k - 1])
        for state in self.states:
            state.active = k

    def followed_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the statistics that follow batches now, with copies of them."""
        found = [(module, name) for module, state in self.statistics if module.training for name in state.statistics]
        return [(module._buffers[name], module._buffers[name].clone()) for module, name in found]

    def note(self) -> None:
        """Take the present parameters for those of the active subnetwork, in which nothing else was written."""
        noted([*self.weights, *self.vectors])

    def written(self) -> list[Weight | Vector]:
        """Return what was written into since the last `note`, but by partnets' own optimizers."""
        return [one for one in (*self.weights, *self.vectors) if version_of(one) != one.state.versions.get(one.name)]


def version_of(one) -> tuple[int, int]:
    """Return the versions of a parameter and of its vectors; 0 if it is of an inference tensor."""
    rows = one.module._buffers.get(one.name + ROWS)
    tensors = (one.parameter,) if rows is None else (one.parameter, rows)
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def noted(parameters) -> None:
    """Take what was written into parameters for right: it was done by one of partnets' own functions."""
    for one in parameters:
        one.state.versions[one.name] = version_of(one)


def exchange(tensors: list[Tensor], places: list[Tensor], values: list[Tensor]) -> None:
    """Swap the entries of tensors at these places with values, in place; twice is never."""
    for tensor, at, other in zip(tensors, places, values, strict=True):
        mine = tensor.index_select(0, at)
        tensor.index_copy_(0, at.long(), other)
        other.copy_(mine)


def mask_weight(one: Weight, grad: Tensor) -> Tensor | None:
    """Return the gradient with zeros outside of the partition that learns."""
    state = one.state
    if not state.masks or state.count == 1:
        return None
    if state.update is None:
        return torch.zeros_like(grad)
    map = one.module._buffers[one.name + MAP]
    return select(grad, state.update, state.update, map, state.count, dispatch.requested())


def mask_vector(one: Vector, grad: Tensor) -> Tensor | None:
    """Return the gradient by the vector of the partition that learns; `.grad` is of one partition at a time."""
    state, parameter = one.state, one.parameter
    update = state.update
    if state.count == 1:
        return None
    if update is None:
        return torch.zeros_like(grad)
    before = state.grad_of.get(one.name)
    if parameter.grad is not None and before not in (None, update):
        kept = state.grads.setdefault(one.name, {})
        kept[before] = parameter.grad
        parameter.grad = kept.pop(update, None)
    state.grad_of[one.name] = update
    if not one.is_product or state.active == 1:
        return None
    rows = one.rows
    others = torch.cat([rows[: update - 1], rows[update : state.active]])
    return grad * others.prod(0)


_switches: WeakKeyDictionary[nn.Module, Switch] = WeakKeyDictionary()


def switch_of(model: nn.Module) -> Switch:
    """Return the switch of a model; made once, and again where modules or parameters are others."""
    modules = partitioned_modules(model)
    found = _switches.get(model)
    if found is None or not found.is_of(modules):
        _switches[model] = found = Switch(modules)
    return found


def states_by_subnetwork(switch: Switch) -> dict[int, list[PartitionState]]:
    """Return the states of a switch by the subnetwork that is active in them."""
    found = defaultdict(list)
    for state in switch.states:
        found[state.active].append(state)
    return found
