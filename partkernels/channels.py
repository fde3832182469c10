"""Channels: the partition of each channel (row or column of a weight), where partitions are stored in order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Channels:
    """Channels in segments. In each segment, partition 1 owns the first channels, partition 2 the next, and so on.

    Most layers have one segment. A layer that makes queries, keys and values has three, and so has a layer whose inputs
    are concatenated from three sources.

    Attributes:
        segments: for each segment n_1..n_C, its numbers of active channels in subnetworks 1..C.

    Raises:
        ValueError: a segment's numbers do not ascend from 0 or more, or segments differ in their number of partitions.

    Example:
        >>> channels = Channels(((2, 3), (1, 4)))
        >>> channels.size, channels.number(1), channels.active_blocks(1), channels.of(2)
        (7, 3, (slice(0, 2, None), slice(3, 4, None)), (slice(2, 3, None), slice(4, 7, None)))
    """

    segments: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = {len(ends) for ends in self.segments}
        ascend = all(list(ends) == sorted(ends) and ends[:1] >= (0,) for ends in self.segments)
        if len(counts) != 1 or 0 in counts or not ascend:
            raise ValueError(
                f"channels of {self.segments}; pass, for each segment, the numbers of active channels in subnetworks"
                " 1..C, as ascending ints of at least 0."
            )
        num_partitions = len(self.segments[0])
        numbers = [0, *(sum(ends[k] for ends in self.segments) for k in range(num_partitions))]
        found = {
            "_numbers": numbers,
            "_active": [_blocks(self.segments, 0, k) for k in range(num_partitions + 1)],
            "_own": [_blocks(self.segments, k - 1, k) for k in range(1, num_partitions + 1)],
        }
        for name, value in found.items():
            object.__setattr__(self, name, tuple(value))

    def __getstate__(self) -> dict[str, Any]:
        return {"segments": self.segments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "segments", state["segments"])
        self.__post_init__()  # a damaged file must not load as channels

    @classmethod
    def given(cls, ends: Ends) -> Channels:
        """Return Channels of one segment, n_1..n_C, or of several segments; return Channels unchanged.

        Raises:
            TypeError: the numbers are not ints.
        """
        if isinstance(ends, Channels):
            return ends
        segments = ends if len(ends) and isinstance(ends[0], Sequence) else (ends,)
        try:
            return cls(tuple(tuple(map(operator.index, one)) for one in segments))
        except TypeError:
            raise TypeError(f"channels of {ends!r}; pass n_1..n_C as ints, or one such sequence per segment.") from None

    @classmethod
    def whole(cls, size: int, num_partitions: int) -> Channels:
        """Return Channels that are active in all C subnetworks."""
        return cls(((size,) * num_partitions,))

    @classmethod
    def of_owners(cls, owners: Sequence[int], num_partitions: int) -> Channels:
        """Return Channels of these partitions, 1..count, in as few segments as possible.

        Example:
            >>> Channels.of_owners([1, 1, 2, 1, 2], num_partitions=2)
            Channels(segments=((2, 3), (1, 2)))
        """
        segments, last = [[]], 0
        for owner in owners:
            if owner < last:
                segments.append([])
            segments[-1].append(owner)
            last = owner
        return cls(tuple(tuple(sum(own <= k for own in one) for k in range(1, num_partitions + 1)) for one in segments))

    @property
    def num_partitions(self) -> int:
        """C, the number of partitions."""
        return len(self.segments[0])

    @property
    def size(self) -> int:
        """The number of channels."""
        return self.number(self.num_partitions)

    @property
    def is_whole(self) -> bool:
        """True if all channels are active in all subnetworks."""
        return self.number(1) == self.size

    def number(self, active: int) -> int:
        """Return the number of active channels in subnetwork `active`; 0 for subnetwork 0."""
        return self._numbers[active]

    def sizes(self) -> list[int]:
        """Return the number of channels of each partition."""
        return [self.number(k) - self.number(k - 1) for k in range(1, self.num_partitions + 1)]

    def active_blocks(self, active: int) -> tuple[slice, ...]:
        """Return the blocks of partitions 1..active in order; empty for 0."""
        return self._active[active]

    def of(self, partition: int) -> tuple[slice, ...]:
        """Return the blocks of one partition."""
        return self._own[partition - 1]

    def among(self, block: slice, active: int) -> slice:
        """Return the position of a block of active channels among all active channels."""
        before = 0
        for part in self.active_blocks(active):
            if part.start <= block.start < part.stop:
                return slice(before + block.start - part.start, before + block.stop - part.start)
            before += part.stop - part.start
        raise ValueError(f"{block} is not active in subnetwork {active} of {self}.")

    def owners(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the partition of each channel, 1..C: int64."""
        own = torch.empty(self.size, dtype=torch.int64, device="cpu")
        for k in range(1, self.num_partitions + 1):
            for block in self.of(k):
                own[block] = k
        return own.to(device)

    def shard(self, start: int, stop: int) -> Channels:
        """Return only channels start..stop - 1."""
        owners = self.owners()[start:stop].tolist()
        return Channels.of_owners(owners, self.num_partitions)

    def take(self, tensor: Tensor, dim: int, active: int) -> Tensor:
        """Return a tensor's active channels along a dimension; a view if they form one block.

        Raises:
            ValueError: the tensor has another number of channels.
        """
        if tensor.shape[dim] != self.size:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has {tensor.shape[dim]} channels along dimension {dim};"
                f" expected {self.size}, with {self.number(active)} active in subnetwork {active}."
            )
        return joined([tensor[_at(tensor, dim, block)] for block in self.active_blocks(active)], tensor, dim)

    def put(self, tensor: Tensor, dim: int, active: int, values: Tensor) -> None:
        """Set a tensor's active channels along a dimension, in place, and leave the others: the inverse of take."""
        blocks = self.active_blocks(active)
        parts = values.split([block.stop - block.start for block in blocks], dim)
        for block, part in zip(blocks, parts, strict=True):
            tensor[_at(tensor, dim, block)] = part

    def spread(self, tensor: Tensor, dim: int, active: int) -> Tensor:
        """Return the values at the active channels and zeros elsewhere: the inverse of take."""
        if tensor.shape[dim] == self.size:
            return tensor
        parts, start, shape = [], 0, list(tensor.shape)
        for ends in self.segments:
            parts.append(tensor.narrow(dim, start, ends[active - 1]))
            shape[dim] = ends[-1] - ends[active - 1]
            parts.append(tensor.new_zeros(shape))
            start += ends[active - 1]
        return torch.cat(parts, dim)


# Channels, or n_1..n_C of one segment or of each segment.
Ends = Channels | Sequence[int] | Sequence[Sequence[int]]


def joined(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    """Concatenate tensors along a dimension; return a single one unchanged, and an empty slice of `like` for none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else like.narrow(dim, 0, 0)


def _at(tensor: Tensor, dim: int, block: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * (dim % tensor.dim()), block)


def _blocks(segments: tuple[tuple[int, ...], ...], after: int, until: int) -> tuple[slice, ...]:
    """Return the blocks of partitions after + 1..until; adjacent blocks are merged."""
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
