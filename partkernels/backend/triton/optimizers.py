"""Optimisers' steps over the entries of one partition: one pass, and only those entries are read and written."""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.triton import launch
from partkernels.backend.triton.arithmetic import round_to
from partkernels.backend.triton.packed_map import ids
from partkernels.backend.triton.passes import over, tile_of_pass

_TILE = {"DOWN": 4, "ACROSS": 256, "num_warps": 4}


@triton.jit
def _owned(
    map, rows, cols, taps, map_stride, update,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The program's entries of a weight's memory, [DOWN, ACROSS], and which of them the partition owns.

    taps: 1 where the memory is in the order of the map's columns; else the channels come before so many taps.
    """
    first_row, first = tile_of_pass(rows, cols, INDEX, DOWN, ACROSS)
    row = first_row + tl.arange(0, DOWN)[:, None]
    lies = first + tl.arange(0, ACROSS)[None, :]
    owned = (row < rows) & (lies < cols)
    if BITS > 0:
        column = lies % taps * (cols // taps) + lies // taps
        owned &= ids(map, row, column, map_stride, BITS, owned) == update - 1
    return row * cols + lies, owned


@triton.jit
def _scalar(number, like):
    """A float32, or the bits of a float64 (see _numbers), as like's type."""
    if number.dtype == tl.float32:
        return number
    else:
        return number.to(tl.int64).to(tl.float64, bitcast=True).to(like.dtype)


@triton.jit
def _load(pointer, i, owned):
    """In the type that steps are computed in: float32, or float64 for float64."""
    value = tl.load(pointer + i, owned, 0)
    return value if value.dtype == tl.float64 else value.to(tl.float32)


@triton.jit
def _store(pointer, i, value, owned):
    tl.store(pointer + i, round_to(value, pointer.dtype.element_ty), owned)


@triton.jit
def _root(square):
    return tl.sqrt(square) if square.dtype == tl.float64 else tl.sqrt_rn(square)


@triton.jit
def _quotient(a, b):
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


_SGD = ("lr", "momentum", "weight_decay")
_ADAM = ("rate", "beta1", "beta2", "rest1", "rest2", "root_correction", "eps", "weight_decay", "shrink")


@triton.jit(do_not_specialize=("update", *_SGD))
def sgd_kernel(
    parameter, grad, momentum_buffer, map, rows, cols, taps, map_stride, update,
    lr, momentum, weight_decay, DECAY: tl.constexpr, NESTEROV: tl.constexpr,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    i, owned = _owned(map, rows, cols, taps, map_stride, update, BITS, INDEX, DOWN, ACROSS)
    p = _load(parameter, i, owned)
    g = _load(grad, i, owned)
    if DECAY:
        g += _scalar(weight_decay, p) * p
    if momentum_buffer is not None:
        buffer = _scalar(momentum, p) * _load(momentum_buffer, i, owned) + g
        _store(momentum_buffer, i, buffer, owned)
        g = g + _scalar(momentum, p) * buffer if NESTEROV else buffer
    _store(parameter, i, p - _scalar(lr, p) * g, owned)


@triton.jit(do_not_specialize=("update", *_ADAM))
def adam_kernel(
    parameter, grad, exp_avg, exp_avg_sq, map, rows, cols, taps, map_stride, update,
    rate, beta1, beta2, rest1, rest2,
    root_correction, eps, weight_decay, shrink,
    DECAY: tl.constexpr, BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """rate is lr over the mean's bias correction, root_correction 1 over the root of the square's, shrink AdamW's."""
    i, owned = _owned(map, rows, cols, taps, map_stride, update, BITS, INDEX, DOWN, ACROSS)
    p = _load(parameter, i, owned)
    g = _load(grad, i, owned)
    if DECAY:
        g += _scalar(weight_decay, p) * p
    p *= _scalar(shrink, p)
    mean = _load(exp_avg, i, owned)
    mean += _scalar(rest1, p) * (g - mean)
    square = _scalar(beta2, p) * _load(exp_avg_sq, i, owned) + _scalar(rest2, p) * g * g
    denominator = _root(square) * _scalar(root_correction, p) + _scalar(eps, p)
    _store(parameter, i, p - _scalar(rate, p) * _quotient(mean, denominator), owned)
    _store(exp_avg, i, mean, owned)
    _store(exp_avg_sq, i, square, owned)


def _numbers(like: Tensor, **numbers: float) -> dict[str, float | int]:
    """As a kernel takes them: Triton makes a float32 of a Python float, so that a float64 goes as its bits."""
    if like.dtype != torch.float64 and not launch.INTERPRETED:
        return numbers
    return {name: struct.unpack("<q", struct.pack("<d", number))[0] for name, number in numbers.items()}


def _step(kernel, tensors: list[Tensor | None], map: Tensor | None, count: int, update: int, **arguments) -> None:
    """Runs a step over tensors of one shape: the parameter, its gradient, and moments."""
    parameter = tensors[0]
    size = parameter.numel()
    if size == 0:
        return
    # Memory in which the channels come last is in the order of the map; any other is made contiguous.
    channels_last = parameter.dim() > 2 and parameter.movedim(1, -1).is_contiguous()

    def ordered(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).contiguous() if channels_last else tensor.contiguous()

    lie = [None if tensor is None else ordered(tensor) for tensor in tensors]
    # Without a map all entries are alike: one long row.
    rows = 1 if map is None else parameter.shape[0]
    cols = size // rows
    taps = 1 if map is None or channels_last or parameter.dim() < 3 else cols // parameter.shape[1]
    owners = (None, 0, 0) if map is None else (map, map.stride(0), bits_for(count))
    grid, tiles = over(rows, cols, _TILE)
    with launch.on(parameter):
        kernel[grid](*lie, owners[0], rows, cols, taps, owners[1], update, BITS=owners[2], **tiles, **arguments)
    for tensor, used in zip(tensors, lie, strict=True):
        if tensor is not tensors[1] and tensor is not None and tensor.data_ptr() != used.data_ptr():
            tensor.copy_(used.movedim(-1, 1) if channels_last else used)


def sgd_steps(
    parameters: list[Tensor], grads: list[Tensor], momentum_buffers: list[Tensor], maps: list[Tensor | None],
    counts: list[int], update: int, lr: float, momentum: float, weight_decay: float, nesterov: bool,
) -> None:  # fmt: skip
    flags = {"DECAY": weight_decay != 0, "NESTEROV": nesterov}
    buffers = momentum_buffers or [None] * len(parameters)
    for *tensors, map, count in zip(parameters, grads, buffers, maps, counts, strict=True):
        numbers = _numbers(tensors[0], lr=lr, momentum=momentum, weight_decay=weight_decay)
        _step(sgd_kernel, tensors, map, count, update, **numbers, **flags)


def adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, steps: list[int], *rest,
) -> None:  # fmt: skip
    for *tensors, map, count, step in zip(parameters, grads, exp_avgs, exp_avg_sqs, maps, counts, steps, strict=True):
        _adam_step(tensors, map, count, update, step, *rest)


def _adam_step(
    tensors: list[Tensor], map: Tensor | None, count: int, update: int,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    numbers = _numbers(
        tensors[0],
        rate=lr / (1 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        rest1=1 - beta1,
        rest2=1 - beta2,
        root_correction=1 / math.sqrt(1 - beta2**step),
        eps=eps,
        weight_decay=weight_decay,
        shrink=1 - lr * weight_decay if decoupled else 1.0,
    )
    decay = weight_decay != 0 and not decoupled
    _step(adam_kernel, tensors, map, count, update, DECAY=decay, **numbers)
