"""PartitionedParameter: the entries of one parameter that each partition owns, for optimizers, servers and checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import Partition, Zeros, gather_entries, scatter_entries
from partkernels.operators.entries import Exchange, combine_rows
from partnets.subnetworks.gradients import (
    check_kept,
    forget_cleared,
    is_assigned,
    note_gradient,
    scale_gradient,
    turn_gradient,
)
from partnets.subnetworks.state import MAP, ROWS, PartitionState, parameter_of, partitioned_modules, state_of
from partnets.utils.modules import is_sharded
from partnets.utils.shards import local, local_partition, part, redistributed, version, whole


class PartitionedParameter:
    """A partitioned parameter: a weight with entries in partitions, or a parameter with a vector for each partition.

    Attributes:
        module, name: the module and the name of the parameter in it; if it is tied, those of the first place.
        parameter: the parameter of the whole network, outside of partnets.subnetwork.
        is_vector: whether it has a vector for each partition, [C, ...].
        owner: the partition that owns all entries; None if several partitions own entries.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.parameter = module, name, parameter_of(module, name)
        self.state: PartitionState = state_of(module)
        self.is_vector = name in self.state.vectors
        self.owner = self.state.wholes.get(name, 1 if self.state.num_partitions == 1 else None)
        self._partition: tuple[tuple, Partition] | None = None
        self._buffer = name + ROWS if self.is_vector else "" if self.owner is not None else name + MAP

    @property
    def rows(self) -> Tensor:
        """The vectors of all partitions, [C, ...]."""
        return local(self.module._buffers[self.name + ROWS])

    @property
    def stored(self) -> Tensor:
        """The tensor with the learned values of all partitions: the parameter, or the rows of a vector."""
        return self.rows if self.is_vector and self.state.num_partitions > 1 else self.parameter

    @property
    def held(self) -> tuple[dict[str, Any], str]:
        """The dict and the key of the buffer with the rows or the map; without one if a partition owns all entries."""
        return self.module._buffers, self._buffer

    @property
    def partition(self) -> Partition | None:
        """The partition of each entry of a weight; None for vectors, and if one partition owns all entries.

        For a DTensor, this and the methods below refer to this rank's part.
        """
        if self.is_vector or self.owner is not None:
            return None
        map, parameter = self.module._buffers[self.name + MAP], self.parameter
        key = local(map).data_ptr(), version(map), parameter.device, local(parameter).shape
        if self._partition is None or self._partition[0] != key:
            self._partition = key, local_partition(map, self.state.num_partitions, parameter)
        return self._partition[1]

    def numel(self, k: int) -> int:
        """Return the number of entries of partition k, on all ranks together, which must call this."""
        if self.is_vector or self.owner is not None:
            return self.parameter.numel() if self.owner in (None, k) else 0
        map = whole(self.module._buffers[self.name + MAP])
        return Partition._unchecked(tuple(self.parameter.shape), self.state.num_partitions, map, Zeros()).sizes()[k - 1]

    def of(self, tensor: Tensor, k: int) -> Tensor:
        """Return a view of a tensor like `stored` with all entries of partition k; for a DTensor, on this rank."""
        tensor = local(tensor)
        if self.owner is not None:
            return tensor if self.owner == k else tensor.reshape(-1)[:0]
        return tensor[k - 1] if self.is_vector else tensor

    def take(self, tensor: Tensor, k: int) -> Tensor:
        """Return the entries of partition k in a tensor like `stored`, as a vector; it is a copy unless k owns all."""
        view = self.of(tensor, k)
        return view.reshape(-1) if self.partition is None else gather_entries(view, self.partition, k)

    def put(self, tensor: Tensor, k: int, values: Tensor) -> None:
        """Set the entries of partition k in a tensor like `stored`, from a vector."""
        view = self.of(tensor, k)
        if self.partition is None:
            view.copy_(values.view_as(view))
        else:
            scatter_entries(view, self.partition, k, values)

    def gradient(self, k: int) -> Tensor | None:
        """Return the gradient for a step of partition k, like `of(stored, k)`; None if there is no gradient.

        All ranks must call it for a vector that is sharded.
        """
        grad = self.parameter.grad if self.owner in (None, k) else None
        if not self.is_vector or self.state.num_partitions == 1:
            return None if grad is None else local(redistributed(grad, self.parameter))
        if self.state.unscaled:  # the step is inside of a subnetwork
            scale_gradient(self)
        if self.state.grads:
            forget_cleared(self)
            check_kept(self)
        kept = self.state.grads.get(self.name, {})
        if self.state.grad_of.get(self.name, k) != k and (kept or not is_assigned(self)):
            grad = None
        kept = kept.get(k)
        found = grad if kept is None else kept if grad is None else grad + kept
        return None if found is None else whole(found)

    @torch.no_grad()
    def put_gradient(self, k: int, values: Tensor) -> None:
        """Set the gradient for a step of partition k, from a vector; keep those of other partitions."""
        parameter, state = self.parameter, self.state
        state.learned.add(k)
        if self.is_vector and state.num_partitions > 1:
            turn_gradient(self, k)
            state.grads.get(self.name, {}).pop(k, None)
            parameter.grad = values.view_as(parameter).clone()
            note_gradient(self, k)
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.put(parameter.grad, k, values)

    def clear_gradients(self) -> None:
        """Forget the gradients that were set aside for other partitions."""
        self.state.grads.pop(self.name, None)
        self.state.grad_of.pop(self.name, None)

    @torch.no_grad()
    def combine(self, into: Tensor | None = None) -> None:
        """Set the parameter to the sum or product of its vectors, after they were changed."""
        if self.is_vector and self.state.num_partitions > 1:
            into = self.parameter if into is None else into
            combined = torch.empty_like(self.rows[0]) if is_sharded(into) else into.detach()
            combine_rows([combined], [self.rows], self.state.active, [self.state.vectors[self.name]])
            if is_sharded(into):
                local(into).copy_(part(combined, into))

    def __repr__(self) -> str:
        return f"PartitionedParameter({type(self.module).__name__}.{self.name})"


