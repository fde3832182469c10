"""Memory of tensors: whether tensors overlap, and whether a tensor is a view."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors share any entry's memory.

    Example:
        >>> pairs = torch.zeros(4, 2)
        >>> share_memory(pairs[:, 0], pairs[:, 1]), share_memory(pairs[:, 0], pairs.t())
        (False, True)
    """
    (start, stop), (other_start, other_stop) = map(_range, (first, second))
    if start >= other_stop or other_start >= stop or not start:  # no memory is at address 0
        return False
    if first.is_contiguous() or second.is_contiguous():  # a contiguous tensor uses its whole range
        return True
    # The range of an index of `first` minus one of `second`, for each stride in bytes.
    least, most = defaultdict(int), defaultdict(int)
    for tensor, ends in ((first, most), (second, least)):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            ends[stride * tensor.element_size()] += (size - 1) * (1 if ends is most else -1)
    strides = sorted({*least, *most}, reverse=True)
    return _is_sum(other_start - start, [(stride, least[stride], most[stride]) for stride in strides if stride])


def _is_sum(distance: int, steps: list[tuple[int, int, int]]) -> bool:
    """Return whether multiples of strides can sum to distance; each step is (stride, least, most) multiples."""
    if not steps:
        return distance == 0
    (stride, least, most), *rest = steps
    farthest, nearest = (sum(step[0] * step[end] for step in rest) for end in (2, 1))
    first, last = max(least, -((farthest - distance) // stride)), min(most, (distance - nearest) // stride)
    return any(_is_sum(distance - number * stride, rest) for number in range(first, last + 1))


def meeting(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each pair of tensors that share an entry's memory, the lower index first.

    Example:
        >>> pairs = torch.zeros(4, 2)
        >>> [*meeting([pairs[:2], torch.zeros(3), pairs[:, 0]])]
        [(0, 2)]
    """
    places = sorted(
        (tensor.data_ptr(), tensor.nbytes)
        if tensor.is_contiguous()
        else ((storage := tensor.untyped_storage()).data_ptr(), storage.nbytes())
        for tensor in tensors
    )
    if all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places)):
        return  # the usual case, at a fifth of the cost
    near: list[int] = []  # tensors of overlapping ranges
    end = 0
    for start, stop, i in sorted((*_range(tensor), i) for i, tensor in enumerate(tensors)):
        if start >= end:
            near.clear()
        yield from ((min(i, j), max(i, j)) for j in near if share_memory(tensors[i], tensors[j]))
        near.append(i)
        end = max(end, stop)


def no_view(y: Tensor) -> Tensor:
    """Return y, or its memory as a non-view: views returned by a Function cannot be changed in place.

    Example:
        >>> y = torch.zeros(2, 3).view(3, 2)
        >>> y._is_view(), no_view(y)._is_view()
        (True, False)
    """
    is_view = not torch.compiler.is_compiling() and y._is_view()
    return torch.ops.aten._unsafe_view(y, y.shape) if is_view else y


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor's memory begins and ends; equal if it has no entries."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
