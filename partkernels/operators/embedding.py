"""embedding: rows of a subnetwork's weight, rebuilt on lookup, without materialising the table."""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import InputError, check_live
from partkernels.backend import dispatch
from partkernels.backend.reference.embedding import empty_embedding
from partkernels.operators import nested
from partkernels.operators.checks import check_weight
from partkernels.operators.registration import PARTITION, define, differentiate
from partkernels.operators.subnetwork_weight import select
from partkernels.partition import NestedPartition, Partition

# padding_idx is -1 for None.
_forward = define(
    "embedding", f"Tensor weight, Tensor ids, int padding_idx, int active, int? update, {PARTITION}", empty_embedding
)
_dense_grad_weight = torch.ops.aten.embedding_dense_backward


def _setup_context(ctx, inputs, output):
    weight, ids, ctx.padding_idx, _, ctx.update, map, _, ctx.num_partitions = inputs[:8]
    ctx.rows, ctx.backend = weight.shape[0], inputs[-1]
    needs_weight_grad = ctx.update is not None and ctx.needs_input_grad[0]
    ctx.save_for_backward(*((ids, map) if needs_weight_grad else (None, None)))


def _backward(ctx, grad):
    ids, map = ctx.saved_tensors
    grad_weight = None
    if ids is not None:
        dense = _dense_grad_weight(grad, ids, ctx.rows, ctx.padding_idx, scale_grad_by_freq=False)
        grad_weight = select(dense, ctx.update, ctx.update, map, ctx.num_partitions, ctx.backend)
    return grad_weight, *[None] * 14


differentiate("embedding", _setup_context, _backward)


def embedding(
    ids: Tensor,
    weight: Tensor,
    partition: Partition,
    active: int,
    *,
    update: int | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up F.embedding(ids, w_s^(active)), rebuilding only the requested rows.

    The gradient of the weight is the dense one at the entries of partition `update` and exactly 0 elsewhere (Eq. 3);
    with update=None it is not computed at all (Eq. 4). Saved for backward: ids and the map.

    Args:
        ids: row numbers, int32 or int64 in [0, rows), of any shape, also empty, and any strides. As in torch, the range
            is checked only on a CPU.
        weight: [rows, features], floating point; any strides.
        partition: the weight's partition.
        active: k, 1..C: partitions 1..k are active, the others take their defaults.
        update: the partition that receives a gradient, 1..active, or None.
        padding_idx: the row that receives no gradient, in [-rows, rows), counted from the end if negative; or None.

    Returns:
        [*ids.shape, features], the weight's dtype; contiguous.

    Raises:
        ValueError: active, update or padding_idx is out of range, or the partition or another argument does not fit the
            weight.
        TypeError: the weight is not floating point, or stored defaults have another dtype.
        InputError: ids are not int32 or int64, or are on another device. It is a ValueError and, like the errors of
            torch's operators, a RuntimeError.
        IndexError: ids are out of range.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2], [1, 1]], dtype=torch.uint8))
        >>> embedding(torch.tensor([1, 0]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), p, active=1)
        tensor([[5., 6.],
                [3., 0.]])
    """
    check_weight(weight, partition)
    check_live(partition, active, update)
    if weight.dim() != 2:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}; embedding takes [rows, features].")
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"ids are {ids.dtype}; pass torch.int32 or torch.int64.")
    if ids.device != weight.device:
        raise InputError(f"ids are on {ids.device} and the weight on {weight.device}; move one of them.")
    rows = weight.shape[0]
    if padding_idx is not None and not (isinstance(padding_idx, int) and -rows <= padding_idx < rows):
        raise ValueError(
            f"padding_idx={padding_idx}, but the weight has {rows} rows; pass an int in [-{rows}, {rows})."
        )
    if isinstance(partition, NestedPartition):
        return nested.embedding(ids, weight, padding_idx, partition, active, update)
    padding_idx = -1 if padding_idx is None else padding_idx % rows
    return _forward(weight, ids.long(), padding_idx, active, update, *partition.flat(), dispatch.requested())
