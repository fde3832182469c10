"""Passes over a matrix, tile by tile: the grid, which can cover any matrix, and the tile of a program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from partkernels.backend.triton import launch

# The tile of passes that rebuild or read a weight: rows and columns of its matrix.
TILE = {"DOWN": 64 if launch.INTERPRETED else 16, "ACROSS": 512 if launch.INTERPRETED else 128, "num_warps": 4}


@triton.jit
def tile_of_pass(program, rows, cols, INDEX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Return the first row and column of a program's tile."""
    across = tl.cdiv(tl.cast(cols, INDEX), ACROSS)
    return program // across * DOWN, program % across * ACROSS


def over(rows: int, cols: int, tile: dict[str, int] = TILE) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of a pass and its kernel's tile arguments.

    All tiles are along the grid's first dimension, since the others are limited to 65,535.
    """
    return (tiles_in(rows, cols, tile),), {"INDEX": launch.index_type(rows * cols), **tile}


def tiles_in(rows: int, cols: int, tile: dict[str, int]) -> int:
    """Return the number of tiles of a matrix."""
    # Not triton.cdiv, which takes 2 us when called from Python.
    return -(-rows // tile["DOWN"]) * -(-cols // tile["ACROSS"])


def with_taps(tensor: Tensor) -> Tensor:
    """Return a weight as [rows, channels, taps]; a copy only if its taps do not have one stride."""
    rows, channels = (*tensor.shape[:2], 1)[:2]
    return tensor.reshape(rows, channels, tensor.shape[2:].numel())


def copy_back(tensor: Tensor, seen: Tensor) -> None:
    """Copy `seen` back into the tensor if with_taps had to copy it."""
    if seen.data_ptr() != tensor.data_ptr():
        tensor.copy_(seen.view(tensor.shape))
