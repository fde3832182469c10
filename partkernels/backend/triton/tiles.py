"""Tiles of a product: which tile a program computes, how it is stored, and sums shared by several programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partkernels.backend.triton import launch, plans
from partkernels.backend.triton.arithmetic import round_to
from partkernels.backend.triton.plans import Config, Product

# Tiles of rows in a band. Programs that run together share rows and columns in the second-level cache.
_TOGETHER = tl.constexpr(8)


@triton.jit
def tile_of(program, rows, cols, INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Return the first row and column of a program's tile; programs traverse _TOGETHER tiles of rows side by side."""
    tiles_down = tl.cdiv(tl.cast(rows, INDEX), BLOCK_ROWS)
    tiles_across = tl.cdiv(tl.cast(cols, INDEX), BLOCK_COLS)
    band = program // (_TOGETHER * tiles_across)
    down = tl.minimum(tiles_down - band * _TOGETHER, _TOGETHER)
    within = program % (_TOGETHER * tiles_across)
    return (band * _TOGETHER + within % down) * BLOCK_ROWS, within // down * BLOCK_COLS


@triton.jit
def store_tile(tile, bias, out, row, col, rows, cols, row_at, col_at, share):
    """Write a tile into the share of `out` of this program of axis 1; the first program's share includes the bias.

    Args:
        tile: [down, across] float32.
        bias: [rows] or None.
        row, col: [down] and [across]; indices from `rows` and `cols` on are not written.
        row_at, col_at: their offsets.
        share: the stride of shares, in entries.
    """
    if bias is not None:
        tile += tl.load(bias + row, (row < rows) & (tl.program_id(1) == 0), 0).to(tl.float32)[:, None]
    out += tl.program_id(1).to(tl.int64) * share
    out += row_at.to(tl.int64)[:, None] + col_at.to(tl.int64)[None, :]
    tl.store(out, round_to(tile, out.dtype.element_ty), (row < rows)[:, None] & (col < cols)[None, :])


@triton.jit
def _add_kernel(shares, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(shares + i, i < size, 0)
    for j in tl.static_range(1, COUNT):
        total += tl.load(shares + tl.cast(j, tl.int64) * size + i, i < size, 0)
    tl.store(out + i, round_to(total, out.dtype.element_ty), i < size)


def compute(out: Tensor, kernel: Any, product: Product, config: Config, **arguments: Any) -> Tensor:
    """Run a fused kernel that writes out, with these further arguments, and add up its shares if there are several."""
    grid, schedule = plans.schedule(product, config)
    shares = out if grid[1] == 1 else _shares(out, grid[1])
    with launch.on(out):
        kernel[grid](out=shares, **arguments, **schedule)
        return out if shares is out else _add_up(shares, out)


def _shares(out: Tensor, count: int) -> Tensor:
    """Return memory for the programs that share each sum: `count` times out, in float32."""
    return torch.empty_strided(
        (count, *out.shape), (out.numel(), *out.stride()), dtype=torch.float32, device=out.device
    )


def _add_up(shares: Tensor, out: Tensor) -> Tensor:
    """Write the sum of the shares to out, always adding in the same order."""
    block = 1024
    _add_kernel[(triton.cdiv(out.numel(), block),)](shares, out, out.numel(), COUNT=len(shares), BLOCK=block)
    return out
