"""Passes over a matrix, tile by tile: their grid, which has room for any matrix, and which tile a program has."""

from __future__ import annotations

import triton
import triton.language as tl

from partkernels.backend.triton import launch

# Where a weight is rebuilt or read: [rows, columns] of its matrix.
TILE = {"DOWN": 64 if launch.INTERPRETED else 16, "ACROSS": 512 if launch.INTERPRETED else 128, "num_warps": 4}


@triton.jit
def tile_of_pass(rows, cols, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The first row and column of the program's tile."""
    across = tl.cdiv(tl.cast(cols, INDEX), ACROSS)
    return tl.program_id(0) // across * DOWN, tl.program_id(0) % across * ACROSS


def over(rows: int, cols: int, tile: dict[str, int] = TILE) -> tuple[tuple[int], dict]:
    """The grid of a pass, and what its kernel is told of its tiles.

    All tiles are along a grid's first dimension: the others have 65,535 at most.
    """
    tiles = triton.cdiv(rows, tile["DOWN"]) * triton.cdiv(cols, tile["ACROSS"])
    return (tiles,), {"INDEX": launch.index_type(rows * cols), **tile}
