"""Weight and Vector: parameters that differ between subnetworks, and the entries that a switch exchanges."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from partkernels import Partition, Zeros
from partkernels.operators.entries import combine_rows
from partnets.subnetworks.state import DEFAULTS, MAP, ROWS, STORED, PartitionState, check_map, defaults_of_weight
from partnets.utils.modules import is_sharded
from partnets.utils.shards import Memory, default_values, local, local_partition, part, version, whole

INT32_MAX = 2**31 - 1


class Exchanged:
    """A parameter that differs between subnetworks; it holds weak references to the module, its state and parameter.

    Attributes:
        module, name: the first place of the parameter.
        state: the state of this module.
        parameter: the parameter of the whole network.
        whole: the parameter's memory, to see whether it was replaced; it shares the parameter's version.
        watched: this memory and the rows, or None for shards and inference tensors, which have no one version.
        hooked: the ids of parameters with a hook that masks gradients, among them those gathered from shards.
        accumulating: the ids of those with a hook that notes each gradient.
    """

    def __init__(self, module: nn.Module, name: str, state: PartitionState, parameter: nn.Parameter) -> None:
        self.name, self.versions = name, state.versions
        self.hooked: set[int] = set()
        self.accumulating: set[int] = set()
        self.whole: Tensor | None = None
        # The key of the hook of the parameter's gradients.
        self.hook: int | None = None
        self._rows_name = name + ROWS
        self.watched: tuple[Tensor, Tensor | None] | None = None
        self._module, self._state, self._parameter = weakref.ref(module), weakref.ref(state), weakref.ref(parameter)

    @property
    def module(self) -> nn.Module:
        return self._module()

    @property
    def state(self) -> PartitionState | None:
        return self._state()

    @property
    def parameter(self) -> nn.Parameter:
        return self._parameter()

    def hold(self) -> None:
        """Remember the parameter's memory and its rows, from which `version` is read."""
        parameter, rows = self.parameter, self.module._buffers.get(self._rows_name)
        self.whole = local(parameter).detach()
        tensors = [parameter] if rows is None else [parameter, rows]
        is_plain = not any(is_sharded(tensor) or tensor.is_inference() for tensor in tensors)
        self.watched = (self.whole, rows) if is_plain else None

    def note(self) -> None:
        """Remember the versions of the parameter and its rows, so that is_unchanged finds later writes."""
        self.versions[self.name] = self.version()

    def is_unchanged(self) -> bool:
        """Return whether nothing was written into the parameter or its rows since `note`; False before the first one.

        torch counts the writes into a tensor as its version; writes by `.data` are not counted.
        """
        return self.version() == self.versions.get(self.name)

    def version(self) -> tuple[int, int, int]:
        """Return version_of(self), faster for most parameters."""
        if self.watched is None:
            return version_of(self)
        whole, rows = self.watched
        return (whole._version, 0, 0) if rows is None else (whole._version, rows._version, id(rows))


