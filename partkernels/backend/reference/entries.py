from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.formats.packed_map import unpack_weight


def gather_entries(tensor: Tensor, partition: int, map: Tensor, count: int) -> Tensor:
    """Return the entries of one partition, row by row."""
    return tensor[unpack_weight(map, tuple(tensor.shape), bits_for(count)) == partition - 1]


def scatter_entries(tensor: Tensor, values: Tensor, partition: int, map: Tensor, count: int) -> None:
    """Write values to the entries of one partition, in place: the inverse of gather_entries."""
    mask = unpack_weight(map, tuple(tensor.shape), bits_for(count)) == partition - 1
    check_values(values, int(mask.sum()))
    tensor[mask] = values


def check_values(values: Tensor, size: int) -> None:
    """Raise ValueError unless values has one value for each of a partition's entries."""
    if values.shape != (size,):
        raise ValueError(f"values have shape {list(values.shape)}; expected [{size}].")


def empty_entries(tensor: Tensor, *_: object) -> Tensor:
    """Return a vector of unknown size: the partition's number of entries depends on the map's data."""
    return tensor.new_empty(torch.library.get_ctx().new_dynamic_size())


def exchange_entries(tensors: list[Tensor], places: list[Tensor], values: list[Tensor], saved: list[Tensor]) -> None:
    """Save the entries of vectors at these places, unless there is no room, and replace them by values."""
    for tensor, at, others, mine in zip(tensors, places, values, saved, strict=True):
        if mine.numel():
            mine.copy_(tensor[at])
        tensor[at] = others


def combine_rows(
    vectors: list[Tensor], rows: list[Tensor], active: int, are_products: list[int], skip: int = -1
) -> None:
    """Set vectors to the sums, or products, of the first rows, without the one that is skipped."""
    for vector, each, is_product in zip(vectors, rows, are_products, strict=True):
        some = each[:active] if skip < 0 else torch.cat([each[:skip], each[skip + 1 : active]])
        vector.copy_(some.prod(0) if is_product else some.sum(0))
