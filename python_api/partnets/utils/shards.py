"""Shards: the part of a tensor that this rank has, where torch has made it a DTensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from partkernels import Defaults, Partition, Zeros
from partkernels.formats import packed_map
from partnets.utils.modules import is_sharded


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory; other tensors as they are."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def version(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written into; 0 if it is an inference tensor.

    torch counts writes into a DTensor at the DTensor, and others at this rank's part.
    """
    if tensor.is_inference():
        return 0
    return tensor._version + (local(tensor)._version if is_sharded(tensor) else 0)


class Memory:
    """The addresses of tensors, to see whether any was replaced or moved.

    Args:
        tensors: tensors that may move, as by `.data`.
        held: the dicts and keys of tensors that may also be replaced; a value may be missing or None.
    """

    def __init__(self, tensors: Iterable[Tensor], held: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        self._held = list(held)
        self._values = self._read()
        self._tensors = [*tensors, *(value for value in self._values if value is not None)]
        self._are_sharded = any(map(is_sharded, self._tensors))
        self._addresses = self._read_addresses()

    def _read(self) -> list[Tensor | None]:
        return [where.get(name) for where, name in self._held]

    def _read_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (map(local, self._tensors) if self._are_sharded else self._tensors)]

    def is_current(self) -> bool:
        """Return whether nothing has changed since the construction."""
        return not any(map(operator.is_not, self._read(), self._values)) and self._read_addresses() == self._addresses


def whole(tensor: Tensor) -> Tensor:
    """Return all of a DTensor, gathered from all ranks, which must call it; other tensors as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the view of a whole tensor at the place of this rank's part of a DTensor; all of it for other tensors.

    Args:
        tensor: of the shape of `like`.
        like: a DTensor, or another tensor.

    Raises:
        ValueError: the DTensor is placed in a way that leaves no one block to each rank.
    """
    if not is_sharded(like):
        return tensor
    sizes = zip(_offset(like), local(like).shape, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in sizes)]


def _offset(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of the first entry of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if shape != tuple(local(tensor).shape) or len(offset) != len(shape):
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}, and this rank has the shape"
            f" {tuple(local(tensor).shape)}; pass Shard and Replicate placements."
        )
    return offset


def default_values(defaults: Defaults, like: Tensor) -> Tensor:
    """Return the default of each entry of this rank's part of a weight, in its dtype and on its device."""
    own = local(like)
    if own.shape[1:] == like.shape[1:] and own.numel() and defaults.stored is None:
        row = _offset(like)[0] if is_sharded(like) else 0
        return defaults.values(own.shape, own.dtype, own.device, row=row)
    return part(defaults.values(like.shape, own.dtype, own.device), like)


def redistributed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor placed as another one; other tensors as they are."""
    if not is_sharded(tensor) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor with this tensor as this rank's part if `like` is a DTensor; otherwise the tensor itself."""
    if not is_sharded(like):
        return tensor
    shape = {"shape": like.shape, "stride": like.stride()}
    return type(like).from_local(tensor, like.device_mesh, like.placements, run_check=False, **shape)


def shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of a tensor that all ranks have, with the placements of another one, in memory of its own."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    made = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    own = {"shape": made.shape, "stride": made.stride()}
    return DTensor.from_local(local(made).clone(), like.device_mesh, like.placements, run_check=False, **own)


def local_partition(map: Tensor, num_partitions: int, like: Tensor) -> Partition | None:
    """Return the partition of this rank's part of a weight, without defaults; None if the part is empty.

    Args:
        map: the map of the weight, which may be a DTensor.
        num_partitions: C.
        like: the weight, or a tensor like it.
    """
    if is_sharded(map) and is_sharded(like) and _placed(map) == _placed(like):
        own = local(map)
        shape = tuple(local(like).shape)
        return Partition._unchecked(shape, num_partitions, own, Zeros()) if own.numel() else None
    partition = Partition._unchecked(tuple(like.shape), num_partitions, whole(map), Zeros())
    if not is_sharded(like):
        return partition
    ids = part(partition.ids(), like)
    if not ids.numel():
        return None
    packed = packed_map.pack(packed_map.to_matrix((ids - 1).to(torch.uint8)), partition.bits)
    return Partition._unchecked(tuple(ids.shape), num_partitions, packed.to(local(like).device), Zeros())


def _placed(tensor: Tensor) -> tuple:
    return tensor.device_mesh, tuple(tensor.placements)
