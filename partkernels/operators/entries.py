"""gather_entries and scatter_entries: the entries of one partition as a vector, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from partkernels.backend import dispatch
from partkernels.backend.reference.entries import empty_entries
from partkernels.operators.checks import check_entries_apart, check_weight
from partkernels.operators.registration import OWNERS, define, define_for_libraries, define_in_place
from partkernels.partition import NestedPartition, Partition

_gather = define("gather_entries", f"Tensor tensor, int partition, {OWNERS}", empty_entries)
_scatter = define_in_place("scatter_entries", f"Tensor(a!) tensor, Tensor values, int partition, {OWNERS}")


_exchange = define_in_place(
    "exchange_entries", "Tensor(a!)[] tensors, Tensor[] places, Tensor[] values, Tensor(b!)[] saved"
)
_combine = define_in_place(
    "combine_rows", "Tensor(a!)[] vectors, Tensor[] rows, int active, int[] are_products, int skip"
)
define_for_libraries("exchange_by_tables(Tensor replacements, Tensor combinations, int active, int skip) -> ()")


def exchange_entries(
    tensors: list[Tensor], places: list[Tensor], values: list[Tensor], saved: list[Tensor | None]
) -> None:
    """Save entries, and replace them by values, in place.

    Args:
        tensors: contiguous vectors [n] of one dtype, on one device.
        places: for each an int32 or int64 vector of distinct places in 0..n - 1, fastest if they ascend.
        values: for each a contiguous vector like places, of the tensors' dtype.
        saved: for each where the entries are saved: a vector like values, other than it, or None to lose them.

    Raises:
        RuntimeError: the lists or the tensors in them do not fit each other.

    Example:
        >>> weight, saved = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1)
        >>> exchange_entries([weight], [torch.tensor([1])], [torch.tensor([9.0])], [saved])
        >>> weight, saved
        (tensor([1., 9., 3.]), tensor([2.]))
    """
    if tensors:
        _exchange(tensors, places, values, _saved(saved, values), dispatch.requested())


def _saved(saved: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
    """Return an empty tensor for each None."""
    return [value[:0] if one is None else one for one, value in zip(saved, values, strict=True)]


def combine_rows(
    vectors: list[Tensor], rows: list[Tensor], active: int, are_products: list[bool], skip: int | None = None
) -> None:
    """Set vectors to b_1 + ... + b_k, or to s_1 * ... * s_k (Appendix I.2), in place.

    Args:
        vectors: contiguous, of one dtype, on one device.
        rows: for each a contiguous [C, ...] of the vector's shape.
        active: k, 1..C.
        are_products: for each, whether the rows are multiplied.
        skip: a partition whose row is left out, 1..C; None for none.

    Raises:
        RuntimeError: the lists or the tensors in them do not fit each other.

    Example:
        >>> bias = torch.zeros(2)
        >>> combine_rows([bias], [torch.tensor([[1.0, 2.0], [10.0, 20.0]])], 2, [False])
        >>> bias
        tensor([11., 22.])
    """
    if vectors:
        _combine(vectors, rows, active, [int(one) for one in are_products], (skip or 0) - 1, dispatch.requested())


class Exchange:
    """exchange_entries and combine_rows of the same tensors, for many calls, by a table of their addresses.

    Construct it from the tensors, and call it with the numbers of subnetworks. A call saves and replaces entries of
    `tensors`, and sets `vectors` to sums or products of `rows`, in place. These three may move in memory; `places`,
    `values` and `saved` must keep theirs.

    Args:
        tensors, places, values, saved: see exchange_entries; places are int32 on a GPU. A tensor may be listed several
            times, one after the other, with places that are all distinct.
        vectors, rows, are_products: see combine_rows. All tensors are of one dtype, on one device.

    Raises:
        RuntimeError: tensors do not fit each other, at the construction or in a call; nothing has changed then.

    Example:
        >>> weight, bias, saved = torch.tensor([1.0, 2.0]), torch.zeros(1), torch.zeros(1)
        >>> replace = Exchange(
        ...     tensors=[weight], places=[torch.tensor([1])], values=[torch.tensor([9.0])], saved=[saved],
        ...     vectors=[bias], rows=[torch.tensor([[1.0], [10.0]])], are_products=[False],
        ... )
        >>> replace(active=2)
        >>> weight, saved, bias
        (tensor([1., 9.]), tensor([2.]), tensor([11.]))
    """

    def __init__(
        self,
        tensors: Sequence[Tensor] = (),
        places: Sequence[Tensor] = (),
        values: Sequence[Tensor] = (),
        saved: Sequence[Tensor | None] = (),
        vectors: Sequence[Tensor] = (),
        rows: Sequence[Tensor] = (),
        are_products: Sequence[bool] = (),
    ) -> None:
        self.entries = list(tensors), list(places), list(values), _saved(saved, values)
        self.rows = list(vectors), list(rows), [int(one) for one in are_products]
        self.written = [tensor for tensor in (*tensors, *vectors) if not tensor.is_inference()]
        self._movable = [*tensors, *vectors, *rows]
        self._choose(dispatch.requested())

    def _choose(self, requested: str) -> None:
        self._requested, self._run, self._addresses = requested, None, None
        if self._movable:
            self._check()
            like = self._movable[0]
            self._operators = dispatch.choose(requested, like.device, like.dtype)
            if prepare := getattr(self._operators, "prepared", None):
                self._run = prepare(*self.entries, *self.rows)
        self._addresses = [tensor.data_ptr() for tensor in self._movable]

    def _check(self) -> None:
        """Raise RuntimeError unless a table of these tensors describes memory that is theirs."""
        like = self._movable[0]
        for tensor, at, others, mine in zip(*self.entries, strict=True):
            each = (tensor, at, others, mine)
            fits = at.dtype in (torch.int32, torch.int64) and len(at) == len(others) and len(mine) in (0, len(at))
            if not fits or any(one.dim() != 1 for one in each) or not _alike(like, (tensor, others, mine), each):
                raise RuntimeError(
                    "entries do not fit: expected contiguous vectors of one dtype, on one device, and a value for each"
                    " place."
                )
        for vector, each in zip(*self.rows[:2], strict=True):
            if each.shape[1:] != vector.shape or not _alike(like, (vector, each), (vector, each)):
                raise RuntimeError(
                    f"a vector {list(vector.shape)} of {vector.dtype} does not fit its rows {list(each.shape)} of"
                    f" {each.dtype}: expected contiguous rows [C, ...] of its shape and dtype, on its device."
                )

    def __call__(self, active: int, skip: int | None = None) -> None:
        """Save and replace the entries, and combine the first `active` rows without that of partition `skip`."""
        requested = dispatch.requested()
        if requested != self._requested or [tensor.data_ptr() for tensor in self._movable] != self._addresses:
            self._choose(requested)
        if self._run is not None:
            self._run(active, (skip or 0) - 1)
        elif self.written:
            if self.entries[0]:
                self._operators.exchange_entries(*self.entries)
            if self.rows[0]:
                vectors, rows, are_products = self.rows
                self._operators.combine_rows(vectors, rows, active, are_products, (skip or 0) - 1)
        increment_version(self.written)


def _alike(like: Tensor, of_dtype: Sequence[Tensor], each: Sequence[Tensor]) -> bool:
    """Return whether tensors are contiguous and on a tensor's device, and some of them have its dtype."""
    return all(one.dtype == like.dtype for one in of_dtype) and all(
        one.is_contiguous() and one.device == like.device for one in each
    )