class Combination:
    """Sets parameters to the sums or products of their vectors, in one launch for each dtype and device.

    Args:
        parameters: those with vectors are set, others left unchanged.
    """

    def __init__(self, parameters: Sequence[PartitionedParameter]) -> None:
        self._vectors = [one for one in parameters if one.is_vector and one.state.num_partitions > 1]
        self._states = {one.state for one in self._vectors}
        groups: dict[tuple, list[PartitionedParameter]] = defaultdict(list)
        if not any(is_sharded(one.parameter) for one in self._vectors):
            for one in self._vectors:
                groups[one.parameter.device, one.parameter.dtype].append(one)
        self._exchanges = [
            Exchange(
                vectors=[one.parameter.detach() for one in some],
                rows=[one.rows for one in some],
                are_products=[one.state.vectors[one.name] for one in some],
            )
            for some in groups.values()
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Set the parameters, after their vectors were changed."""
        active = {state.active for state in self._states}
        if self._exchanges and len(active) == 1:
            for exchange in self._exchanges:
                exchange(*active)
        else:
            for one in self._vectors:
                one.combine()


def partitioned_parameters(model: nn.Module) -> list[PartitionedParameter]:
    """Return a PartitionedParameter for each partitioned parameter of a model; a tied parameter appears once.

    In a model with one partition, these are all parameters of the partitioned modules.

    Example:
        >>> import partnets
        >>> partitioned_parameters(partnets.partition(nn.Linear(4, 2), (0.5, 0.5)))
        [PartitionedParameter(Linear.weight), PartitionedParameter(Linear.bias)]
    """
    found, seen = [], set()
    for module in partitioned_modules(model):
        state = state_of(module)
        for name in (*state.weights, *state.vectors, *state.wholes) if state.num_partitions > 1 else learned(module):
            if id(parameter_of(module, name)) not in seen:
                seen.add(id(parameter_of(module, name)))
                found.append(PartitionedParameter(module, name))
    return found


def learned(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's own parameters, for a model with one partition."""
    return (name for name, parameter in module._parameters.items() if parameter is not None)


def names_of(model: nn.Module, parameters: Sequence[PartitionedParameter]) -> dict[PartitionedParameter, str]:
    """Return the dotted name of each partitioned parameter in a model."""
    paths = {module: path for path, module in model.named_modules()}
    return {one: f"{paths[one.module]}.{one.name}".lstrip(".") for one in parameters}
