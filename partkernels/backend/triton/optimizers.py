"""Optimizer steps over the entries of one partition, in one pass that reads and writes only those entries.

Large tensors, and tensors that have to be copied first, have a launch each. All others share launches.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.triton import launch, together
from partkernels.backend.triton.arithmetic import round_to
from partkernels.backend.triton.packed_map import ids
from partkernels.backend.triton.passes import TILE, over, tile_of_pass, tiles_in
from partkernels.backend.triton.together import own, own_pointer

# 4 entries per thread, with adjacent threads on adjacent entries. If Triton knew that pointers are aligned, it would
# give each thread 4 neighbours and write them one by one. On an H200, 4096×4096 in float32, Adam's step takes 113 to
# 129 us; with 8 entries it took 131 to 143. SGD's step over a tenth of the entries takes 72 us; with 8 entries and
# known alignment it took 110.
_TILE = TILE if launch.INTERPRETED else {"DOWN": 4, "ACROSS": 128, "num_warps": 4}
# For tensors without a map, which are one long row.
_ROW = {"DOWN": 1, "ACROSS": 1024, "num_warps": 4}
# Entries that a GPU steps in the time that Python takes for a launch: 30 us, at 28 bytes each and 4 TB/s. Larger
# tensors gain nothing from sharing a launch.
_FEW = 1 << 22
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _owned(
    program, map, rows, cols, taps, map_stride, update,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return a program's offsets in a weight's memory, [DOWN, ACROSS], and which of them the partition owns.

    taps: 1 if memory has the order of the map's columns, otherwise the number of taps, which memory has innermost.
    """
    first_row, first = tile_of_pass(program, rows, cols, INDEX, DOWN, ACROSS)
    row = first_row + tl.arange(0, DOWN)[:, None]
    lies = first + tl.arange(0, ACROSS)[None, :]
    owned = (row < rows) & (lies < cols)
    if BITS > 0:
        column = lies % taps * (cols // taps) + lies // taps
        owned &= ids(map, row, column, map_stride, BITS, owned) == update - 1
    return row * cols + lies, owned


@triton.jit
def _own_owned(
    maps, rows, cols, taps, map_strides, firsts, update,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return _owned for this program's tensor among several weights."""
    program = tl.program_id(0) - own(firsts, firsts)
    map = None if maps is None else own_pointer(maps, firsts, tl.uint8)
    lies = own(rows, firsts), own(cols, firsts), own(taps, firsts), own(map_strides, firsts)
    return _owned(program, map, *lies, update, BITS, INDEX, DOWN, ACROSS)


@triton.jit
def _scalar(number, like):
    """Cast a float32, or the bits of a float64 (see _numbers), to like's dtype."""
    if number.dtype == tl.float32:
        return number
    else:
        return number.to(tl.int64).to(tl.float64, bitcast=True).to(like.dtype)


@triton.jit
def _load(pointer, i, owned):
    """Load entries in the dtype in which steps are computed: float64 for float64, otherwise float32."""
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


_TENSORS = ("parameter", "grad", "momentum_buffer", "exp_avg", "exp_avg_sq")
_SGD = ("lr", "momentum", "weight_decay")
_ADAM = ("rate", "beta1", "beta2", "rest1", "rest2", "root_correction", "eps", "weight_decay", "shrink")


@triton.jit
def _sgd(
    parameter, grad, momentum_buffer, i, owned, lr, momentum, weight_decay, DECAY: tl.constexpr, NESTEROV: tl.constexpr
):  # fmt: skip
    p = _load(parameter, i, owned)
    g = _load(grad, i, owned)
    if DECAY:
        g += _scalar(weight_decay, p) * p
    if momentum_buffer is not None:
        buffer = _scalar(momentum, p) * _load(momentum_buffer, i, owned) + g
        _store(momentum_buffer, i, buffer, owned)
        g = g + _scalar(momentum, p) * buffer if NESTEROV else buffer
    _store(parameter, i, p - _scalar(lr, p) * g, owned)


@triton.jit
def _adam(
    parameter, grad, exp_avg, exp_avg_sq, i, owned,
    rate, beta1, beta2, rest1, rest2, root_correction, eps, weight_decay, shrink, DECAY: tl.constexpr,
):  # fmt: skip
    """Step one tile: rate is lr / (1 - beta1^t), root_correction 1 / sqrt(1 - beta2^t), shrink AdamW's factor."""
    p = _load(parameter, i, owned)
    g = _load(grad, i, owned)
    if DECAY:
        g += _scalar(weight_decay, p) * p
    p *= _scalar(shrink, p)
    mean = _load(exp_avg, i, owned)
    # Like torch.lerp, which is exact at both ends.
    change, rest1 = g - mean, _scalar(rest1, p)
    mean = tl.where(rest1 < 0.5, mean + rest1 * change, g - _scalar(beta1, p) * change)
    square = _scalar(beta2, p) * _load(exp_avg_sq, i, owned) + _scalar(rest2, p) * g * g
    denominator = _root(square) * _scalar(root_correction, p) + _scalar(eps, p)
    _store(parameter, i, p - _scalar(rate, p) * _quotient(mean, denominator), owned)
    _store(exp_avg, i, mean, owned)
    _store(exp_avg_sq, i, square, owned)


@triton.jit(do_not_specialize=("update", *_SGD), do_not_specialize_on_alignment=_TENSORS)
def sgd_kernel(
    parameter, grad, momentum_buffer, map, rows, cols, taps, map_stride, update,
    lr, momentum, weight_decay, DECAY: tl.constexpr, NESTEROV: tl.constexpr,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    i, owned = _owned(tl.program_id(0), map, rows, cols, taps, map_stride, update, BITS, INDEX, DOWN, ACROSS)
    _sgd(parameter, grad, momentum_buffer, i, owned, lr, momentum, weight_decay, DECAY, NESTEROV)


@triton.jit(do_not_specialize=("update", *_SGD))
def sgd_together_kernel(
    parameters, grads, momentum_buffers, maps, rows, cols, taps, map_strides, firsts, update,
    lr, momentum, weight_decay, DECAY: tl.constexpr, NESTEROV: tl.constexpr,
    TYPE: tl.constexpr, BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Run sgd_kernel on several tensors, given as tuples (see together)."""
    i, owned = _own_owned(maps, rows, cols, taps, map_strides, firsts, update, BITS, INDEX, DOWN, ACROSS)
    parameter, grad = own_pointer(parameters, firsts, TYPE), own_pointer(grads, firsts, TYPE)
    momentum_buffer = None if momentum_buffers is None else own_pointer(momentum_buffers, firsts, TYPE)
    _sgd(parameter, grad, momentum_buffer, i, owned, lr, momentum, weight_decay, DECAY, NESTEROV)


@triton.jit(do_not_specialize=("update", *_ADAM), do_not_specialize_on_alignment=_TENSORS)
def adam_kernel(
    parameter, grad, exp_avg, exp_avg_sq, map, rows, cols, taps, map_stride, update,
    rate, beta1, beta2, rest1, rest2, root_correction, eps, weight_decay, shrink, DECAY: tl.constexpr,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    i, owned = _owned(tl.program_id(0), map, rows, cols, taps, map_stride, update, BITS, INDEX, DOWN, ACROSS)
    numbers = rate, beta1, beta2, rest1, rest2, root_correction, eps, weight_decay, shrink
    _adam(parameter, grad, exp_avg, exp_avg_sq, i, owned, *numbers, DECAY)


@triton.jit(do_not_specialize=("update", *_ADAM))
def adam_together_kernel(
    parameters, grads, exp_avgs, exp_avg_sqs, maps, rows, cols, taps, map_strides, firsts, update,
    rate, beta1, beta2, rest1, rest2, root_correction, eps, weight_decay, shrink, DECAY: tl.constexpr,
    TYPE: tl.constexpr, BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Run adam_kernel on several tensors at the same step, given as tuples (see together)."""
    i, owned = _own_owned(maps, rows, cols, taps, map_strides, firsts, update, BITS, INDEX, DOWN, ACROSS)
    parameter, grad = own_pointer(parameters, firsts, TYPE), own_pointer(grads, firsts, TYPE)
    exp_avg, exp_avg_sq = own_pointer(exp_avgs, firsts, TYPE), own_pointer(exp_avg_sqs, firsts, TYPE)
    numbers = rate, beta1, beta2, rest1, rest2, root_correction, eps, weight_decay, shrink
    _adam(parameter, grad, exp_avg, exp_avg_sq, i, owned, *numbers, DECAY)


def _numbers(dtype: torch.dtype, **numbers: float) -> dict[str, float | int]:
    """Return numbers as kernel arguments; float64 as raw bits, since Triton truncates Python floats to float32."""
    if dtype != torch.float64 and not launch.INTERPRETED:
        return numbers
    return {name: struct.unpack("<q", struct.pack("<d", number))[0] for name, number in numbers.items()}


def sgd_steps(
    parameters: list[Tensor], grads: list[Tensor], momentum_buffers: list[Tensor], maps: list[Tensor | None],
    counts: list[int], update: int, lr: float, momentum: float, weight_decay: float, nesterov: bool,
) -> None:  # fmt: skip
    numbers = _numbers(parameters[0].dtype, lr=lr, momentum=momentum, weight_decay=weight_decay)
    arguments = {"DECAY": weight_decay != 0, "NESTEROV": nesterov, **numbers}
    none = [None] * len(parameters)
    tensors = zip(parameters, grads, momentum_buffers or none, strict=True)
    _steps((sgd_kernel, sgd_together_kernel), tensors, maps, counts, update, none, {None: arguments})


def adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, steps: list[int], *rest,
) -> None:  # fmt: skip
    arguments = {step: _adam_arguments(parameters[0].dtype, step, *rest) for step in set(steps)}
    tensors = zip(parameters, grads, exp_avgs, exp_avg_sqs, strict=True)
    _steps((adam_kernel, adam_together_kernel), tensors, maps, counts, update, steps, arguments)


def _adam_arguments(
    dtype: torch.dtype,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> dict:  # fmt: skip
    numbers = _numbers(
        dtype,
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
    return {"DECAY": weight_decay != 0 and not decoupled, **numbers}


def _steps(
    kernels: tuple, each: Iterable[Sequence[Tensor | None]], maps: list[Tensor | None], counts: list[int],
    update: int, steps: Sequence[int | None], arguments: dict[int | None, dict],
) -> None:  # fmt: skip
    """Step each parameter with its gradient and moments.

    Args:
        kernels: the kernel for one parameter, and the kernel for several.
        steps, arguments: each parameter's step number, and the kernel arguments for each step number.
    """
    sharing: dict[tuple, list[tuple]] = defaultdict(list)
    for tensors, map, count, step in zip(each, maps, counts, steps, strict=True):
        size = tensors[0].numel()
        if size == 0:
            continue
        tensors, matrix = _as_matrices(tensors, map)
        bits = 0 if map is None else bits_for(count)
        if size <= _FEW and all(tensor is None or tensor.is_contiguous() for tensor in tensors):
            in_order = matrix[-2] == 1
            sharing[bits, in_order, step].append((*tensors, *matrix))
            continue
        used = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        _step_one(kernels[0], (*used, *matrix), bits, update, arguments[step])
        for i, (tensor, one) in enumerate(zip(tensors, used, strict=True)):
            if one is not tensor and i != 1:
                tensor.copy_(one)
    for (bits, _, step), members in sharing.items():
        for i in range(0, len(members), together.MOST):
            some = members[i : i + together.MOST]
            if len(some) >= together.LEAST:
                _step_several(kernels[1], some, bits, update, arguments[step])
                continue
            for one in some:
                _step_one(kernels[0], one, bits, update, arguments[step])


def _as_matrices(tensors: Sequence[Tensor | None], map: Tensor | None) -> tuple[Sequence[Tensor | None], tuple]:
    """Return views that must be contiguous for a step, and _owned's map, rows, cols, taps and map_stride."""
    parameter = tensors[0]
    # channels_last memory has the order of the map; any other is made contiguous.
    channels_last = parameter.dim() > 2 and parameter.movedim(1, -1).is_contiguous()
    if channels_last:
        tensors = [None if tensor is None else tensor.movedim(1, -1) for tensor in tensors]
    if map is None:  # all entries are treated alike: one long row
        return tensors, (None, 1, parameter.numel(), 1, 0)
    rows = parameter.shape[0]
    cols = parameter.numel() // rows
    taps = 1 if channels_last or parameter.dim() < 3 else cols // parameter.shape[1]
    return tensors, (map, rows, cols, taps, map.stride(0))


def _step_one(kernel, one: tuple, bits: int, update: int, arguments: dict) -> None:
    *_, rows, cols, _, _ = one
    grid, tiles = over(rows, cols, _TILE if bits else _ROW)
    with launch.on(one[0]):
        kernel[grid](*one, update, BITS=bits, **tiles, **arguments)


def _step_several(kernel, some: list[tuple], bits: int, update: int, arguments: dict) -> None:
    parameter, tile = some[0][0], _TILE if bits else _ROW
    tuples, programs = together.in_tuples(some, [tiles_in(rows, cols, tile) for *_, rows, cols, _, _ in some])
    constants = {"TYPE": _TYPES[parameter.dtype], "BITS": bits, "INDEX": tl.int32, **tile}
    with launch.on(parameter):
        kernel[(programs,)](*tuples, update, **constants, **arguments)
