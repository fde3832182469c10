"""Conversion of vectors to Flower's arrays and back, with all checks that untrusted arrays need."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from partnets.federated.vectors import Vectors

NUMPY = "numpy.ndarray"
# bfloat16, which NumPy lacks, is sent as its bytes, under a type that Flower's own arithmetic refuses.
BYTES = "torch.bytes"


def to_array(vector: Tensor) -> Array:
    """Convert a vector to an array.

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
    """Convert named vectors to a record."""
    return ArrayRecord({name: to_array(vector) for name, vector in values.items()})


def to_vector(array: Array, dtype: torch.dtype, length: int) -> Tensor:
    """Convert an array to a vector.

    Raises:
        ValueError: the array's header or its content is not a vector of this dtype and length.

    Example:
        >>> to_vector(to_array(torch.ones(3)), torch.float32, 4)
        Traceback (most recent call last):
        ValueError: it is declared as float32 [3], but must be float32 [4].
    """
    kind = str(dtype).removeprefix("torch.")
    if array.dtype != kind or tuple(array.shape) != (length,):
        raise ValueError(f"it is declared as {array.dtype} {list(array.shape)}, but must be {kind} [{length}].")
    stype = BYTES if dtype == torch.bfloat16 else NUMPY
    if array.stype != stype:
        raise ValueError(f"it is serialised as {array.stype!r}, but must be serialised as {stype!r}.")
    data = array.data if stype == BYTES else _content(array.data, kind, length)
    if len(data) != length * dtype.itemsize:
        raise ValueError(f"it has {len(data)} bytes, but must have {length * dtype.itemsize}.")
    return torch.frombuffer(bytearray(data), dtype=dtype) if length else torch.empty(0, dtype=dtype, device="cpu")


def to_values(record: ArrayRecord, vectors: Vectors, names: Iterable[str]) -> dict[str, Tensor]:
    """Convert a record with exactly these names to vectors.

    Raises:
        ValueError: the record has other names, or a vector is invalid.
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
    """Return the data of an .npy file that must have this dtype and length; never load objects."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy's parser may raise any exception
        raise ValueError(f"its content is not a NumPy array ({error}).") from error
    if dtype != np.dtype(kind).newbyteorder("<") or shape != (length,):
        raise ValueError(f"its content is {dtype} {list(shape)}, but must be {kind} [{length}].")
    return memoryview(data)[file.tell() :]
