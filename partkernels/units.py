"""Units: which rows or columns of a weight belong to which partition, where they lie in order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Units:
    """Units in segments, in each of which partition 1 owns the first ones, partition 2 the next, and so on.

    One segment is what most layers have. Queries, keys and values that one layer makes are three; so are the inputs of
    a layer that are concatenated from three.

    Attributes:
        segments: of each segment, n_1..n_C: how many of its units are live in subnetwork 1..C.

    Raises:
        ValueError: a segment's numbers don't ascend from 0 or more, or their numbers of partitions differ.

    Example:
        >>> units = Units(((2, 3), (1, 4)))
        >>> units.size, units.number(1), units.live(1), units.of(2)
        (7, 3, (slice(0, 2, None), slice(3, 4, None)), (slice(2, 3, None), slice(4, 7, None)))
    """

    segments: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        counts = {len(ends) for ends in self.segments}
        ascend = all(list(ends) == sorted(ends) and ends[:1] >= (0,) for ends in self.segments)
        if len(counts) != 1 or 0 in counts or not ascend:
            raise ValueError(
                f"units of {self.segments}; pass of each segment how many units are live in subnetwork 1..C, ints that"
                " ascend from 0 or more."
            )
        count = len(self.segments[0])
        numbers = [0, *(sum(ends[k] for ends in self.segments) for k in range(count))]
        found = {
            "_numbers": numbers,
            "_live": [_blocks(self.segments, 0, k) for k in range(count + 1)],
            "_own": [_blocks(self.segments, k - 1, k) for k in range(1, count + 1)],
        }
        for name, value in found.items():
            object.__setattr__(self, name, tuple(value))

    def __getstate__(self) -> dict:
        return {"segments": self.segments}

    def __setstate__(self, state: dict) -> None:
        object.__setattr__(self, "segments", state["segments"])
        self.__post_init__()  # a damaged file must not become units

    @classmethod
    def given(cls, ends: Units | Sequence[int] | Sequence[Sequence[int]]) -> Units:
        """The units of one segment, n_1..n_C, or of several; units are returned as they are.

        Raises:
            TypeError: these are no ints.
        """
        if isinstance(ends, Units):
            return ends
        segments = ends if len(ends) and isinstance(ends[0], Sequence) else (ends,)
        try:
            return cls(tuple(tuple(map(operator.index, one)) for one in segments))
        except TypeError:
            raise TypeError(f"units of {ends!r}; pass n_1..n_C, ints, or such of each segment.") from None

    @classmethod
    def whole(cls, size: int, count: int) -> Units:
        """Units that are live in all of C subnetworks."""
        return cls(((size,) * count,))

    @classmethod
    def of_owners(cls, owners: Sequence[int], count: int) -> Units:
        """The units whose partitions are these, 1..count, in as few segments as can be.

        Example:
            >>> Units.of_owners([1, 1, 2, 1, 2], count=2)
            Units(segments=((2, 3), (1, 2)))
        """
        segments, last = [[]], 0
        for owner in owners:
            if owner < last:
                segments.append([])
            segments[-1].append(owner)
            last = owner
        return cls(tuple(tuple(sum(own <= k for own in one) for k in range(1, count + 1)) for one in segments))

    @property
    def count(self) -> int:
        """C."""
        return len(self.segments[0])

    @property
    def size(self) -> int:
        """How many units there are."""
        return self.number(self.count)

    @property
    def is_whole(self) -> bool:
        """Whether all are live in all subnetworks."""
        return self.number(1) == self.size

    def number(self, active: int) -> int:
        """How many are live in subnetwork `active`; none in 0."""
        return self._numbers[active]

    def sizes(self) -> list[int]:
        """How many units each partition has."""
        return [self.number(k) - self.number(k - 1) for k in range(1, self.count + 1)]

    def live(self, active: int) -> tuple[slice, ...]:
        """Where those of partitions 1..active are, one after another; none in 0."""
        return self._live[active]

    def of(self, partition: int) -> tuple[slice, ...]:
        """Where those of one partition are."""
        return self._own[partition - 1]

    def among(self, block: slice, active: int) -> slice:
        """Where a block of live units is among those that are live."""
        before = 0
        for live in self.live(active):
            if live.start <= block.start < live.stop:
                return slice(before + block.start - live.start, before + block.stop - live.start)
            before += live.stop - live.start
        raise ValueError(f"{block} is not live in subnetwork {active} of {self}.")

    def owners(self, device: torch.device | str = "cpu") -> Tensor:
        """The partition of each unit, 1..C: int64."""
        own = torch.empty(self.size, dtype=torch.int64, device="cpu")
        for k in range(1, self.count + 1):
            for block in self.of(k):
                own[block] = k
        return own.to(device)

    def shard(self, start: int, stop: int) -> Units:
        """Units start..stop alone."""
        owners = self.owners()[start:stop].tolist()
        return Units.of_owners(owners, self.count)

    def take(self, tensor: Tensor, dim: int, active: int) -> Tensor:
        """A tensor's live units along a dimension; a view if they are one block.

        Raises:
            ValueError: the tensor has not so many units.
        """
        if tensor.shape[dim] != self.size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has {tensor.shape[dim]} units along dimension {dim}; there"
                f" are {self.size}, of which {self.number(active)} are live in subnetwork {active}."
            )
        return joined([tensor[_at(tensor, dim, block)] for block in self.live(active)], tensor, dim)

    def put(self, tensor: Tensor, dim: int, active: int, values: Tensor) -> None:
        """The inverse of take in place: sets a tensor's live units along a dimension, and no others."""
        blocks = self.live(active)
        parts = values.split([block.stop - block.start for block in blocks], dim)
        for block, part in zip(blocks, parts, strict=True):
            tensor[_at(tensor, dim, block)] = part

    def spread(self, tensor: Tensor, dim: int, active: int) -> Tensor:
        """The inverse of take, with zeros for the others."""
        if tensor.shape[dim] == self.size:
            return tensor
        parts, start, shape = [], 0, list(tensor.shape)
        for ends in self.segments:
            parts.append(tensor.narrow(dim, start, ends[active - 1]))
            shape[dim] = ends[-1] - ends[active - 1]
            parts.append(tensor.new_zeros(shape))
            start += ends[active - 1]
        return torch.cat(parts, dim)


def joined(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    """Tensors one after another along a dimension; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else like.narrow(dim, 0, 0)


def _at(tensor: Tensor, dim: int, block: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % tensor.dim()), block)


def _blocks(segments: tuple[tuple[int, ...], ...], after: int, until: int) -> tuple[slice, ...]:
    """Where units of partitions after + 1..until are; blocks that touch are one."""
    found, start = [], 0
    for ends in segments:
        first, last = (start + (ends[k - 1] if k else 0) for k in (after, until))
        if first < last:
            if found and found[-1].stop == first:
                found[-1] = slice(found[-1].start, last)
            else:
                found.append(slice(first, last))
        start += ends[-1]
    return tuple(found)
