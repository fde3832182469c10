"""Copies between a weight's entries of one partition and a vector: one pass counts the entries, another moves them.

The vector is in the order of a contiguous weight, for any strides of the weight. A row of a tile is one piece of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.backend.reference.entries import check_values
from partkernels.backend.triton import launch
from partkernels.backend.triton.packed_map import ids
from partkernels.backend.triton.passes import TILE, copy_back, over, tile_of_pass, with_taps

# Triton 3.6 spills registers with the usual tile of 16 rows of 128.
_TILE = TILE if launch.INTERPRETED else {"DOWN": 8, "ACROSS": 256, "num_warps": 4}


@triton.jit
def _owned(
    map, rows, cols, taps, map_stride, partition,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return the program's rows, [DOWN, 1], places in them, [1, ACROSS], 1 at owned entries, and piece numbers."""
    first_row, first = tile_of_pass(tl.program_id(0), rows, cols, INDEX, DOWN, ACROSS)
    row = first_row + tl.arange(0, DOWN)[:, None]
    place = first + tl.arange(0, ACROSS)[None, :]
    column = place % taps * (cols // taps) + place // taps  # of the map, which has the channels innermost
    inside = (row < rows) & (place < cols)
    owned = inside & (ids(map, row, column, map_stride, BITS, inside) == partition - 1)
    # Integers, because booleans change layout on the way: gathering then takes 62 instruction slots instead of 35
    # (sm_90).
    return row, place, owned.to(tl.int32), row * tl.cdiv(tl.cast(cols, INDEX), ACROSS) + first // ACROSS


@triton.jit(do_not_specialize=("partition",))
def count_kernel(
    counts, map, rows, cols, taps, map_stride, partition,
    BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Write the number of owned entries of piece i to counts[1 + i]."""
    row, _, owned, piece = _owned(map, rows, cols, taps, map_stride, partition, BITS, INDEX, DOWN, ACROSS)
    tl.store(counts + 1 + piece, tl.sum(owned, 1, keep_dims=True), row < rows)


@triton.jit(do_not_specialize=("partition",))
def move_kernel(
    weight, values, starts, row_stride, channel_stride, tap_stride, map, rows, cols, taps, map_stride, partition,
    GATHER: tl.constexpr, BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Copy the partition's entries of the weight to values, or back; those of piece i begin at starts[i]."""
    row, place, owned, piece = _owned(map, rows, cols, taps, map_stride, partition, BITS, INDEX, DOWN, ACROSS)
    channel, tap = (place // taps).to(tl.int64), (place % taps).to(tl.int64)
    entry = weight + (row.to(tl.int64) * row_stride + channel * channel_stride + tap * tap_stride)
    # Adding 32-bit offsets to the pieces' pointers takes fewer instructions than adding 64-bit offsets.
    value = values + tl.load(starts + piece, row < rows, 0) + (tl.cumsum(owned, 1) - 1)
    if GATHER:
        tl.store(value, tl.load(entry, owned != 0), owned != 0)
    else:
        tl.store(entry, tl.load(value, owned != 0), owned != 0)


def _counted(weight: Tensor, partition: int, map: Tensor, count: int) -> tuple[Tensor, tuple[int], dict]:
    """Return the starts of the pieces in the vector and its end, the grid, and the arguments of both kernels."""
    rows, channels, taps = weight.shape
    cols = channels * taps
    grid, tiles = over(rows, cols, _TILE)
    lies = {"map": map, "rows": rows, "cols": cols, "taps": taps, "map_stride": map.stride(0)}
    arguments = {**lies, "partition": partition, "BITS": bits_for(count), **tiles}
    pieces = rows * triton.cdiv(cols, _TILE["ACROSS"])
    counts = torch.zeros(1 + pieces, dtype=torch.int32, device=weight.device)
    with launch.on(weight):
        count_kernel[grid](counts, **arguments)
    return counts.cumsum(0), grid, arguments


def gather_entries(tensor: Tensor, partition: int, map: Tensor, count: int) -> Tensor:
    weight = with_taps(tensor)
    starts, grid, arguments = _counted(weight, partition, map, count)
    values = tensor.new_empty(starts[-1].item())
    with launch.on(weight):
        move_kernel[grid](weight, values, starts, *weight.stride(), GATHER=True, **arguments)
    return values


def scatter_entries(tensor: Tensor, values: Tensor, partition: int, map: Tensor, count: int) -> None:
    weight = with_taps(tensor)
    starts, grid, arguments = _counted(weight, partition, map, count)
    check_values(values, starts[-1].item())
    with launch.on(weight):
        move_kernel[grid](weight, values.contiguous(), starts, *weight.stride(), GATHER=False, **arguments)
    copy_back(tensor, weight)
