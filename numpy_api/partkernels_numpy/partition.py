"""Partition: the partition of each entry of a weight, and the defaults that replace inactive entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.arguments import (
    bits_for,
    check_count,
    check_number,
    check_seed,
    count_of_ids,
    matrix_shape,
    row_bytes,
    sizes,
)
from partkernels_numpy.arrays import plain, weight_shape
from partkernels_numpy.defaults import Defaults, Zeros
from partkernels_numpy.packed_map import pack, unpack, unpack_weight

# Bytes of a map that are checked at once.
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, eq=False)
class Partition:
    """C disjoint partitions of a weight, as a packed map with 1, 2, 4 or 8 bits per entry, and the weight's defaults.

    Make one with Partition.random or Partition.from_ids, or from the `shape`, `num_partitions` and `map.numpy()` of a
    partkernels.Partition. Partitions are numbered 1..C, as in the paper (Section 3; Appendix C for the random scheme).

    Rows of the map are padded to 16 bytes. Each entry of a vector is a row, so its map is larger than the vector.

    Attributes:
        shape: the weight's shape, [rows, ...], of 1 to 4 dimensions.
        num_partitions: C, 1 to 256.
        map: uint8 [rows, row_bytes], contiguous, format 1. Not copied.
        defaults: Zeros, Uniform, Normal or Stored.

    Raises:
        ValueError: the map's shape, dtype, padding or ids do not fit shape and num_partitions.

    Example:
        >>> p = Partition.random((4, 4), (0.5, 0.25, 0.25), seed=0)
        >>> p.num_partitions, p.bits, p.sizes()
        (3, 2, [8, 4, 4])
    """

    shape: tuple[int, ...]
    num_partitions: int
    map: np.ndarray = field(repr=False)
    defaults: Defaults = field(default_factory=Zeros)

    @classmethod
    def random(
        cls, shape: Sequence[int], proportions: Sequence[float], *, seed: int, defaults: Defaults | None = None
    ) -> Partition:
        """Assign a fixed proportion of the entries to each partition, at random (Appendix C).

        The map is a pure function of (shape, proportions, seed), the same as in partkernels.

        Args:
            shape: the weight's shape, [rows, ...].
            proportions: C numbers that sum to 1; sizes are rounded by the largest remainder method.
            seed: an int in [0, 2**63).
            defaults: the values of inactive entries; Zeros() if None.

        Example:
            >>> np.unique(Partition.random((2, 8), (0.75, 0.25), seed=3).ids()).tolist()
            [1, 2]
        """
        shape = weight_shape(shape)
        seed = plain(seed)
        check_seed("seed", seed)
        rows, cols = matrix_shape(shape)
        counts = sizes(rows * cols, proportions)
        packed = np.zeros((rows, row_bytes(cols, bits_for(len(counts)))), np.uint8)
        _library.random_map(packed, cols, counts, seed)
        return cls._unchecked(shape, len(counts), packed, defaults)

    @classmethod
    def from_ids(
        cls, ids: np.ndarray, *, num_partitions: int | None = None, defaults: Defaults | None = None
    ) -> Partition:
        """Assign entry e to partition ids[e].

        Args:
            ids: uint8, the weight's shape, values 1..C (255 at most, since 256 does not fit into uint8).
            num_partitions: C; the largest id if None.
            defaults: the values of inactive entries; Zeros() if None.

        Example:
            >>> Partition.from_ids(np.array([[1, 2], [2, 1]], np.uint8)).sizes()
            [2, 2]
        """
        if not isinstance(ids, np.ndarray) or ids.dtype != np.uint8:
            given = getattr(ids, "dtype", type(ids).__name__)
            raise ValueError(f"ids are {given}; pass an array of numpy.uint8 with values 1..C.")
        shape = weight_shape(ids.shape)
        num_partitions = count_of_ids(int(ids.min()), int(ids.max()), plain(num_partitions))
        return cls._unchecked(shape, num_partitions, pack(ids - 1, bits_for(num_partitions)), defaults)

    @classmethod
    def _unchecked(
        cls, shape: tuple[int, ...], num_partitions: int, packed: np.ndarray, defaults: Defaults | None
    ) -> Partition:
        """Create a partition with a valid map, without the check, which reads the whole map."""
        self = object.__new__(cls)
        self._assign(shape, num_partitions, packed, Zeros() if defaults is None else defaults)
        return self

    def _assign(self, shape: tuple[int, ...], num_partitions: int, packed: np.ndarray, defaults: Defaults) -> None:
        if not isinstance(defaults, Defaults):
            raise TypeError(f"defaults={defaults!r}; pass Zeros(), Uniform(...), Normal(...) or Stored(...).")
        stored = defaults.stored
        if stored is not None and stored.shape != shape:
            raise ValueError(f"the stored defaults have shape {stored.shape}; pass Stored(array) of shape {shape}.")
        native = _library.Partition(packed, num_partitions, *defaults.arguments(), stored)
        parts = {
            "shape": shape,
            "num_partitions": num_partitions,
            "map": packed,
            "defaults": defaults,
            "native": native,
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        shape, num_partitions = weight_shape(self.shape), plain(self.num_partitions)
        check_count(num_partitions)
        rows, cols = matrix_shape(shape)
        bits = bits_for(num_partitions)
        expected = rows, row_bytes(cols, bits)
        fits = isinstance(self.map, np.ndarray) and self.map.dtype == np.uint8 and self.map.shape == expected
        if not fits or not self.map.flags.c_contiguous:
            raise ValueError(
                f"the map does not fit a weight of shape {shape} in {num_partitions} partitions; pass a contiguous"
                f" array of numpy.uint8, of shape {expected}, or use Partition.from_ids."
            )
        chunk = max(1, CHUNK_BYTES // expected[1])
        for start in range(0, rows, chunk):
            ids = unpack(self.map[start : start + chunk], bits)
            if ids.max() >= num_partitions or ids[:, cols:].any():
                raise ValueError(
                    f"the map has an id above {num_partitions}, or padding that is not 0; make it with"
                    " Partition.from_ids."
                )
        self._assign(shape, num_partitions, self.map, self.defaults)

    @property
    def bits(self) -> int:
        """Bits per entry: the smallest of 1, 2, 4, 8 with 2**bits >= num_partitions."""
        return bits_for(self.num_partitions)

    def ids(self) -> np.ndarray:
        """Return the partition of each entry, 1..C: uint8, in the weight's shape (int16 if C is 256)."""
        ids = unpack_weight(self.map, self.shape, self.bits)
        return (ids.astype(np.int16) if self.num_partitions > 255 else ids) + 1

    def mask(self, partition: int) -> np.ndarray:
        """Return a bool array in the weight's shape, True at the entries of this partition, 1..C."""
        check_number("partition", plain(partition), self)
        return self.ids() == partition

    def sizes(self) -> list[int]:
        """Return the number of entries of each partition."""
        return np.bincount(self.ids().ravel(), minlength=self.num_partitions + 1)[1:].tolist()

    def __reduce__(self) -> tuple[type[Partition], tuple[Any, ...]]:
        return Partition, (self.shape, self.num_partitions, self.map, self.defaults)
