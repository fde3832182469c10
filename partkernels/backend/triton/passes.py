"""Passes over a matrix, tile by tile: their grid, which has room for any matrix, and which tile a program has."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from partkernels.backend.triton import launch

# Where a weight is rebuilt or read: [rows, columns] of its matrix.
TILE = {"DOWN": 64 if launch.INTERPRETED else 16, "ACROSS": 512 if launch.INTERPRETED else 128, "num_warps": 4}


@triton.jit
def tile_of_pass(program, rows, cols, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The first row and column of a program's tile."""
    across = tl.cdiv(tl.cast(cols, INDEX), ACROSS)
    return program // across * DOWN, program % across * ACROSS


def over(rows: int, cols: int, tile: dict[str, int] = TILE) -> tuple[tuple[int], dict]:
    """The grid of a pass, and what its kernel is told of its tiles.

    All tiles are along a grid's first dimension: the others have 65,535 at most.
    """
    return (tiles_in(rows, cols, tile),), {"INDEX": launch.index_type(rows * cols), **tile}


def tiles_in(rows: int, cols: int, tile: dict[str, int]) -> int:
    """How many a matrix has."""
    # triton.cdiv, called from Python, takes 2 us.
    return -(-rows // tile["DOWN"]) * -(-cols // tile["ACROSS"])


def with_taps(tensor: Tensor) -> Tensor:
    """A weight as [rows, channels, taps]: a copy only where its taps do not lie at one stride."""
    rows, channels = (*tensor.shape[:2], 1)[:2]
    return tensor.reshape(rows, channels, tensor.shape[2:].numel())


def copy_back(tensor: Tensor, seen: Tensor) -> None:
    """Where with_taps had to copy, what was written into the copy since comes into the tensor."""
    if seen.data_ptr() != tensor.data_ptr():
        tensor.copy_(seen.view(tensor.shape))
