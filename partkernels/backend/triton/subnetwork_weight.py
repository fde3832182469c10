"""subnetwork_weight: the materialised weight, at memory speed, complete or in slices for the vendor's kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.reference.subnetwork_weight import empty_subnetwork_weight, empty_subnetwork_weight_grad
from partkernels.backend.triton import launch
from partkernels.backend.triton.packed_map import tile_ids
from partkernels.backend.triton.passes import copy_back, over, tile_of_pass, with_taps
from partkernels.backend.triton.rebuild import GROUP, rebuild

# If its channels are whole groups, a convolution's weight is treated as a matrix with a row for each tap of each output
# channel. Neighbouring threads then have a channel's taps, which are adjacent in memory, and access a third of the
# 32-byte sectors.
_BY_TAPS = {"DOWN": 32, "ACROSS": GROUP.value, "num_warps": 4}


@triton.jit
def _entries(
    rows, channels, TAPS: tl.constexpr, BY_TAPS: tl.constexpr,
    INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return a program's entries of a weight [rows, channels, TAPS]; columns have the channels innermost.

    Returns:
        row: [DOWN, 1].
        first: the map's first column, shared by all rows; with BY_TAPS one for each row, [DOWN, 1].
        row, channel, tap: of every entry, broadcastable to [DOWN, ACROSS]; with BY_TAPS transposed as in _turned.
        inside: which entries exist, in the same shape.
    """
    program, cols = tl.program_id(0), tl.cast(channels, INDEX) * TAPS
    if BY_TAPS:
        top, left = tile_of_pass(program, tl.cast(rows, INDEX) * TAPS, channels, INDEX, DOWN, ACROSS)
        i = top + tl.arange(0, DOWN)
        row, tap = i // TAPS, i % TAPS
        channel = (left + tl.arange(0, ACROSS))[:, None]
        inside = (row[None, :] < rows) & (channel < channels)
        return row[:, None], (tap * channels + left)[:, None], row[None, :], channel, tap[None, :], inside
    else:
        top, left = tile_of_pass(program, rows, cols, INDEX, DOWN, ACROSS)
        row = top + tl.arange(0, DOWN)[:, None]
        column = left + tl.arange(0, ACROSS)[None, :]
        tap = column // channels if TAPS > 1 else tl.zeros_like(column)
        return row, left, row, column - tap * channels, tap, (row < rows) & (column < cols)


@triton.jit
def _turned(tile, BY_TAPS: tl.constexpr):
    return tl.trans(tile) if BY_TAPS else tile


@triton.jit
def _offsets(row, channel, tap, row_stride, channel_stride, tap_stride, TAPS: tl.constexpr):
    offset = row.to(tl.int64) * row_stride + channel.to(tl.int64) * channel_stride
    return offset + tap.to(tl.int64) * tap_stride if TAPS > 1 else offset


@triton.jit(do_not_specialize=launch.WORDS)
def rebuild_kernel(
    weight, stored, out, map, rows, channels, w0, w1, w2, s0, s1, s2, o0, o1, o2, map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    TAPS: tl.constexpr, BY_TAPS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Write w_k to out."""
    row, first, i, channel, tap, inside = _entries(rows, channels, TAPS, BY_TAPS, INDEX, DOWN, ACROSS)
    tile = _turned(tl.load(weight + _offsets(i, channel, tap, w0, w1, w2, TAPS), inside), BY_TAPS)
    default = tile
    if KIND == "stored":
        default = _turned(tl.load(stored + _offsets(i, channel, tap, s0, s1, s2, TAPS), inside), BY_TAPS)
    map_rows = map + tl.minimum(row, rows - 1).to(tl.int64)[:, :, None] * map_stride
    group = first // GROUP
    tile = rebuild(
        tile, default, map_rows, row + first_row, group[:, :, None] if BY_TAPS else group, row_bytes,
        low, addend, below, step, seed_low, seed_high, stream_low, stream_high, first_group, BITS, KIND, False, ASM,
    )  # fmt: skip
    tl.store(out + _offsets(i, channel, tap, o0, o1, o2, TAPS), _turned(tile, BY_TAPS), inside)


@triton.jit(do_not_specialize=("first", "last"))
def keep_kernel(
    grad, out, map, rows, channels, g0, g1, g2, o0, o1, o2, map_stride, first, last,
    TAPS: tl.constexpr, BY_TAPS: tl.constexpr, BITS: tl.constexpr,
    INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Write grad to out at the entries of partitions first..last, and 0 elsewhere.

    In-place calls rewrite all entries, too: writing only the zeros, entry by entry, took an H200 four times as long.
    """
    row, column, i, channel, tap, inside = _entries(rows, channels, TAPS, BY_TAPS, INDEX, DOWN, ACROSS)
    cols = tl.cast(channels, INDEX) * TAPS
    owner = tile_ids(map, row, column, rows, cols, map_stride, BITS, ACROSS).to(tl.int32)
    kept = _turned((owner >= first - 1) & (owner < last), BY_TAPS)
    value = tl.load(grad + _offsets(i, channel, tap, g0, g1, g2, TAPS), inside & kept, 0)
    tl.store(out + _offsets(i, channel, tap, o0, o1, o2, TAPS), value, inside)


def _shape(weight: Tensor) -> tuple[tuple[int], dict]:
    """Return the grid of a pass over a weight from with_taps, and its kernel's shape arguments."""
    rows, channels, taps = weight.shape
    # If the channels are innermost in memory, as in the map, the weight is read in that order.
    by_taps = taps > 1 and channels % GROUP.value == 0 and weight.stride(1) >= weight.stride(2)
    grid, tiles = over(rows * taps, channels, _BY_TAPS) if by_taps else over(rows, channels * taps)
    return grid, {"rows": rows, "channels": channels, "TAPS": taps, "BY_TAPS": by_taps, **tiles}


def rebuild_into(out: Tensor, weight: Tensor, active: int, map: Tensor, stored: Tensor | None, *rest: Any) -> Tensor:
    """Write the subnetwork's weight to out."""
    source, target = with_taps(weight), with_taps(out)
    default = source if stored is None else with_taps(stored)
    grid, shape = _shape(source)
    with launch.on(weight):
        rebuild_kernel[grid](
            source, default, target, **shape,
            **launch.strides_of(w=source, s=default, o=target), **launch.subnetwork(active, map, stored, *rest),
        )  # fmt: skip
    copy_back(out, target)
    return out


def keep(out: Tensor, grad: Tensor, first: int, last: int, map: Tensor, count: int) -> Tensor:
    """Write grad to out at the entries of partitions first..last, 0 elsewhere; out may be grad itself."""
    source, target = with_taps(grad), with_taps(out)
    grid, shape = _shape(source)
    with launch.on(grad):
        keep_kernel[grid](
            source, target, **shape, **launch.strides_of(g=source, o=target),
            map=map, map_stride=map.stride(0), BITS=bits_for(count), first=first, last=last,
        )  # fmt: skip
    copy_back(out, target)
    return out


def subnetwork_weight(
    weight: Tensor, active: int, map: Tensor, stored: Tensor | None, count: int, *draw: Any
) -> Tensor:
    if active == count:
        return weight.clone(memory_format=torch.contiguous_format)
    return rebuild_into(empty_subnetwork_weight(weight), weight, active, map, stored, count, *draw)


def subnetwork_weight_grad(grad: Tensor, first: int, last: int, map: Tensor, count: int) -> Tensor:
    return keep(empty_subnetwork_weight_grad(grad), grad, first, last, map, count)
