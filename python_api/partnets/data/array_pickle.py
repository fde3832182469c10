"""Reads pickles of NumPy arrays of bytes without running anything that they ask for, NumPy included."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from partnets.data.files import damaged


class Array:
    """Stands for numpy.ndarray and for the function that makes one, and keeps what the file says of its content.

    Attributes:
        tensor: uint8, of the array's shape.
    """

    tensor: Tensor | None = None

    def __init__(self, *_) -> None:
        pass

    def __setstate__(self, state) -> None:
        _version, shape, dtype, by_columns, content = state
        if not isinstance(dtype, Dtype) or dtype.name not in ("u1", b"u1") or type(content) is not bytes:
            raise pickle.UnpicklingError("it has an array of other things than bytes")
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if by_columns:  # the first dimension is innermost
            self.tensor = values.view(shape[::-1]).permute(*reversed(range(len(shape))))
        else:
            self.tensor = values.view(shape)


class Dtype:
    """Stands for numpy.dtype."""

    name: str | bytes = ""

    def __init__(self, name, *_) -> None:
        self.name = name

    def __setstate__(self, state) -> None:  # the byte order, which bytes do not have
        pass


# NumPy 1, with which the official files were written, and NumPy 2. Both classes have a __setstate__, so that a file can
# set no attribute of the classes themselves.
ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Dtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which was not run")
        return ADMITTED[module, name]


def read_pickle(path: Path, expected: str):
    """Reads a pickle of plain Python objects and arrays of bytes; of Python 2 and NumPy 1 as well.

    Args:
        path: of the file.
        expected: what it should be, for the error.

    Returns:
        The object, with Array for each array and bytes for each string of Python 2.

    Raises:
        ValueError: the file is no pickle, or asks for anything else; nothing of it has run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "batch")
        ...     _ = path.write_bytes(pickle.dumps({b"labels": [3, 1]}))
        ...     read_pickle(path, "labels")
        {b'labels': [3, 1]}
    """
    with path.open("rb") as file:
        try:
            return _Unpickler(file, encoding="bytes").load()
        except Exception as error:  # damaged pickles raise nearly anything
            raise damaged(path, f"cannot be read as a pickle of arrays ({error})", expected) from error
