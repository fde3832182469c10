"""Products by PyTorch's kernels with a rebuilt weight, slice by slice, each slice in the same memory.

GPU backends pass in functions that rebuild part of a subnetwork's weight or keep one partition of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend import dispatch
from partkernels.backend.bias import live_bias
from partkernels.backend.reference.conv2d import empty_conv2d_grad_weight, memory_format
from partkernels.backend.reference.linear import empty_linear_grad_input, empty_linear_grad_weight
from partkernels.formats.philox import GROUP

Pair = tuple[int, int]

# The plan of gradients and convolutions.
ONLY_PLAN = "rebuild, then the vendor's kernel (no fused kernel is faster)"
# Bytes of a slice: a slice and its operands stay in an H100's second-level cache of 50 MB.
SLICE = 32 << 20
# Rows of x at which rebuilding an entry costs as much as multiplying by it, by kind of defaults: measured on an H200
# at 4096 and 8192 rows (benchmarks/results/h200.md). 'stored' and 'normal' are predictions relative to 'uniform'.
USES = {"zeros": 570, "stored": 990, "uniform": 700, "normal": 1050}


def slices(
    rebuild_into: Callable[..., None], by_rows: bool, weight: Tensor, active: int, map: Tensor, stored: Tensor | None,
    count: int, kind: str, step: float, seed: int, stream: int, row: int, col: int,
) -> Iterator[tuple[slice, Tensor]]:  # fmt: skip
    """Rebuild a linear weight's subnetwork in slices of rows or columns.

    Args:
        rebuild_into: (out, weight, active, *partition), for a part of the weight and of its partition.

    Yields:
        the rows or columns and their entries, which are valid until the next slice.
    """
    rows, cols = weight.shape
    length, width = (rows, cols) if by_rows else (cols, rows)
    most = max(1, SLICE // (width * weight.element_size()))
    if not by_rows:
        most = max(GROUP, most // GROUP * GROUP)
    memory = weight.new_empty(min(most, length) * width)
    for start in range(0, length, most):
        here = slice(start, min(start + most, length))
        size = here.stop - start
        if by_rows:
            index, shape, place = (here, slice(None)), (size, cols), (row + start, col)
            part = map[here]
        else:
            index, shape, place = (slice(None), here), (rows, size), (row, col + start)
            part = map[:, start * bits_for(count) // 8 :]
        out = memory[: size * width].view(shape)
        part_stored = None if stored is None else stored[index]
        rebuild_into(out, weight[index], active, part, part_stored, count, kind, step, seed, stream, *place)
        yield here, out


def _rows(x: Tensor) -> Tensor:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def linear(
    rebuild_into: Callable[..., None], out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, active: int,
    *partition: Any,
) -> Tensor:  # fmt: skip
    """Compute out = x w_k^T + bias, for a bias [out_features]."""
    y, flat = _rows(out), _rows(x)
    for here, part in slices(rebuild_into, True, weight, active, *partition):
        if bias is None:
            torch.mm(flat, part.t(), out=y[:, here])
        else:
            torch.addmm(bias[here], flat, part.t(), out=y[:, here])
    return out


def linear_grad_input(
    rebuild_into: Callable[..., None], grad_output: Tensor, weight: Tensor, active: int, update: int | None,
    map: Tensor, stored: Tensor | None, count: int, *kind: Any,
) -> Tensor:  # fmt: skip
    """Return the gradient of linear's x, dy w_k."""
    if active == count:
        return grad_output @ weight
    dispatch.note_plan(ONLY_PLAN)
    out = empty_linear_grad_input(grad_output, weight)
    grad, flat = _rows(out), _rows(grad_output)
    for here, part in slices(rebuild_into, False, weight, active, map, stored, count, *kind):
        torch.mm(flat, part, out=grad[:, here])
    return out


def linear_grad_weight(
    keep: Callable[..., None], grad_output: Tensor, x: Tensor, update: int, map: Tensor, count: int
) -> Tensor:
    """Return the gradient of linear's weight, dy^T x, at the entries of partition update, 0 elsewhere.

    Args:
        keep: (out, grad, first, last, map, count), where out may be grad.
    """
    dispatch.note_plan(ONLY_PLAN)
    out = empty_linear_grad_weight(grad_output, x)
    torch.mm(_rows(grad_output).t(), _rows(x), out=out)
    keep(out, out, update, update, map, count)
    return out


def _whole(
    subnetwork_weight: Callable[..., Tensor], weight: Tensor, like: Tensor, active: int, map: Tensor,
    stored: Tensor | None, count: int, *kind,
) -> Tensor:  # fmt: skip
    """Return w_k of a convolution."""
    if active == count:
        return weight
    dispatch.note_plan(ONLY_PLAN)
    return subnetwork_weight(weight, like, active, map, stored, count, *kind)


def conv2d(
    subnetwork_weight: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair,
    padding: Pair, dilation: Pair, groups: int, active: int, update: int | None, *partition: Any,
) -> Tensor:  # fmt: skip
    """Convolve x with w_k, which is rebuilt completely because it is small compared to the images.

    Args:
        subnetwork_weight: (weight, like, active, *partition), which may use the memory format of the images `like`.
    """
    weight = _whole(subnetwork_weight, weight, x, active, *partition)
    y = F.conv2d(x, weight, live_bias(bias, active), stride, padding, dilation, groups)
    return y.contiguous(memory_format=memory_format(x))


def conv2d_grad_input(
    subnetwork_weight: Callable[..., Tensor], grad_output: Tensor, weight: Tensor,
    input_size: tuple[int, int, int, int], stride: Pair, padding: Pair, dilation: Pair, groups: int, active: int,
    update: int | None, *partition: Any,
) -> Tensor:  # fmt: skip
    """Return the gradient of conv2d's x; subnetwork_weight is as in conv2d."""
    weight = _whole(subnetwork_weight, weight, grad_output, active, *partition)
    grad = torch.nn.grad.conv2d_input(input_size, weight, grad_output, stride, padding, dilation, groups)
    return grad.contiguous(memory_format=memory_format(grad_output))


def conv2d_grad_weight(
    keep: Callable[..., None], grad_output: Tensor, x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair,
    dilation: Pair, groups: int, update: int, map: Tensor, count: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of conv2d's weight at partition update, 0 elsewhere; keep is as in linear_grad_weight."""
    dispatch.note_plan(ONLY_PLAN)
    out = empty_conv2d_grad_weight(grad_output, x, kernel_size, stride, padding, dilation, groups)
    grad = torch.nn.grad.conv2d_weight(x, out.shape, grad_output, stride, padding, dilation, groups)
    keep(out, grad, update, update, map, count)
    return out
