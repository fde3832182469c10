"""The packed map, format 1: which partition owns each weight entry, in 1, 2, 4 or 8 bits per entry.

A weight is treated as a matrix. Its rows are the first dimension; its columns run over the other dimensions with the
input channels innermost, the order in which an implicit GEMM reads channels_last data. The map is a uint8 tensor
[rows, row_bytes] that stores partition - 1 of entry (r, c) in byte c * bits // 8 of row r, at bit (c * bits) mod 8,
low bits first. Padding is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partkernels.arguments import matrix_shape, row_bytes


def to_matrix(weight: Tensor) -> Tensor:
    """Return the weight as [rows, cols], with the input channels innermost in columns."""
    return (weight.movedim(1, -1) if weight.dim() > 2 else weight).reshape(matrix_shape(weight.shape))


def from_matrix(matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Invert to_matrix; return a view of the matrix."""
    if len(shape) <= 2:
        return matrix.reshape(shape)
    return matrix.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def pack(ids: Tensor, bits: int) -> Tensor:
    """Pack partition - 1 of each entry, uint8 [rows, cols], into a map [rows, row_bytes]."""
    rows, cols = ids.shape
    per_byte = 8 // bits
    width = row_bytes(cols, bits)
    packed = ids.new_zeros(rows, width)
    for slot in range(per_byte):
        column = ids[:, slot::per_byte]
        packed[:, : column.shape[1]] |= column << (slot * bits)
    return packed


def columns(packed: Tensor, start: int, stop: int, bits: int) -> Tensor:
    """Return the map of columns start..stop - 1, padded again; start must be at a byte boundary."""
    cols = stop - start
    cut = packed[:, start * bits // 8 : -(-stop * bits // 8)]
    part = packed.new_zeros(len(packed), row_bytes(cols, bits))
    part[:, : cut.shape[1]] = cut
    if beyond := cols * bits % 8:
        part[:, cut.shape[1] - 1] &= (1 << beyond) - 1
    return part


def unpack(packed: Tensor, cols: int, bits: int) -> Tensor:
    """Return partition - 1 of each entry, uint8 [rows, cols]: the inverse of pack."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    ids = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return ids.reshape(packed.shape[0], -1)[:, :cols]


def unpack_weight(packed: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
    """Return partition - 1 of each entry of a weight of this shape, as uint8 of the same shape."""
    return from_matrix(unpack(packed, matrix_shape(shape)[1], bits), shape)