class Weight(Exchanged):
    """A partitioned weight, and the entries that a switch exchanges.

    Attributes:
        memory: the parameter as one dimension, in the order of its memory.
        places: the indices in `memory` of the entries of partition 2, then of 3, ..., C: int32, or int64 if needed.
        defaults: the value of each of these while its partition is not active.
        learned: the learned value of each, valid while its partition is not active.
        starts: the start of each of partitions 2..C in these three, and the end of the last one.
        key: the addresses and versions of the tensors from which these were computed.
        made: the number of times that they were computed.
        buffers: the names of these tensors.
    """

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.memory: Tensor | None = None
        self.places: Tensor | None = None
        self.defaults: Tensor | None = None
        self.learned: Tensor | None = None
        self.starts: list[int] = []
        self.key: tuple[Any, ...] = ()
        self.made = 0
        self._map: tuple[tuple, Tensor | None] = (), None
        self.buffers = [self.name + end for end in (MAP, DEFAULTS, STORED)]

    @property
    def is_narrow(self) -> bool:
        """Return whether a subnetwork has a part of the parameter, so that nothing is exchanged."""
        return self.state.narrow is not None and self.name in self.state.narrow.owners

    def refresh(self) -> None:
        """Recompute memory, places and values if parameter, map or defaults have changed; for a DTensor this rank's."""
        read = [self.module._buffers.get(name) for name in self.buffers]
        parameter = local(self.parameter)
        of_buffers = [(local(one).data_ptr(), version(one)) for one in read if one is not None]
        key = parameter.data_ptr(), parameter.dtype, parameter.stride(), of_buffers
        if key == self.key:
            return
        map, numbers, _ = read
        if map.is_meta:
            raise RuntimeError(
                f"the {self.name} of a {type(self.module).__name__} is on the meta device, without values; call"
                " model.to_empty(device=...) and load a state_dict before a subnetwork is entered."
            )
        check_map(self.module, self.name)
        if not (is_sharded(self.parameter) or is_sharded(map)):
            try:
                if not numbers.is_meta and int(numbers[5]) != self.parameter.numel():
                    raise ValueError(f"it has {self.parameter.numel()} entries instead of {int(numbers[5])}.")
                Partition(tuple(self.parameter.shape), self.state.num_partitions, map, Zeros())
            except ValueError as error:
                raise ValueError(
                    f"the {self.name} of a {type(self.module).__name__} does not fit its partitions, {self.name}{MAP}:"
                    f" {error} Resize parameters before partnets.partition; after to_empty, load a state_dict."
                ) from error
        with torch.no_grad():
            own = local_partition(map, self.state.num_partitions, self.parameter)
            self.memory = in_memory(parameter.detach(), parameter)
            if self.memory is None:
                raise ValueError(
                    f"{self.name} of {type(self.module).__name__} has gaps in memory, strides {parameter.stride()} of"
                    f" shape {tuple(parameter.shape)}; make it contiguous before partnets.partition."
                )
            ids = torch.empty(parameter.shape, dtype=torch.uint8) if own is None else own.ids()
            ids = in_memory(ids.to(parameter.device), parameter)
            defaults = default_values(defaults_of_weight(self.module, self.name), self.parameter)
            defaults = in_memory(defaults, parameter)
            index = torch.int32 if parameter.numel() <= INT32_MAX else torch.int64
            found = [(ids == k).nonzero().view(-1) for k in range(2, self.state.num_partitions + 1)]
            self.starts = [0, *itertools.accumulate(len(places) for places in found)]
            places = torch.cat(found) if found else ids.new_zeros(0, dtype=torch.int64)
            self.places, self.defaults = places.to(index), defaults[places]
            self.learned = torch.empty_like(self.defaults)
        self.key = key
        self.made += 1

    def map_of(self, grad: Tensor) -> Tensor | None:
        """Return the map of the weight, or of this rank's part of a gradient that is a DTensor; None if it is empty."""
        map = self.module._buffers[self.name + MAP]
        if not is_sharded(grad):
            return whole(map)
        key = local(map).data_ptr(), version(map), grad.placements, grad.device
        if key != self._map[0]:
            own = local_partition(map, self.state.num_partitions, grad)
            self._map = key, None if own is None else own.map
        return self._map[1]


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


class Vector(Exchanged):
    """A parameter with a vector for each partition, added or multiplied; `buffers` has the name of its rows."""

    def __init__(self, *of: Any, is_product: bool) -> None:
        super().__init__(*of)
        self.is_product, self.buffers = is_product, [self._rows_name]

    @property
    def rows(self) -> Tensor:
        return local(self.module._buffers[self._rows_name])

    def combined(self) -> Tensor:
        """Return the vector of the whole network; of a DTensor this rank's part."""
        whole = torch.empty_like(self.rows[0])
        combine_rows([whole], [self.rows], self.state.num_partitions, [self.is_product])
        return part(whole, self.parameter).to(self.parameter.device)

    def check_shape(self) -> None:
        """Raise ValueError if the parameter was resized."""
        shape, rows = tuple(self.parameter.shape), self.module._buffers[self.name + ROWS]
        if shape != tuple(rows.shape[1:]) and not is_sharded(self.parameter):
            raise ValueError(
                f"the {self.name} of a {type(self.module).__name__} has shape {shape}, and its vectors"
                f" {tuple(rows.shape[1:])}; resize parameters before partnets.partition."
            )


class Layout:
    """The memory of parameters and of the buffers that belong to them, and what Weight.refresh has read.

    Args:
        exchanged: the parameters.
    """

    def __init__(self, exchanged: list[Weight | Vector]) -> None:
        held = [(one.module._buffers, name) for one in exchanged for name in one.buffers]
        self._memory = Memory([one.parameter for one in exchanged], held)
        self._weights = [one for one in exchanged if isinstance(one, Weight)]
        self._parameters = [one.parameter for one in self._weights]
        buffers = (one.module._buffers.get(name) for one in self._weights for name in one.buffers)
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        self._are_plain = not any(is_sharded(one) or one.is_inference() for one in self._buffers)
        self._facts = self._read()

    def _read(self) -> list:
        versions = [one._version for one in self._buffers] if self._are_plain else [*map(version, self._buffers)]
        return [versions, [(one.dtype, one.stride()) for one in self._parameters], [one.made for one in self._weights]]

    def is_current(self) -> bool:
        """Return whether nothing has changed since the construction."""
        return self._memory.is_current() and self._read() == self._facts


def version_of(one: Any) -> tuple[int, int, int]:
    """Return torch's versions of a parameter and of its rows, and the id of the rows; 0 where there are none.

    The versions of inference tensors are 0. Those of replaced rows begin at 0 again.
    """
    rows = one.module._buffers.get(one.name + ROWS)
    return (version(one.parameter), 0, 0) if rows is None else (version(one.parameter), version(rows), id(rows))
