"""Where in memory tensors lie: whether they meet there, and whether one is a view."""

from __future__ import annotations

import torch
from torch import Tensor


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have an entry of memory in common.

    Example:
        >>> pairs = torch.zeros(4, 2)
        >>> share_memory(pairs[:, 0], pairs[:, 1]), share_memory(pairs[:, 0], pairs.t())
        (False, True)
    """
    if not (first.numel() and second.numel()):
        return False
    (start, stop), (other_start, other_stop) = map(_range, (first, second))
    if start >= other_stop or other_start >= stop:
        return False
    if first.is_contiguous() or second.is_contiguous():  # one that leaves nothing out of its range
        return True
    return bool(torch.isin(_places(first), _places(second)).any())


def no_view(y: Tensor) -> Tensor:
    """y itself, or a tensor with its memory that is no view: of views that a Function makes nothing changes in place.

    Example:
        >>> y = torch.zeros(2, 3).view(3, 2)
        >>> y._is_view(), no_view(y)._is_view()
        (True, False)
    """
    is_view = not torch.compiler.is_compiling() and y._is_view()
    return torch.ops.aten._unsafe_view(y, y.shape) if is_view else y


def _range(tensor: Tensor) -> tuple[int, int]:
    """Where in memory its first entry begins and its last one ends."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _places(tensor: Tensor) -> Tensor:
    """Where in memory its entries begin."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return tensor.data_ptr() + offsets.flatten() * tensor.element_size()
