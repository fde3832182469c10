"""Partition: which entries of a weight belong to which partition, and what replaces those that are not live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partkernels import dispatch, packed_map
from partkernels.defaults import Defaults, Normal, Stored, Uniform, Zeros, check_seed

# Map bytes read at once when a map is checked.
CHUNK_BYTES = 1 << 18


def sizes(total: int, proportions: Sequence[float]) -> list[int]:
    """Splits total by the proportions, by largest remainder; ties go to the lower partition.

    Args:
        total: the number of things to split, 0 or more.
        proportions: at least one and at most 256 numbers in [0, 1] that sum to 1.

    Raises:
        ValueError: the proportions are none of that.

    Example:
        >>> sizes(10, (0.8, 0.15, 0.05))
        [8, 2, 0]
    """
    proportions = tuple(float(p) for p in proportions)
    if not 1 <= len(proportions) <= packed_map.MAX_COUNT:
        raise ValueError(
            f"{len(proportions)} proportions were given; pass 1 to {packed_map.MAX_COUNT}, one for each partition."
        )
    if not all(p >= 0 for p in proportions) or not math.isclose(sum(proportions), 1, abs_tol=1e-6):
        raise ValueError(
            f"proportions {proportions} sum to {sum(proportions):g}; pass numbers that are not negative and sum to 1."
        )
    parts = [math.floor(p * total) for p in proportions]
    by_remainder = sorted(range(len(parts)), key=lambda j: parts[j] - proportions[j] * total)
    for j in by_remainder[: total - sum(parts)]:
        parts[j] += 1
    return parts


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(int(n) for n in shape)
    if not shape or any(n < 1 for n in shape):
        raise ValueError(f"shape {shape} is empty; pass a weight's shape, each size at least 1.")
    return shape


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """C disjoint partitions of a weight, as a packed map of 1, 2, 4 or 8 bits a weight, and its defaults.

    Make one with Partition.random or Partition.from_ids. Partitions are numbered 1..C, as in the paper
    (Section 3; Appendix C for the random scheme).

    Attributes:
        shape: of the weight, [rows, ...].
        count: C, 1 to 256.
        map: uint8 [rows, row_bytes], format 1 (see packed_map).
        defaults: Zeros, Uniform, Normal or Stored.

    Raises:
        ValueError: the map's shape, dtype, padding or ids do not fit shape and count.

    Example:
        >>> p = Partition.random((4, 4), (0.5, 0.25, 0.25), seed=0)
        >>> p.count, p.bits, p.sizes()
        (3, 2, [8, 4, 4])
    """

    shape: tuple[int, ...]
    count: int
    map: Tensor
    defaults: Defaults = field(default_factory=Zeros)

    @classmethod
    def random(
        cls, shape: Sequence[int], proportions: Sequence[float], *, seed: int, defaults: Defaults | None = None
    ) -> Partition:
        """A fixed proportion of the weight for each partition, at random (Appendix C).

        The map is a pure function of (shape, proportions, seed), on every device and backend.

        Args:
            shape: of the weight, [rows, ...].
            proportions: C numbers that sum to 1; sizes follow by largest remainder.
            seed: an int in [0, 2**63).
            defaults: of the entries that are not live; Zeros() if None.

        Example:
            >>> Partition.random((2, 8), (0.75, 0.25), seed=3).ids().unique().tolist()
            [1, 2]
        """
        shape = _checked_shape(shape)
        check_seed("seed", seed)
        rows, cols = packed_map.matrix_shape(shape)
        counts = sizes(rows * cols, proportions)
        packed = dispatch.host().random_map(rows, cols, counts, seed)
        return cls._unchecked(shape, len(counts), packed, defaults or Zeros())

    @classmethod
    def from_ids(cls, ids: Tensor, *, count: int | None = None, defaults: Defaults | None = None) -> Partition:
        """The partition in which entry e belongs to partition ids[e].

        Args:
            ids: uint8, the weight's shape, values 1..C (a count of 256 cannot be written in uint8: 255 at most).
            count: C; the largest id if None.
            defaults: of the entries that are not live; Zeros() if None.

        Example:
            >>> Partition.from_ids(torch.tensor([[1, 2], [2, 1]], dtype=torch.uint8)).sizes()
            [2, 2]
        """
        if ids.dtype != torch.uint8:
            raise ValueError(f"ids are {ids.dtype}; pass torch.uint8 with values 1..C.")
        shape = _checked_shape(ids.shape)
        low, high = int(ids.min()), int(ids.max())
        count = high if count is None else count
        if not 1 <= count <= packed_map.MAX_COUNT:
            raise ValueError(f"count={count}; pass 1 to {packed_map.MAX_COUNT}.")
        if low < 1 or high > count:
            raise ValueError(f"ids run from {low} to {high}, but there are {count} partitions; pass ids in 1..{count}.")
        packed = packed_map.pack(packed_map.to_matrix(ids - 1), packed_map.bits_for(count))
        return cls(shape, count, packed, defaults or Zeros())

    @classmethod
    def _unchecked(cls, shape, count, packed, defaults) -> Partition:
        """A partition from parts that are known to fit; checking a map reads all of it."""
        self = object.__new__(cls)
        for name, value in (("shape", shape), ("count", count), ("map", packed), ("defaults", defaults)):
            object.__setattr__(self, name, value)
        self._check_defaults()
        return self

    def __post_init__(self):
        object.__setattr__(self, "shape", _checked_shape(self.shape))
        if not 1 <= self.count <= packed_map.MAX_COUNT:
            raise ValueError(f"count={self.count}; pass 1 to {packed_map.MAX_COUNT}.")
        self._check_map()
        self._check_defaults()

    def __setstate__(self, state: dict) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()  # a damaged file must not become a partition

    def _check_map(self) -> None:
        rows, cols = packed_map.matrix_shape(self.shape)
        expected = (rows, packed_map.row_bytes(cols, self.bits))
        if self.map.dtype != torch.uint8 or tuple(self.map.shape) != expected or not self.map.is_contiguous():
            raise ValueError(
                f"the map is {self.map.dtype} {tuple(self.map.shape)}; a weight of shape {self.shape} in {self.count}"
                f" partitions needs a contiguous torch.uint8 map of shape {expected}: build it with Partition.from_ids."
            )
        if self.map.is_meta:
            return
        chunk = max(1, CHUNK_BYTES // expected[1])
        for start in range(0, rows, chunk):
            ids = packed_map.unpack(self.map[start : start + chunk], expected[1] * 8 // self.bits, self.bits)
            if ids.max() >= self.count or ids[:, cols:].any():
                raise ValueError(
                    f"the map holds an id above its count of {self.count}, or padding that is not 0, in rows"
                    f" {start}..{min(start + chunk, rows) - 1}; build it with Partition.from_ids."
                )

    def _check_defaults(self) -> None:
        stored = self.defaults.stored
        if stored is None:
            return
        if tuple(stored.shape) != self.shape:
            raise ValueError(
                f"the stored defaults have shape {tuple(stored.shape)}; pass Stored(tensor) of shape {self.shape}."
            )
        if stored.device != self.map.device:
            raise ValueError(
                f"the stored defaults are on {stored.device} and the map is on {self.map.device};"
                " move one of them with .to(device)."
            )

    @property
    def bits(self) -> int:
        """Bits a weight: the smallest of 1, 2, 4, 8 with 2**bits >= count."""
        return packed_map.bits_for(self.count)

    @property
    def device(self) -> torch.device:
        """Where the map is."""
        return self.map.device

    def ids(self) -> Tensor:
        """The partition of each entry, 1..C: uint8, the weight's shape, contiguous (int16 if C is 256)."""
        ids = self._unpacked()
        return (ids.short() if self.count > 255 else ids) + 1

    def mask(self, partition: int) -> Tensor:
        """True at the entries of this partition: bool, the weight's shape, contiguous."""
        return self._unpacked() == partition - 1

    def _unpacked(self) -> Tensor:
        # Contiguous, as weights are; the map's own order would make a convolution's channels_last by torch.where.
        return packed_map.unpack_weight(self.map, self.shape, self.bits).contiguous()

    def sizes(self) -> list[int]:
        """The number of entries of each partition."""
        return torch.bincount(self.ids().flatten().int() - 1, minlength=self.count).tolist()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Partition:
        """This partition with its tensors on another device, and stored defaults in another dtype."""
        return self.map_tensors(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Partition:
        """This partition with each of its tensors replaced by function(tensor), as nn.Module._apply does."""
        return self._unchecked(self.shape, self.count, function(self.map), self.defaults.map_tensors(function))

    def flat(self) -> tuple:
        """The arguments of an operator that describe this partition, in the order of operators.PARTITION."""
        return self.map, self.defaults.stored, self.count, *self.defaults.arguments()

    def __repr__(self) -> str:
        return f"Partition(shape={self.shape}, count={self.count}, bits={self.bits}, defaults={self.defaults})"


torch.serialization.add_safe_globals([Partition, Zeros, Uniform, Normal, Stored])
