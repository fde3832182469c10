from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.reference.defaults import drawn
from partkernels.formats.packed_map import unpack_weight


def _defaults(weight: Tensor, stored: Tensor | None, kind: str, *draw) -> Tensor:
    if kind == "zeros":
        return torch.zeros_like(weight)
    if kind == "stored":
        return stored
    return drawn(kind, *draw, tuple(weight.shape), weight.dtype, weight.device)


def empty_subnetwork_weight(weight: Tensor, *_: object) -> Tensor:
    """Return the empty output of subnetwork_weight."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def subnetwork_weight(
    weight: Tensor,
    active: int,
    map: Tensor,
    stored: Tensor | None,
    count: int,
    kind: str,
    step: float,
    seed: int,
    stream: int,
    row: int,
    col: int,
) -> Tensor:
    """Return w_s^(k) (Section 3): the weight where its partition is at most active, the default elsewhere."""
    if active == count:
        return weight.clone(memory_format=torch.contiguous_format)
    live = unpack_weight(map, tuple(weight.shape), bits_for(count)) < active
    return torch.where(live, weight, _defaults(weight, stored, kind, step, seed, stream, row, col)).contiguous()


def empty_subnetwork_weight_grad(grad: Tensor, *_: object) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def subnetwork_weight_grad(grad: Tensor, first: int, last: int, map: Tensor, count: int) -> Tensor:
    """Return the gradient at the entries of partitions first..last, 0 elsewhere."""
    ids = unpack_weight(map, tuple(grad.shape), bits_for(count))
    return torch.where((ids >= first - 1) & (ids < last), grad, 0).contiguous()
