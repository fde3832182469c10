"""Vectors as Flower's arrays and back; what has come from others is taken at its word in nothing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from partnets.federated.vectors import Vectors

NUMPY = "numpy.ndarray"
# How bfloat16 travels, which NumPy has not: its bytes. Flower's own arithmetic refuses what it does not know.
BYTES = "torch.bytes"


def to_array(vector: Tensor) -> Array:
    """A vector as an array.

    Example:
        >>> array = to_array(torch.ones(3, dtype=torch.bfloat16))
        >>> array.dtype, array.shape, array.stype, len(array.data)
        ('bfloat16', (3,), 'torch.bytes', 6)
    """
    if vector.dtype == torch.bfloat16:
        data = vector.contiguous().view(torch.uint8).numpy().tobytes()
        return Array("bfloat16", tuple(vector.shape), BYTES, data)
    return Array(vector.numpy())


def to_record(values: Mapping[str, Tensor]) -> ArrayRecord:
    """Vectors as a record, under their names."""
    return ArrayRecord({name: to_array(vector) for name, vector in values.items()})


def to_vector(array: Array, dtype: torch.dtype, length: int) -> Tensor:
    """The vector that an array is.

    Raises:
        ValueError: what it says of itself, or what is in it, is something else than a vector of this dtype and length.

    Example:
        >>> to_vector(to_array(torch.ones(3)), torch.float32, 4)
        Traceback (most recent call last):
        ValueError: it says that it is float32 [3], but must be float32 [4].
    """
    kind = str(dtype).removeprefix("torch.")
    if array.dtype != kind or tuple(array.shape) != (length,):
        raise ValueError(f"it says that it is {array.dtype} {list(array.shape)}, but must be {kind} [{length}].")
    stype = BYTES if dtype == torch.bfloat16 else NUMPY
    if array.stype != stype:
        raise ValueError(f"it is serialised as {array.stype!r}, but must be as {stype!r}.")
    data = array.data if stype == BYTES else _content(array.data, kind, length)
    if len(data) != length * dtype.itemsize:
        raise ValueError(f"it has {len(data)} bytes, but must have {length * dtype.itemsize}.")
    return torch.frombuffer(bytearray(data), dtype=dtype) if length else torch.empty(0, dtype=dtype, device="cpu")


def to_values(record: ArrayRecord, vectors: Vectors, names: Iterable[str]) -> dict[str, Tensor]:
    """The vectors of these names in a record.

    Raises:
        ValueError: the record has others, or one is not what it must be.
    """
    names = list(names)
    if record.keys() != {*names}:
        raise ValueError(f"it has the vectors {sorted(record.keys())}, but must have {names}.")
    values = {}
    for name in names:
        try:
            values[name] = to_vector(record[name], vectors.dtypes[name], vectors.lengths[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return values


def _content(data: bytes, kind: str, length: int) -> memoryview:
    """What follows the header of an .npy file that must be of this dtype and length; objects are never loaded."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy's parser fails in its own ways
        raise ValueError(f"its content is no array of NumPy's ({error}).") from error
    if dtype != np.dtype(kind).newbyteorder("<") or shape != (length,):
        raise ValueError(f"its content is {dtype} {list(shape)}, but must be {kind} [{length}].")
    return memoryview(data)[file.tell() :]
