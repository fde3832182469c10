"""subnetwork_weight: the materialised weight, at the speed of memory, whole or by slices for the vendor's kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.arguments import bits_for, matrix_shape
from partkernels.backend.reference.subnetwork_weight import empty_subnetwork_weight, empty_subnetwork_weight_grad
from partkernels.backend.triton import launch
from partkernels.backend.triton.packed_map import tile_ids
from partkernels.backend.triton.passes import over, tile_of_pass
from partkernels.backend.triton.rebuild import GROUP, rebuild


@triton.jit
def _offsets(row, column, channels, height, width, strides, TAPS: tl.constexpr):
    """Where entries of a weight [rows, channels, depth, height, width] lie; columns have the channels innermost."""
    if not TAPS:
        return row.to(tl.int64) * strides[0] + column.to(tl.int64) * strides[1]
    else:
        tap = column // channels
        offset = row.to(tl.int64) * strides[0] + (column - tap * channels).to(tl.int64) * strides[1]
        offset += (tap // width // height).to(tl.int64) * strides[2]
        return offset + (tap // width % height).to(tl.int64) * strides[3] + (tap % width).to(tl.int64) * strides[4]


@triton.jit(do_not_specialize=launch.WORDS)
def rebuild_kernel(
    weight, stored, out, map, rows, cols, channels, height, width,
    w0, w1, w2, w3, w4, s0, s1, s2, s3, s4, o0, o1, o2, o3, o4, map_stride, row_bytes,
    low: tl.uint32, addend: tl.uint32, below: tl.uint32, step: tl.uint32,
    seed_low: tl.uint32, seed_high: tl.uint32, stream_low: tl.uint32, stream_high: tl.uint32,
    first_row: tl.uint32, first_group: tl.uint32,
    TAPS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out = w_k."""
    tile_row, tile_column = tile_of_pass(tl.program_id(0), rows, cols, INDEX, DOWN, ACROSS)
    row = tile_row + tl.arange(0, DOWN)[:, None]
    column = tile_column + tl.arange(0, ACROSS)[None, :]
    inside = (row < rows) & (column < cols)
    tile = tl.load(weight + _offsets(row, column, channels, height, width, (w0, w1, w2, w3, w4), TAPS), inside)
    default = tile
    if KIND == "stored":
        default = tl.load(stored + _offsets(row, column, channels, height, width, (s0, s1, s2, s3, s4), TAPS), inside)
    map_rows = map + tl.minimum(row, rows - 1).to(tl.int64)[:, :, None] * map_stride
    tile = rebuild(
        tile, default, map_rows, row + first_row, tile_column // GROUP, row_bytes, low, addend, below,
        step, seed_low, seed_high, stream_low, stream_high, first_group, BITS, KIND, False, ASM,
    )  # fmt: skip
    tl.store(out + _offsets(row, column, channels, height, width, (o0, o1, o2, o3, o4), TAPS), tile, inside)


@triton.jit(do_not_specialize=("first", "last"))
def keep_kernel(
    grad, out, map, rows, cols, channels, height, width,
    g0, g1, g2, g3, g4, o0, o1, o2, o3, o4, map_stride, first, last,
    TAPS: tl.constexpr, BITS: tl.constexpr, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """out = grad at the entries of partitions first..last, 0 elsewhere.

    In place as well: to write the zeros alone, entry by entry, took an H200 four times as long.
    """
    tile_row, tile_column = tile_of_pass(tl.program_id(0), rows, cols, INDEX, DOWN, ACROSS)
    row = tile_row + tl.arange(0, DOWN)[:, None]
    column = tile_column + tl.arange(0, ACROSS)[None, :]
    inside = (row < rows) & (column < cols)
    owner = tile_ids(map, row, tile_column, rows, cols, map_stride, BITS, ACROSS).to(tl.int32)
    kept = (owner >= first - 1) & (owner < last)
    at = _offsets(row, column, channels, height, width, (g0, g1, g2, g3, g4), TAPS)
    value = tl.load(grad + at, inside & kept, 0)
    tl.store(out + _offsets(row, column, channels, height, width, (o0, o1, o2, o3, o4), TAPS), value, inside)


def _shape(shape: torch.Size) -> dict[str, int]:
    """Of a weight as [rows, channels, depth, height, width]."""
    rows, cols = matrix_shape(tuple(shape))
    channels = shape[1] if len(shape) > 1 else 1
    spatial = (1, 1, *shape[2:])
    sizes = {"rows": rows, "cols": cols, "channels": channels, "height": spatial[-2], "width": spatial[-1]}
    return {**sizes, "TAPS": channels < cols}


def _strides(tensor: Tensor, name: str) -> dict[str, int]:
    own = tensor.stride()
    five = (*(*own[:2], 0)[:2], *(0, 0, 0, *own[2:])[-3:])
    return {f"{name}{i}": stride for i, stride in enumerate(five)}


def _up_to_three_taps(tensor: Tensor) -> Tensor:
    """A weight of more than three dimensions of taps has them merged."""
    return tensor.flatten(4) if tensor.dim() > 5 else tensor


def rebuild_into(out: Tensor, weight: Tensor, active: int, map: Tensor, stored: Tensor | None, *rest) -> Tensor:
    """out = the subnetwork's weight."""
    source, default, target = (_up_to_three_taps(t) for t in (weight, weight if stored is None else stored, out))
    shape = _shape(source.shape)
    grid, tiles = over(shape["rows"], shape["cols"])
    with launch.on(weight):
        rebuild_kernel[grid](
            source, default, target, **shape,
            **_strides(source, "w"), **_strides(default, "s"), **_strides(target, "o"),
            **launch.subnetwork(active, map, stored, *rest), **tiles,
        )  # fmt: skip
    return out


def keep(out: Tensor, grad: Tensor, first: int, last: int, map: Tensor, count: int) -> Tensor:
    """out = grad at the entries of partitions first..last, 0 elsewhere; out may be grad itself."""
    source, target = _up_to_three_taps(grad), _up_to_three_taps(out)
    shape = _shape(source.shape)
    grid, tiles = over(shape["rows"], shape["cols"])
    with launch.on(grad):
        keep_kernel[grid](
            source, target, **shape, **_strides(source, "g"), **_strides(target, "o"),
            map=map, map_stride=map.stride(0), BITS=bits_for(count), first=first, last=last,
            **tiles,
        )  # fmt: skip
    return out


def subnetwork_weight(weight: Tensor, active: int, map: Tensor, stored: Tensor | None, count: int, *draw) -> Tensor:
    if active == count:
        return weight.clone(memory_format=torch.contiguous_format)
    return rebuild_into(empty_subnetwork_weight(weight), weight, active, map, stored, count, *draw)


def subnetwork_weight_grad(grad: Tensor, first: int, last: int, map: Tensor, count: int) -> Tensor:
    return keep(empty_subnetwork_weight_grad(grad), grad, first, last, map, count)
