"""The packed map, format 1, in numpy. See partkernels.formats.packed_map or docs/formats.md."""

from __future__ import annotations

import numpy as np

from partkernels_numpy.arguments import matrix_shape, row_bytes


def pack(ids: np.ndarray, bits: int) -> np.ndarray:
    """Pack the partition - 1 of each entry of a weight, uint8, into a map [rows, row_bytes]."""
    rows, cols = matrix_shape(ids.shape)
    matrix = (np.moveaxis(ids, 1, -1) if ids.ndim > 2 else ids).reshape(rows, cols)
    packed = np.zeros((rows, row_bytes(cols, bits)), np.uint8)
    per_byte = 8 // bits
    for slot in range(per_byte):
        column = matrix[:, slot::per_byte]
        packed[:, : column.shape[1]] |= column << (slot * bits)
    return packed


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the partition - 1 of each entry of a map, including padding: uint8 [rows, 8 / bits * row_bytes]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(len(packed), -1)


def unpack_weight(packed: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Return the partition - 1 of each entry of a weight of this shape: uint8, contiguous, in this shape."""
    matrix = unpack(packed, bits)[:, : matrix_shape(shape)[1]]
    if len(shape) > 2:
        return np.ascontiguousarray(np.moveaxis(matrix.reshape(shape[0], *shape[2:], shape[1]), -1, 1))
    return np.ascontiguousarray(matrix.reshape(shape))
