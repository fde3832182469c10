"""PartitionedParameter: what each partition owns of one parameter, for optimizers, servers and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from partkernels import Partition, Zeros, gather_entries, scatter_entries
from partkernels.operators.entries import combine_rows
from partnets.subnetworks.state import MAP, ROWS, PartitionState, parameter_of, partitioned_modules, state_of
from partnets.subnetworks.switch import turn_gradient


class PartitionedParameter:
    """A parameter whose entries belong to partitions (a weight), or that has a vector for each of them.

    Attributes:
        module, name: where the parameter is; of a tied one the first place.
        parameter: that of the whole network, outside of partnets.subnetwork.
        is_vector: whether it has a vector for each partition, [C, ...].
        owner: the partition that owns all of it; None if several partitions own some.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.state: PartitionState = state_of(module)
        self.is_vector = name in self.state.vectors
        self.owner = self.state.wholes.get(name, 1 if self.state.count == 1 else None)
        self._partition: tuple[tuple, Partition] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return parameter_of(self.module, self.name)

    @property
    def rows(self) -> Tensor:
        """The vectors of all partitions, [C, ...]."""
        return self.module._buffers[self.name + ROWS]

    @property
    def stored(self) -> Tensor:
        """The tensor that has what all partitions have learned: the parameter, or the rows of a vector."""
        return self.rows if self.is_vector and self.state.count > 1 else self.parameter

    @property
    def partition(self) -> Partition | None:
        """Which entry of a weight is of which partition; None if all are of the one that is asked for."""
        if self.is_vector or self.owner is not None:
            return None
        map = self.module._buffers[self.name + MAP]
        key = map.data_ptr(), map._version, self.parameter.device
        if self._partition is None or self._partition[0] != key:
            plain = Partition._unchecked(tuple(self.parameter.shape), self.state.count, map, Zeros())
            self._partition = key, plain
        return self._partition[1]

    def numel(self, k: int) -> int:
        """Return how many entries partition k owns."""
        if self.partition is not None:
            return self.partition.sizes()[k - 1]
        return self.parameter.numel() if self.owner in (None, k) else 0

    def of(self, tensor: Tensor, k: int) -> Tensor:
        """Return the view of a tensor like `stored` in which all that partition k owns is."""
        if self.owner is not None:
            return tensor if self.owner == k else tensor.reshape(-1)[:0]
        return tensor[k - 1] if self.is_vector else tensor

    def take(self, tensor: Tensor, k: int) -> Tensor:
        """Return what partition k owns of a tensor like `stored`, packed: a vector, a copy unless it is all."""
        view = self.of(tensor, k)
        return view.reshape(-1) if self.partition is None else gather_entries(view, self.partition, k)

    def put(self, tensor: Tensor, k: int, values: Tensor) -> None:
        """Set what partition k owns of a tensor like `stored`, from packed values."""
        view = self.of(tensor, k)
        if self.partition is None:
            view.copy_(values.view_as(view))
        else:
            scatter_entries(view, self.partition, k, values)

    def gradient(self, k: int) -> Tensor | None:
        """Return the gradient that partition k is stepped by, of the parameter's shape; None if it has none."""
        grad = self.parameter.grad if self.owner in (None, k) else None
        if not self.is_vector or self.state.count == 1:
            return grad
        if self.state.grad_of.get(self.name, k) != k:
            grad = None
        kept = self.state.grads.get(self.name, {}).get(k)
        return grad if kept is None else kept if grad is None else grad + kept

    @torch.no_grad()
    def put_gradient(self, k: int, values: Tensor) -> None:
        """Set the gradient that partition k is stepped by, from packed values; keep those of other partitions."""
        parameter, state = self.parameter, self.state
        state.learned.add(k)
        if self.is_vector and state.count > 1:
            turn_gradient(self, k)
            state.grads.get(self.name, {}).pop(k, None)
            parameter.grad = values.view_as(parameter).clone()
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
        """Make the parameter what its vectors are together, after they were changed."""
        if self.is_vector and self.state.count > 1:
            into = self.parameter if into is None else into
            combine_rows([into.detach()], [self.rows], self.state.active, [self.state.vectors[self.name]])

    def __repr__(self) -> str:
        return f"PartitionedParameter({type(self.module).__name__}.{self.name})"


def partitioned_parameters(model: nn.Module) -> list[PartitionedParameter]:
    """Return what is partitioned of a model, each parameter once."""
    found, seen = [], set()
    for module in partitioned_modules(model):
        state = state_of(module)
        for name in (*state.weights, *state.vectors, *state.wholes) if state.count > 1 else learned(module):
            if id(parameter_of(module, name)) not in seen:
                seen.add(id(parameter_of(module, name)))
                found.append(PartitionedParameter(module, name))
    return found


def learned(module: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that a module has, where there is one partition."""
    return (name for name, parameter in module._parameters.items() if parameter is not None)


def names_of(model: nn.Module, parameters: Sequence[PartitionedParameter]) -> dict[PartitionedParameter, str]:
    """Return the dotted name of each partitioned parameter in a model."""
    paths = {module: path for path, module in model.named_modules()}
    return {one: f"{paths[one.module]}.{one.name}".lstrip(".") for one in parameters}
