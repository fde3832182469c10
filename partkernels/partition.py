"""Partition: which entries of a weight belong to which partition, and the defaults of inactive entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partkernels.arguments import (
    bits_for,
    check_count,
    check_number,
    check_range,
    check_seed,
    checked_shape,
    count_of_ids,
    matrix_shape,
    row_bytes,
    sizes,
)
from partkernels.backend import dispatch
from partkernels.channels import Channels, Ends
from partkernels.defaults import Defaults, Normal, Stored, Uniform, Zeros
from partkernels.formats import packed_map
from partkernels.formats.philox import GROUP

# Bytes of a map that are checked at a time.
CHUNK_BYTES = 1 << 18
# Limit of row and column numbers: counters of draws and kernels' indices have 32 bits for each.
PLACE_LIMIT = 1 << 31


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """C disjoint partitions of a weight: a packed map of 1, 2, 4 or 8 bits per weight, and default values.

    Create one with Partition.random or Partition.from_ids. Partitions are numbered 1..C, as in the paper
    (Section 3; Appendix C for the random scheme).

    Attributes:
        shape: the weight's shape, [rows, ...].
        num_partitions: C, 1 to 256.
        map: uint8 [rows, row_bytes], format 1 (see packed_map).
        defaults: Zeros, Uniform, Normal or Stored.
        row, col: for a shard, the position of its first entry in the matrix of the full weight (see rows and columns),
            so that it draws the full weight's defaults; otherwise 0.

    Raises:
        ValueError: the map's shape, dtype, padding or ids do not fit shape and num_partitions, or the defaults cannot
            be drawn starting at (row, col).

    Example:
        >>> p = Partition.random((4, 4), (0.5, 0.25, 0.25), seed=0)
        >>> p.num_partitions, p.bits, p.sizes()
        (3, 2, [8, 4, 4])
    """

    shape: tuple[int, ...]
    num_partitions: int
    map: Tensor
    defaults: Defaults = field(default_factory=Zeros)
    row: int = 0
    col: int = 0

    @classmethod
    def random(
        cls, shape: Sequence[int], proportions: Sequence[float], *, seed: int, defaults: Defaults | None = None
    ) -> Partition:
        """Assign a fixed proportion of the weight to each partition at random (Appendix C).

        The map is a pure function of (shape, proportions, seed), identical on every device and backend.

        Args:
            shape: the weight's shape, [rows, ...].
            proportions: C numbers that sum to 1; partition sizes are rounded by largest remainder.
            seed: an int in [0, 2**63).
            defaults: values of inactive entries; Zeros() if None.

        Example:
            >>> Partition.random((2, 8), (0.75, 0.25), seed=3).ids().unique().tolist()
            [1, 2]
        """
        shape = checked_shape(shape)
        check_seed("seed", seed)
        rows, cols = matrix_shape(shape)
        counts = sizes(rows * cols, proportions)
        packed = dispatch.host().random_map(rows, cols, counts, seed)
        return cls._unchecked(shape, len(counts), packed, Zeros() if defaults is None else defaults)

    @classmethod
    def from_ids(cls, ids: Tensor, *, num_partitions: int | None = None, defaults: Defaults | None = None) -> Partition:
        """Return the partition in which entry e belongs to partition ids[e].

        Args:
            ids: uint8, the weight's shape, values 1..C. uint8 limits C to 255 here.
            num_partitions: C; the largest id if None.
            defaults: values of inactive entries; Zeros() if None.

        Example:
            >>> Partition.from_ids(torch.tensor([[1, 2], [2, 1]], dtype=torch.uint8)).sizes()
            [2, 2]
        """
        if ids.dtype != torch.uint8:
            raise ValueError(f"ids are {ids.dtype}; pass torch.uint8 with values 1..C.")
        shape = checked_shape(ids.shape)
        num_partitions = count_of_ids(int(ids.min()), int(ids.max()), num_partitions)
        packed = packed_map.pack(packed_map.to_matrix(ids - 1), bits_for(num_partitions))
        return cls(shape, num_partitions, packed, Zeros() if defaults is None else defaults)

    @staticmethod
    def nested(shape: Sequence[int], rows: Ends, cols: Ends | None = None) -> NestedPartition:
        """Make a NestedPartition, which needs no map: subnetwork k is weight[:rows[k-1], :cols[k-1]].

        Args:
            shape: the weight's shape, [rows, columns, ...].
            rows, cols: n_1..n_C and m_1..m_C, ascending to shape[0] and shape[1]; or one such sequence per segment,
                or Channels. If cols is None, all columns belong to partition 1, as for a vector.

        Example:
            >>> Partition.nested((3, 4), rows=(2, 3), cols=(2, 4)).ids().tolist()
            [[1, 1, 2, 2], [1, 1, 2, 2], [2, 2, 2, 2]]
        """
        return NestedPartition(shape, rows, cols)

    @classmethod
    def _unchecked(cls, shape, num_partitions, packed, defaults, row=0, col=0) -> Partition:
        """Return a partition of parts that are known to fit; checking a map would read all of it."""
        self = object.__new__(cls)
        parts = {
            "shape": shape,
            "num_partitions": num_partitions,
            "map": packed,
            "defaults": defaults,
            "row": row,
            "col": col,
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        self._check_defaults()
        return self

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        check_count(self.num_partitions)
        self._check_map()
        self._check_defaults()

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()  # a damaged file must not load as a partition

    def _check_map(self) -> None:
        rows, cols = matrix_shape(self.shape)
        expected = (rows, row_bytes(cols, self.bits))
        if self.map.dtype != torch.uint8 or tuple(self.map.shape) != expected or not self.map.is_contiguous():
            raise ValueError(
                f"the map is {self.map.dtype} {tuple(self.map.shape)}; a weight of shape {self.shape} in"
                f" {self.num_partitions} partitions needs a contiguous torch.uint8 map of shape {expected}:"
                " build it with Partition.from_ids."
            )
        if self.map.is_meta:
            return
        chunk = max(1, CHUNK_BYTES // expected[1])
        for start in range(0, rows, chunk):
            ids = packed_map.unpack(self.map[start : start + chunk], expected[1] * 8 // self.bits, self.bits)
            if int(ids.max()) >= self.num_partitions or ids[:, cols:].any():
                raise ValueError(
                    f"the map holds an id above {self.num_partitions}, or padding that is not 0, in rows"
                    f" {start}..{min(start + chunk, rows) - 1}; build it with Partition.from_ids."
                )

    def _check_defaults(self) -> None:
        if not isinstance(self.defaults, Defaults):
            raise TypeError(f"defaults={self.defaults!r}; pass Zeros(), Uniform(...), Normal(...) or Stored(...).")
        if not all(isinstance(place, int) and 0 <= place < PLACE_LIMIT for place in (self.row, self.col)):
            raise ValueError(
                f"row={self.row!r}, col={self.col!r}; pass the position of a shard's first entry in the full weight,"
                " ints in [0, 2**31)."
            )
        if self.col % GROUP and isinstance(self.defaults, Uniform | Normal):
            raise ValueError(
                f"the columns begin at {self.col} of the full weight, but {self.defaults} is drawn {GROUP} columns at"
                f" a time; begin at a multiple of {GROUP}, or keep the defaults with Stored."
            )
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
        """Bits per weight: the smallest of 1, 2, 4, 8 with 2**bits >= num_partitions."""
        return bits_for(self.num_partitions)

    @property
    def device(self) -> torch.device:
        """The device of the map."""
        return self.map.device

    @property
    def is_meta(self) -> bool:
        """True if the map is on the meta device and has no values."""
        return self.map.is_meta

    def ids(self) -> Tensor:
        """Return each entry's partition, 1..C: uint8 (int16 if C is 256), the weight's shape, contiguous."""
        ids = self._unpacked()
        return (ids.short() if self.num_partitions > 255 else ids) + 1

    def mask(self, partition: int) -> Tensor:
        """Return True at the entries of this partition, 1..C: bool, the weight's shape, contiguous."""
        check_number("partition", partition, self)
        return self._unpacked() == partition - 1

    def _unpacked(self) -> Tensor:
        # Contiguous like weights: in the map's memory order, torch.where would make convolution weights channels_last.
        return packed_map.unpack_weight(self.map, self.shape, self.bits).contiguous()

    def sizes(self) -> list[int]:
        """Return the number of entries of each partition."""
        return torch.bincount(self.ids().flatten().int() - 1, minlength=self.num_partitions).tolist()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Partition:
        """Return this partition with its tensors on a device, and stored defaults in a dtype; None keeps either.

        The map remains uint8. Drawn defaults have no tensors, so a dtype does not change them.

        Example:
            >>> Partition.random((2, 8), (0.5, 0.5), seed=0).to(dtype=torch.float16).map.dtype
            torch.uint8
        """
        return self.map_tensors(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Partition:
        """Return this partition with each tensor replaced by function(tensor), as nn.Module._apply does."""
        defaults = self.defaults.map_tensors(function)
        return self._unchecked(self.shape, self.num_partitions, function(self.map), defaults, self.row, self.col)

    def rows(self, start: int, stop: int) -> Partition:
        """Return the shard for weight[start:stop]: its entries keep their partitions and defaults.

        Args:
            start, stop: 0 <= start < stop <= shape[0]. The shard's map and stored defaults are views.

        Raises:
            ValueError: start or stop is out of range.

        Example:
            >>> p = Partition.random((4, 8), (0.5, 0.5), seed=0, defaults=Uniform(0.1, seed=1))
            >>> weight = p.defaults.values(p.shape)
            >>> shard = p.rows(1, 3)
            >>> torch.equal(shard.defaults.values(shard.shape, row=shard.row, col=shard.col), weight[1:3])
            True
        """
        check_range("rows", start, stop, self.shape[0])
        defaults = self.defaults.map_tensors(lambda stored: stored[start:stop])
        shape = stop - start, *self.shape[1:]
        return self._unchecked(shape, self.num_partitions, self.map[start:stop], defaults, self.row + start, self.col)

    def columns(self, start: int, stop: int) -> Partition:
        """Return the shard for weight[:, start:stop]: its entries keep their partitions and defaults.

        Works for matrices and for 1x1 convolutions, with input channels as columns. With larger kernels, a range
        of input channels is not contiguous in the map.

        Args:
            start, stop: 0 <= start < stop <= shape[1]. start must be a multiple of 64 if defaults are drawn, otherwise
                of 8 / bits, the entries in a byte of the map. Stored defaults are a view.

        Raises:
            ValueError: start or stop is out of range, start is not such a multiple, or the kernel is larger than 1x1.

        Example:
            >>> Partition.random((2, 100), (0.5, 0.5), seed=0).columns(64, 100)
            Partition(shape=(2, 36), num_partitions=2, bits=1, defaults=Zeros(), row=0, col=64)
        """
        if len(self.shape) < 2 or math.prod(self.shape[2:]) > 1:
            raise ValueError(
                f"a weight of shape {self.shape} cannot be cut by columns; pass [rows, columns] or a kernel of 1x1; cut"
                " it by rows(start, stop)."
            )
        check_range("columns", start, stop, self.shape[1])
        per_byte = 8 // self.bits
        if start % per_byte:
            raise ValueError(
                f"columns({start}, {stop}) would begin inside a byte of the map; begin at a multiple of {per_byte}."
            )
        defaults = self.defaults.map_tensors(lambda stored: stored[:, start:stop])
        shape = self.shape[0], stop - start, *self.shape[2:]
        map = packed_map.columns(self.map, start, stop, self.bits)
        return self._unchecked(shape, self.num_partitions, map, defaults, self.row, self.col + start)

    def flat(self) -> tuple[Any, ...]:
        """Return the operator arguments that describe this partition, in the order of registration.PARTITION."""
        return self.map, self.defaults.stored, self.num_partitions, *self.defaults.arguments(), self.row, self.col

    def __repr__(self) -> str:
        place = f", row={self.row}, col={self.col}" if self.row or self.col else ""
        facts = f"shape={self.shape}, num_partitions={self.num_partitions}, bits={self.bits}"
        return f"Partition({facts}, defaults={self.defaults}{place})"


class NestedPartition(Partition):
    """C disjoint partitions of a weight; subnetwork k is its upper left block [:n_k, :m_k], and 0 elsewhere.

    Entry (r, c), with c along dimension 1, belongs to the later one of its row's and its column's partitions. There is
    no map: products are PyTorch's, on views of the active block, on every device. If rows or columns have several
    segments, each in order, there are several blocks. Create one with Partition.nested.

    Attributes:
        shape: the weight's shape, [rows, columns, ...], or [rows] for a vector.
        num_partitions: C, 1 to 256.
        row_channels, col_channels: Channels with the partitions of rows and columns; a vector has one column.
        defaults: Zeros().
        map: None.
        row, col: for a shard, the position of its first entry in the full weight.

    Raises:
        ValueError: the channels do not match the numbers of rows and columns, or differ in their number of partitions.

    Example:
        >>> p = Partition.nested((4, 6), rows=(2, 3, 4), cols=(4, 5, 6))
        >>> p.sizes(), p.active_blocks(2)
        ([8, 7, 9], [(slice(0, 3, None), slice(0, 5, None))])
    """

    row_channels: Channels
    col_channels: Channels

    def __init__(self, shape: Sequence[int], rows: Ends, cols: Ends | None = None) -> None:
        shape, rows = checked_shape(shape), Channels.given(rows)
        cols = Channels.whole(math.prod(shape[1:2]), rows.num_partitions) if cols is None else Channels.given(cols)
        self._assign(shape, rows, cols, 0, 0)

    def _assign(self, shape, row_channels: Channels, col_channels: Channels, row: int, col: int) -> NestedPartition:
        parts = {
            "shape": tuple(shape),
            "num_partitions": row_channels.num_partitions,
            "map": None,
            "defaults": Zeros(),
            "row": row,
        }
        for name, value in {**parts, "col": col, "row_channels": row_channels, "col_channels": col_channels}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()
        return self

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        check_count(self.num_partitions)
        self._check_defaults()
        sizes = self.shape[0], math.prod(self.shape[1:2])
        for name, channels, size in (("rows", self.row_channels, sizes[0]), ("cols", self.col_channels, sizes[1])):
            if channels.num_partitions != self.num_partitions or channels.size != size:
                raise ValueError(
                    f"{name}={_ends(channels)} does not fit a weight of shape {self.shape} in {self.num_partitions}"
                    f" partitions; pass {self.num_partitions} ints that ascend from 0 or more to {size}."
                )

    @property
    def device(self) -> None:
        """None: it has no tensors and works with weights on every device."""
        return None

    @property
    def is_meta(self) -> bool:
        return False

    def active_blocks(self, active: int) -> list[tuple[slice, ...]]:
        """Return the active blocks, of partitions 1..active: [:n_active, :m_active], or several such blocks."""
        return self._products(self.row_channels.active_blocks(active), self.col_channels.active_blocks(active))

    def strips(self, partition: int) -> list[tuple[slice, ...]]:
        """Return the blocks of one partition: its rows up to its last column, and its columns above these rows.

        Returns:
            The index of each nonempty block in dimensions 0 and 1.
        """
        rows, cols = self.row_channels, self.col_channels
        beside = self._products(rows.of(partition), cols.active_blocks(partition))
        return beside + self._products(rows.active_blocks(partition - 1) if partition > 1 else (), cols.of(partition))

    def _products(self, rows: Sequence[slice], cols: Sequence[slice]) -> list[tuple[slice, ...]]:
        return [block[: len(self.shape)] for block in itertools.product(rows, cols)]

    def owners(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the partition of each row and of each column, 1..C: int64."""
        return self.row_channels.owners(device), self.col_channels.owners(device)

    def _unpacked(self) -> Tensor:
        rows, cols = self.owners()
        ids = (torch.maximum(rows[:, None], cols) - 1).to(torch.uint8)
        return ids.view(*self.shape[:2], *[1] * len(self.shape[2:])).expand(self.shape).contiguous()

    def sizes(self) -> list[int]:
        numbers = [(self.row_channels.number(k), self.col_channels.number(k)) for k in range(self.num_partitions + 1)]
        areas = [n * m * math.prod(self.shape[2:]) for n, m in numbers]
        return [area - before for before, area in itertools.pairwise(areas)]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> NestedPartition:
        return self

    def explicit(self, device: torch.device | str = "cpu") -> Partition:
        """Return the same partition with a map; this defines the nested partition."""
        return Partition.from_ids(self.ids().to(device), num_partitions=self.num_partitions)

    def rows(self, start: int, stop: int) -> NestedPartition:
        check_range("rows", start, stop, self.shape[0])
        shape = stop - start, *self.shape[1:]
        return self._part(shape, self.row_channels.shard(start, stop), self.col_channels, self.row + start, self.col)

    def columns(self, start: int, stop: int) -> NestedPartition:
        if len(self.shape) < 2:
            raise ValueError(f"a weight of shape {self.shape} has no columns; cut it by rows(start, stop).")
        check_range("columns", start, stop, self.shape[1])
        shape = self.shape[0], stop - start, *self.shape[2:]
        return self._part(shape, self.row_channels, self.col_channels.shard(start, stop), self.row, self.col + start)

    def _part(self, *parts) -> NestedPartition:
        return object.__new__(NestedPartition)._assign(*parts)

    def flat(self) -> tuple[Any, ...]:
        raise TypeError("a nested partition has no map; pass it to functions of partkernels, or pass its explicit().")

    def __repr__(self) -> str:
        place = f", row={self.row}, col={self.col}" if self.row or self.col else ""
        rows, cols = _ends(self.row_channels), _ends(self.col_channels)
        return f"NestedPartition(shape={self.shape}, rows={rows}, cols={cols}{place})"


def _ends(channels: Channels) -> tuple:
    """Return the numbers of a single segment as a flat tuple, otherwise those of all segments."""
    return channels.segments[0] if len(channels.segments) == 1 else channels.segments


torch.serialization.add_safe_globals([Partition, NestedPartition, Channels, Zeros, Uniform, Normal, Stored])
