"""Optimizer steps over the entries of one partition, in one launch for all tensors of a dtype.

A table in the GPU's memory says where the tensors are. It is made again only if one of them has moved. Settings and
numbers of steps are in the GPU's memory too, so that a CUDA graph can replay a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.triton import launch
from partkernels.backend.triton.arithmetic import round_to
from partkernels.backend.triton.passes import TILE, tile_of_pass, tiles_in

# 4 entries per thread, with adjacent threads on adjacent entries. If Triton knew that pointers are aligned, it would
# give each thread 4 neighbours and write them one by one. On an H200, 4096×4096 in float32, Adam's step takes 113 to
# 129 us; with 8 entries it took 131 to 143. SGD's step over a tenth of the entries takes 72 us; with 8 entries and
# known alignment it took 110.
_TILE = TILE if launch.INTERPRETED else {"DOWN": 4, "ACROSS": 128, "num_warps": 4}
_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Numbers in a row of the table: the address of the map (0 without one), rows, cols, taps, the map's stride, entries,
# log2 of the map's bits, the first program, and the addresses of parameter, gradient and moments.
_WIDTH = tl.constexpr(12)
_PARAMETER, _GRAD, _FIRST, _SECOND = (tl.constexpr(place) for place in range(8, 12))
# Tensors per program of the kernel that counts steps.
_COUNTED = 128
# Tables that are kept: gradients may be at other addresses after each backward pass, of which there are few.
_MOST = 64


@triton.jit
def _owned(table, programs, update, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return this program's tensor, its row of the table, offsets in its memory [DOWN, ACROSS], and which are stepped.

    taps: 1 if memory has the order of the map's columns, otherwise the number of taps, which memory has innermost.
    """
    tensor = tl.load(programs + tl.program_id(0))
    row = table + tensor * _WIDTH
    map = tl.load(row)
    rows, cols, taps = tl.load(row + 1).to(INDEX), tl.load(row + 2).to(INDEX), tl.load(row + 3).to(INDEX)
    map_stride, entries, log = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6).to(tl.int32)
    program = tl.program_id(0) - tl.load(row + 7).to(tl.int32)
    first_row, first = tile_of_pass(program, rows, cols, INDEX, DOWN, ACROSS)
    line = first_row + tl.arange(0, DOWN)[:, None]
    lies = first + tl.arange(0, ACROSS)[None, :]
    i = line * cols + lies
    owned = (line < rows) & (lies < cols) & (i < entries)
    if map != 0:
        column = lies
        if taps != 1:
            column = lies % taps * (cols // taps) + lies // taps
        byte = map.to(tl.pointer_type(tl.uint8)) + line.to(tl.int64) * map_stride + (column >> (3 - log))
        shift = (column & ((8 >> log) - 1)) << log
        id = (tl.load(byte, owned, 0).to(tl.int32) >> shift.to(tl.int32)) & ((1 << (1 << log)) - 1)
        owned &= id == update - 1
    return tensor, row, i, owned


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


@triton.jit(do_not_specialize=("update",))
def sgd_kernel(
    table, programs, numbers, update, MOMENTUM: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr,
    TYPE: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Step one tile by numbers: lr, momentum, weight_decay."""
    _, row, i, owned = _owned(table, programs, update, INDEX, DOWN, ACROSS)
    parameter = tl.load(row + _PARAMETER).to(tl.pointer_type(TYPE))
    p = _load(parameter, i, owned)
    g = _load(tl.load(row + _GRAD).to(tl.pointer_type(TYPE)), i, owned)
    lr, momentum = tl.load(numbers).to(p.dtype), tl.load(numbers + 1).to(p.dtype)
    if DECAY:
        g += tl.load(numbers + 2).to(p.dtype) * p
    if MOMENTUM:
        momentum_buffer = tl.load(row + _FIRST).to(tl.pointer_type(TYPE))
        buffer = momentum * _load(momentum_buffer, i, owned) + g
        _store(momentum_buffer, i, buffer, owned)
        g = g + momentum * buffer if NESTEROV else buffer
    _store(parameter, i, p - lr * g, owned)


@triton.jit(do_not_specialize=("update",))
def adam_kernel(
    table, programs, numbers, factors, update, DECAY: tl.constexpr,
    TYPE: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Step one tile.

    numbers: lr, the two betas, 1 minus each, eps, weight_decay, and AdamW's factor of the parameter.
    factors: [tensors, 2], as counting_kernel computes them.
    """
    tensor, row, i, owned = _owned(table, programs, update, INDEX, DOWN, ACROSS)
    parameter = tl.load(row + _PARAMETER).to(tl.pointer_type(TYPE))
    exp_avg = tl.load(row + _FIRST).to(tl.pointer_type(TYPE))
    exp_avg_sq = tl.load(row + _SECOND).to(tl.pointer_type(TYPE))
    p = _load(parameter, i, owned)
    g = _load(tl.load(row + _GRAD).to(tl.pointer_type(TYPE)), i, owned)
    beta1, beta2 = tl.load(numbers + 1).to(p.dtype), tl.load(numbers + 2).to(p.dtype)
    rest1, rest2 = tl.load(numbers + 3).to(p.dtype), tl.load(numbers + 4).to(p.dtype)
    rate, root_correction = tl.load(factors + 2 * tensor).to(p.dtype), tl.load(factors + 2 * tensor + 1).to(p.dtype)
    if DECAY:
        g += tl.load(numbers + 6).to(p.dtype) * p
    p *= tl.load(numbers + 7).to(p.dtype)
    mean = _load(exp_avg, i, owned)
    # Like torch.lerp, which is exact at both ends.
    change = g - mean
    mean = tl.where(rest1 < 0.5, mean + rest1 * change, g - beta1 * change)
    square = beta2 * _load(exp_avg_sq, i, owned) + rest2 * g * g
    denominator = _root(square) * root_correction + tl.load(numbers + 5).to(p.dtype)
    _store(parameter, i, p - rate * _quotient(mean, denominator), owned)
    _store(exp_avg, i, mean, owned)
    _store(exp_avg_sq, i, square, owned)


@triton.jit
def _power(base, exponent):
    """Return base**exponent in float64, for int64 exponents of 0 or more."""
    power = tl.full(exponent.shape, 1, tl.float64)
    while tl.max(exponent, 0) > 0:
        power = tl.where(exponent % 2 == 1, power * base, power)
        base = base * base
        exponent = exponent // 2
    return power


@triton.jit(do_not_specialize=("tensors", "place"))
def counting_kernel(counters, factors, numbers, tensors, place, BLOCK: tl.constexpr):
    """Count a step of each tensor, and compute the factors of Adam's step: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t).

    Float64 takes a consumer GPU 64 times as long as float32; so these are computed here, once for each tensor.

    counters: addresses of int64 vectors [C], of which the item at `place` is counted.
    numbers: those of adam_kernel.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tensors
    counter = tl.load(counters + i, inside, 0).to(tl.pointer_type(tl.int64)) + place
    step = tl.load(counter, inside, 0) + 1
    tl.store(counter, step, inside)
    tl.store(factors + 2 * i, tl.load(numbers) / (1 - _power(tl.load(numbers + 1), step)), inside)
    tl.store(factors + 2 * i + 1, 1 / tl.sqrt(1 - _power(tl.load(numbers + 2), step)), inside)


def sgd_steps(
    parameters: list[Tensor], grads: list[Tensor], momentum_buffers: list[Tensor], maps: list[Tensor | None],
    counts: list[int], update: int, lr: float, momentum: float, weight_decay: float, nesterov: bool,
) -> None:  # fmt: skip
    has_momentum = bool(momentum_buffers)
    flags = {"MOMENTUM": has_momentum, "DECAY": weight_decay != 0, "NESTEROV": nesterov}
    tensors = parameters, grads, *([momentum_buffers] if has_momentum else [])
    arguments = _in_memory((lr, momentum, weight_decay), torch.float64, *launch.place(parameters[0])), update
    _step(sgd_kernel, tensors, maps, counts, arguments, flags)


def adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, steps: list[int], *rest: Any,
) -> None:  # fmt: skip
    earlier = tuple([step - 1 for step in steps])
    counters = launch.to_gpu(torch.tensor(earlier, dtype=torch.int64, device="cpu"), parameters[0].device).unbind()
    counted_adam_steps(parameters, grads, exp_avgs, exp_avg_sqs, maps, counts, update, counters, 0, *rest)


def counted_adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, counters: Sequence[Tensor], place: int,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    like, number = parameters[0], len(parameters)
    shrink = 1 - lr * weight_decay if decoupled else 1.0
    values = lr, beta1, beta2, 1 - beta1, 1 - beta2, eps, weight_decay, shrink
    here = launch.place(like)
    numbers = _in_memory(values, torch.float64, *here)
    addresses = _in_memory(tuple([counter.data_ptr() for counter in counters]), torch.int64, *here)
    factors = torch.empty(number, 2, dtype=torch.float64, device=like.device)
    with launch.on(like):
        grid = (-(-number // _COUNTED),)
        counting_kernel[grid](addresses, factors, numbers, number, place, BLOCK=_COUNTED)
    tensors = parameters, grads, exp_avgs, exp_avg_sqs
    flags = {"DECAY": weight_decay != 0 and not decoupled}
    _step(adam_kernel, tensors, maps, counts, (numbers, factors, update), flags)


def _step(
    kernel,
    tensors: Sequence[list[Tensor]],
    maps: list[Tensor | None],
    counts: list[int],
    arguments: tuple[Any, ...],
    flags: dict[str, Any],
) -> None:
    """Step each parameter with its gradient and moments.

    Args:
        kernel: sgd_kernel or adam_kernel.
        tensors: parameters, gradients and moments.
        arguments: those between programs and the constants.
        flags: constants of the kernel.
    """
    like = tensors[0][0]
    here = launch.place(like)
    # Each tensor's place and layout, and each map's.
    parts = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for column in tensors for tensor in column]
    parts += [None if map is None else (map.data_ptr(), map.stride()) for map in maps]
    key = len(tensors), *here, *parts, *counts
    table, copies = _tables.get(key), ()
    if table is None:
        table, copies = _table(tensors, maps, counts, here)
        if not copies:  # their addresses would be others at the next call
            if len(_tables) >= _MOST:
                _tables.clear()
            _tables[key] = table
    if table.programs is None:
        return
    constants = {"TYPE": _TYPES[like.dtype], "INDEX": table.index, **_TILE, **flags}
    with launch.on(like):
        kernel[(len(table.programs),)](table.rows, table.programs, *arguments, **constants)
    for tensor, copy, is_written in copies:
        if is_written:
            tensor.copy_(copy)


@dataclass(frozen=True)
class _Table:
    """A table in the GPU's memory, the tensor of each program (None without programs), and the dtype of offsets."""

    rows: Tensor | None = None
    programs: Tensor | None = None
    index: tl.dtype = tl.int32


_tables: dict[tuple, _Table] = {}


def _table(
    tensors: Sequence[list[Tensor]], maps: list[Tensor | None], counts: list[int], here: tuple[Any, ...]
) -> tuple[_Table, list[tuple[Tensor, Tensor, bool]]]:
    """Return the table of a step, and the tensors that have copies in it, with these, and whether they are written.

    Args:
        tensors: parameters, gradients and moments.
        here: launch.place of them.
    """
    rows, tiles, copies = [], [], []
    first = longest = 0
    for *each, map, count in zip(*tensors, maps, counts, strict=True):
        each, matrix = _as_matrices(each, map)
        used = [tensor.contiguous() for tensor in each]
        copies += [(each[i], used[i], i != 1) for i in range(len(used)) if used[i] is not each[i]]
        entries, addresses = each[0].numel(), [tensor.data_ptr() for tensor in used]
        rows.append((*matrix, entries, bits_for(count).bit_length() - 1, first, *addresses, *[0] * (4 - len(used))))
        tiles.append(tiles_in(*matrix[1:3], _TILE))
        first, longest = first + tiles[-1], max(longest, entries)
    if first == 0:
        return _Table(), []
    table = launch.to_gpu(torch.tensor(rows, dtype=torch.int64, device="cpu"), here[0])
    return _Table(table, _programs(tuple(tiles), *here), launch.index_type(longest)), copies


def _as_matrices(tensors: Sequence[Tensor], map: Tensor | None) -> tuple[Sequence[Tensor], tuple[int, ...]]:
    """Return views that must be contiguous for a step, and the table's map, rows, cols, taps and map_stride."""
    parameter = tensors[0]
    entries = parameter.numel()
    # channels_last memory has the order of the map; any other is made contiguous.
    channels_last = parameter.dim() > 2 and parameter.movedim(1, -1).is_contiguous()
    if channels_last:
        tensors = [tensor.movedim(1, -1) for tensor in tensors]
    if map is None or entries == 0:  # all entries are treated alike
        return tensors, (0, -(-entries // _TILE["ACROSS"]), _TILE["ACROSS"], 1, 0)
    rows = parameter.shape[0]
    cols = entries // rows
    taps = 1 if channels_last or parameter.dim() < 3 else cols // parameter.shape[1]
    return tensors, (map.data_ptr(), rows, cols, taps, map.stride(0))


@lru_cache(maxsize=_MOST)
def _in_memory(numbers: tuple, dtype: torch.dtype, device: torch.device, *_) -> Tensor:
    """Return numbers in a device's memory; kept, so that equal ones are copied there once."""
    return launch.to_gpu(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


@lru_cache(maxsize=_MOST)
def _programs(tiles: tuple[int, ...], device: torch.device, *_) -> Tensor:
    """Return the tensor of each program, in a device's memory."""
    repeats = torch.tensor(tiles, dtype=torch.int64, device="cpu")
    return launch.to_gpu(torch.repeat_interleave(repeats).int(), device)
