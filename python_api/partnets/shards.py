"""Shards: what a rank holds of a partition, where a parameter is a DTensor of which other ranks hold the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels import Partition, Zeros
from partnets.partitioned import Partitioned


def held_entries(
    layer: Partitioned, name: str, tensors: list[Tensor], update: int
) -> tuple[list[Tensor], Partition | None] | None:
    """layer.entries, of what this rank holds of the tensors; see there.

    What the partition owns may lie on other ranks altogether: then the tensors are empty, and the step still counts.

    Raises:
        ValueError: a DTensor is sharded along another dimension than the first.

    Example:
        >>> import partnets
        >>> layer = partnets.Linear(4, 3, proportions=(0.5, 0.5), seed=0)
        >>> held_entries(layer, "bias", [layer.bias], update=2)
        ([tensor([0., 0., 0.], grad_fn=<SelectBackward0>)], None)
    """
    if not hasattr(tensors[0], "placements"):  # as DTensors have; to import their class takes half a second
        return layer.entries(name, tensors, update)
    whole = torch.empty(tensors[0].shape, device="meta")
    found = layer.entries(name, [whole], update)
    if found is None:
        return None
    (view,), partition = found
    start, stop = _rows(tensors[0])
    local = [tensor.to_local() for tensor in tensors]
    if start == stop:
        return local, None
    if partition is not None:
        return local, _shard(partition, start, stop)
    if view.dim() == whole.dim():
        return local, None
    row = view.storage_offset() // whole.stride(0)
    return [tensor[row - start] if start <= row < stop else tensor[:0] for tensor in local], None


def _rows(tensor: Tensor) -> tuple[int, int]:
    """The first row that this rank holds of a DTensor, and the one after the last."""
    start, stop = 0, tensor.shape[0]
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(dim=0):
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} is placed as {tensor.placements}; shard it along its first"
                " dimension, as fully_shard does, or replicate it."
            )
        mesh = tensor.device_mesh
        rows = -(-(stop - start) // mesh.size(dimension))  # as torch.chunk
        start = min(start + rows * mesh.get_local_rank(dimension), stop)
        stop = min(start + rows, stop)
    return start, stop


def _shard(partition: Partition, start: int, stop: int) -> Partition:
    """These rows of a partition, without its defaults: a step of an optimiser needs none."""
    rows = partition.map[start:stop]
    return Partition._unchecked((len(rows), *partition.shape[1:]), partition.count, rows, Zeros())
