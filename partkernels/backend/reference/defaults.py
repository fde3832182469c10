"""Defaults, format 1, drawn by Philox: the values of Uniform and Normal in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import matrix_shape
from partkernels.formats.packed_map import from_matrix
from partkernels.formats.philox import philox4x32, split

# Entries drawn at once: limits the generator's int64 temporaries to a few MiB each.
CHUNK_ENTRIES = 1 << 18


def _select(choices: tuple[Tensor, ...], index: Tensor) -> Tensor:
    """Return choices[index] for each entry."""
    result = choices[0]
    for i, choice in enumerate(choices[1:], start=1):
        result = torch.where(index == i, choice, result)
    return result


def _uniform(row: Tensor, column: Tensor, step: float, seed: int, stream: int) -> Tensor:
    # The order in which tensor-core fragments distribute 64 columns of a row over the four threads of a quad.
    group = 4 * (column // 64) + (column // 2) % 4
    byte = 4 * ((column // 16) % 4) + 2 * ((column // 8) % 2) + column % 2
    words = philox4x32((group, row, *split(stream)), seed)
    draw = (_select(words, byte // 4) >> (8 * (byte % 4))) & 0xFF
    magnitude = ((draw & 0x7F).float() + 0.5) * step  # exact: both factors have 8 significant bits
    return torch.where(draw >= 128, -magnitude, magnitude).bfloat16()


def _normal(row: Tensor, column: Tensor, step: float, seed: int, stream: int) -> Tensor:
    words = philox4x32((column // 4, row, *split(stream)), seed)
    word = _select(words, column % 4)
    total = sum((word >> shift) & 0xFF for shift in (0, 8, 16, 24)) - 510
    return (total.float() * step).bfloat16()


DRAWS = {"uniform": _uniform, "normal": _normal}


def drawn(
    kind: str,
    step: float,
    seed: int,
    stream: int,
    row: int,
    col: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the defaults of a weight of this shape; each is a bfloat16 number, exact in any floating dtype.

    The first entry is (row, col) of the full weight.
    """
    rows, cols = matrix_shape(shape)
    matrix = torch.empty(rows, cols, dtype=dtype, device=device)
    if not matrix.is_meta:
        column = torch.arange(col, col + cols, device=matrix.device)
        chunk = max(1, CHUNK_ENTRIES // max(1, cols))
        for start in range(0, rows, chunk):
            stop = min(start + chunk, rows)
            here = torch.arange(row + start, row + stop, device=matrix.device)
            matrix[start:stop] = DRAWS[kind](here[:, None], column[None, :], step, seed, stream)
    return from_matrix(matrix, shape).contiguous()
