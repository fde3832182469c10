"""take and put: the entries that a partition owns of a tensor, packed; layer.entries says of what, and by which map."""

from __future__ import annotations

from torch import Tensor

from partkernels import Partition, gather_entries, scatter_entries


def take(view: Tensor, partition: Partition | None, k: int) -> Tensor:
    """The entries of a tensor that partition k owns, in row-major order: [their number], a copy unless it is all.

    Args:
        view: of any strides.
        partition: of view's shape; None if all of it is k's.
        k: 1..C.

    Example:
        >>> import torch, partkernels
        >>> partition = partkernels.Partition.from_ids(torch.tensor([[1, 2, 2]], dtype=torch.uint8))
        >>> take(torch.tensor([[1.0, 2.0, 3.0]]), partition, 2)
        tensor([2., 3.])
        >>> take(torch.ones(2, 2), None, 1)
        tensor([1., 1., 1., 1.])
    """
    return view.reshape(-1) if is_whole(partition) else gather_entries(view, partition, k)


def put(view: Tensor, partition: Partition | None, k: int, values: Tensor) -> None:
    """The inverse of take: sets these entries in place, and no others.

    Example:
        >>> import torch, partkernels
        >>> x = torch.zeros(1, 3)
        >>> partition = partkernels.Partition.from_ids(torch.tensor([[1, 2, 2]], dtype=torch.uint8))
        >>> put(x, partition, 2, torch.tensor([5.0, 6.0]))
        >>> x
        tensor([[0., 5., 6.]])
    """
    if is_whole(partition):
        view.copy_(values.view_as(view))
    else:
        scatter_entries(view, partition, k, values)


def is_whole(partition: Partition | None) -> bool:
    """Whether all entries have one owner."""
    return partition is None or partition.count == 1
