"""subnetwork_weight: the materialised weight of a subnetwork, which defines the other operators."""

from __future__ import annotations

from torch import Tensor

from partkernels.arguments import check_live
from partkernels.backend import dispatch
from partkernels.backend.reference.subnetwork_weight import empty_subnetwork_weight, empty_subnetwork_weight_grad
from partkernels.operators import nested
from partkernels.operators.checks import check_weight
from partkernels.operators.registration import OWNERS, PARTITION, define, differentiate
from partkernels.partition import NestedPartition, Partition

_forward = define("subnetwork_weight", f"Tensor weight, int active, {PARTITION}", empty_subnetwork_weight)
# The gradient at the entries of partitions first..last, exactly 0 elsewhere.
select = define("subnetwork_weight_grad", f"Tensor grad, int first, int last, {OWNERS}", empty_subnetwork_weight_grad)


# subnetwork_weight detaches the weight and needs no gradient here; an exported program may call the operator itself.
def _setup_context(ctx, inputs, output):
    _, ctx.active, map, _, ctx.num_partitions, *_, ctx.backend = inputs
    ctx.save_for_backward(map)


def _backward(ctx, grad):
    (map,) = ctx.saved_tensors
    return select(grad, 1, ctx.active, map, ctx.num_partitions, ctx.backend), *[None] * 11


differentiate("subnetwork_weight", _setup_context, _backward)


# The same, with a gradient at the entries of one partition.
_learning = define(
    "learning_weight",
    f"Tensor weight, int active, int update, {PARTITION}",
    empty_subnetwork_weight,
    kernel=lambda weight, active, update, *rest: _forward(weight, active, *rest),
)


def _learning_setup_context(ctx, inputs, output):
    _, _, ctx.update, map, _, ctx.num_partitions, *_, ctx.backend = inputs
    ctx.save_for_backward(map)


def _learning_backward(ctx, grad):
    (map,) = ctx.saved_tensors
    return select(grad, ctx.update, ctx.update, map, ctx.num_partitions, ctx.backend), *[None] * 12


differentiate("learning_weight", _learning_setup_context, _learning_backward)


def _select_setup_context(ctx, inputs, output):
    _, ctx.first, ctx.last, map, ctx.num_partitions, ctx.backend = inputs
    ctx.save_for_backward(map)


def _select_backward(ctx, grad):
    (map,) = ctx.saved_tensors
    return select(grad, ctx.first, ctx.last, map, ctx.num_partitions, ctx.backend), *[None] * 5


differentiate("subnetwork_weight_grad", _select_setup_context, _select_backward)


def subnetwork_weight(weight: Tensor, partition: Partition, active: int, *, update: int | None = None) -> Tensor:
    """Return w_s^(k) (Section 3): the weight at entries of partitions 1..active, the default elsewhere.

    Its gradient is the dense one at the entries of partition `update` and exactly 0 elsewhere (Eq. 3); with update=None
    it is not computed at all (Eq. 4).

    Args:
        weight: floating point, of the partition's shape; any strides.
        partition: which entries belong to which partition.
        active: k, 1..C.
        update: the partition that receives a gradient, 1..active, or None.

    Returns:
        A new contiguous tensor like weight.

    Raises:
        ValueError: active or update is out of range, or the partition does not fit the weight.

    Example:
        >>> import torch
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> subnetwork_weight(torch.tensor([[3.0, 4.0]]), p, active=1)
        tensor([[3., 0.]])
    """
    check_weight(weight, partition)
    check_live(partition, active, update)
    if isinstance(partition, NestedPartition):
        return nested.subnetwork_weight(weight, partition, active, update)
    if update is None:
        return _forward(weight.detach(), active, *partition.flat(), dispatch.requested())
    return _learning(weight, active, update, *partition.flat(), dispatch.requested())
