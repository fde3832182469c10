"""Shards: what a rank holds of a partition, where a parameter is a DTensor of which other ranks hold the rest."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from partkernels import NestedPartition, Partition
from partnets.nn.partitioned import Partitioned
from partnets.utils.modules import is_sharded


def local_entries(
    layer: Partitioned, name: str, tensors: list[Tensor], update: int
) -> tuple[list[Tensor], Partition | None] | None:
    """layer.entries, of what is local to this rank of the tensors; see there.

    What the partition owns may lie on other ranks altogether: then the tensors are empty, and the step still counts.

    Raises:
        ValueError: a DTensor is placed in a way of which the map has no shard.

    Example:
        >>> import partnets
        >>> layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> local_entries(layer, "bias", [layer.bias], update=2)
        ([tensor([0., 0., 0.], grad_fn=<SelectBackward0>)], None)
    """
    if not is_sharded(tensors[0]):
        return layer.entries(name, tensors, update)
    whole = torch.empty(tensors[0].shape, device="meta")
    found = layer.entries(name, [whole], update)
    if found is None:
        return None
    (view,), partition = found
    local = [tensor.to_local() for tensor in tensors]
    if not local[0].numel():
        return local, None
    if partition is not None:
        seen = layer.seen_by_partition(name, tensors[0])
        return [layer.seen_by_partition(name, tensor) for tensor in local], _owners(partition, seen)
    if view.dim() == whole.dim():
        return local, None
    start, stop = local_range(tensors[0], 0)
    row = view.storage_offset() // whole.stride(0)
    return [tensor[row - start] if start <= row < stop else tensor[:0] for tensor in local], None


def _owners(partition: Partition, weight: Tensor) -> Partition:
    """As local_partition, and a matrix cut at any column: who owns what, without the defaults."""
    rows, cols = (local_range(weight, dim) for dim in (0, min(1, weight.dim() - 1)))
    if isinstance(partition, NestedPartition) or weight.dim() != 2 or cols == (0, weight.shape[1]):
        return local_partition(partition, weight)
    shards = _shards.setdefault(partition, {})
    if (rows, cols) not in shards:
        shards[rows, cols] = Partition.from_ids(partition.rows(*rows).ids()[:, slice(*cols)], count=partition.count)
    return shards[rows, cols]


# Which are made once, as each step of an optimiser asks for them.
_shards: WeakKeyDictionary[Partition, dict[tuple, Partition]] = WeakKeyDictionary()


def local_partition(partition: Partition, weight: Tensor) -> Partition:
    """The shard of a partition that belongs to what is local to this rank of a DTensor, with the same defaults.

    Raises:
        ValueError: the weight is sharded along another dimension than the first two, or along the second at a column
            where Partition.columns cannot cut.
    """
    bounds = [local_range(weight, dim) for dim in range(weight.dim())]
    if any(bound != (0, size) for bound, size in zip(bounds[2:], weight.shape[2:], strict=True)):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is placed as {weight.placements}; shard it along its first"
            " dimension, as fully_shard does."
        )
    if bounds[0] != (0, weight.shape[0]):
        partition = partition.rows(*bounds[0])
    if weight.dim() > 1 and bounds[1] != (0, weight.shape[1]):
        partition = partition.columns(*bounds[1])
    return partition


def local_range(tensor: Tensor, dim: int) -> tuple[int, int]:
    """The first index along a dimension that this rank holds of a DTensor, and the one after the last.

    Raises:
        ValueError: the tensor is neither sharded nor replicated.
    """
    from torch.distributed.tensor import Replicate, Shard

    start, stop = 0, tensor.shape[dim]
    for place, placement in enumerate(tensor.placements):
        if type(placement) not in (Shard, Replicate):  # a strided shard is torch's for a mesh of two dimensions
            raise ValueError(f"a parameter is placed as {tensor.placements}; pass Shard or Replicate placements.")
        if placement.is_shard(dim):
            mesh = tensor.device_mesh
            length = -(-(stop - start) // mesh.size(place))  # as torch.chunk
            start = min(start + length * mesh.get_local_rank(place), stop)
            stop = min(start + length, stop)
    return start, stop