@torch.no_grad()
def gather_entries(tensor: Tensor, partition: Partition, number: int) -> Tensor:
    """Return tensor[partition.mask(number)], the entries of one partition, row by row, without a gradient.

    Args:
        tensor: floating point, of the partition's shape, such as a weight, its gradient or a moment; any strides.
        partition: which entries belong to which partition.
        number: the partition to read, 1..C.

    Returns:
        A new vector of partition.sizes()[number - 1] entries.

    Raises:
        ValueError: number is out of range, or the partition does not fit the tensor.
        TypeError: the tensor is not floating point.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2], [2, 1]], dtype=torch.uint8))
        >>> gather_entries(torch.tensor([[3.0, 4.0], [5.0, 6.0]]), p, 2)
        tensor([4., 5.])
    """
    _check(tensor, partition, number)
    dtype, tensor = tensor.dtype, _moving(tensor)
    if isinstance(partition, NestedPartition):
        bands = [torch.cat(band, 1) if len(band) > 1 else band[0] for band in _bands(tensor, partition, number)]
        return torch.cat([tensor.new_empty(0), *(band.flatten() for band in bands)]).view(dtype)
    return _gather(tensor, number, partition.map, partition.num_partitions, dispatch.requested()).view(dtype)


@torch.no_grad()
def scatter_entries(tensor: Tensor, partition: Partition, number: int, values: Tensor) -> None:
    """Set tensor[partition.mask(number)] = values in place: the inverse of gather_entries.

    All other entries are left unchanged.

    Args:
        tensor, partition, number: as in gather_entries.
        values: [partition.sizes()[number - 1]], the tensor's dtype and device.

    Raises:
        ValueError, RuntimeError: as in gather_entries; or the values do not fit, or entries of the tensor share memory.
            The tensor is unchanged.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2], [2, 1]], dtype=torch.uint8))
        >>> weight = torch.zeros(2, 2)
        >>> scatter_entries(weight, p, 2, torch.tensor([4.0, 5.0]))
        >>> weight
        tensor([[0., 4.],
                [5., 0.]])
    """
    _check(tensor, partition, number)
    check_entries_apart("tensor", tensor)
    if values.dim() != 1 or values.dtype != tensor.dtype or values.device != tensor.device:
        raise ValueError(
            f"values are {list(values.shape)} of {values.dtype} on {values.device}; pass a vector of {tensor.dtype} on"
            f" {tensor.device}, such as gather_entries returns."
        )
    tensor, values = _moving(tensor), _moving(values)
    if not isinstance(partition, NestedPartition):
        _scatter(tensor, values, number, partition.map, partition.num_partitions, dispatch.requested())
        return
    bands = _bands(tensor, partition, number)
    lengths = [sum(block.numel() for block in band) for band in bands]
    if len(values) != sum(lengths):
        raise ValueError(f"there are {len(values)} values; partition {number} has {sum(lengths)} entries.")
    for band, part in zip(bands, values.split(lengths), strict=True):
        widths = [block.shape[1] if block.dim() > 1 else 1 for block in band]
        pieces = part.view(len(band[0]), sum(widths), *tensor.shape[2:]).split(widths, 1)
        for block, piece in zip(band, pieces, strict=True):
            block.copy_(piece.view(block.shape))


def _moving(tensor: Tensor) -> Tensor:
    """Return a tensor of the same bits that all backends serve: float16, which some do not, as bfloat16."""
    tensor = tensor.detach()
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.float16 else tensor


def _check(tensor: Tensor, partition: Partition, number: int) -> None:
    check_weight(tensor, partition, with_defaults=False)
    if type(number) is not int or not 1 <= number <= partition.num_partitions:
        raise ValueError(
            f"number={number!r}, but there are {partition.num_partitions} partitions; pass an int in 1..C."
        )


def _bands(tensor: Tensor, partition: NestedPartition, number: int) -> list[list[Tensor]]:
    """Return the blocks of a partition, grouped by rows, from top to bottom and from left to right."""
    bands = defaultdict(list)
    for strip in partition.strips(number):
        bands[strip[0].start].append((strip[1:], tensor[strip]))
    columns = [sorted(bands[top], key=lambda block: [cols.start for cols in block[0]]) for top in sorted(bands)]
    return [[block for _, block in band] for band in columns]
