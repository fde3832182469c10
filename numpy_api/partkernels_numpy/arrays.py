"""Checks of arrays: what the kernels read as it lies, what is copied for them, and what they write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partkernels_numpy.arguments import InputError, checked_shape, meets_itself

DTYPES = "float32, float64 or ml_dtypes.bfloat16"
# Of a search for a place that two arrays share, which may take forever.
MOST_WORK = 10_000


def plain(number):
    """An int of numpy's as one of Python's; anything else as it is."""
    return int(number) if isinstance(number, np.integer) else number


def weight_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a weight; raises unless it has 1 to 4 dimensions, each at least 1."""
    shape = checked_shape(shape)
    if len(shape) > 4:
        raise ValueError(f"shape {shape} has {len(shape)} dimensions; pass 1 to 4, as [rows, in, -1, width] does.")
    return shape


def checked_dtype(name: str, dtype) -> np.dtype:
    """A dtype that the kernels take; raises TypeError for any other."""
    if dtype is None:  # numpy's name for float64
        raise TypeError(f"{name} is None; pass {DTYPES}.")
    dtype = np.dtype(dtype)
    is_taken = dtype.num in (np.dtype(np.float32).num, np.dtype(np.float64).num) or dtype.name == "bfloat16"
    if not is_taken or not dtype.isnative:
        raise TypeError(f"{name} is {dtype}; pass {DTYPES}, in this machine's byte order.")
    return dtype


def checked(name: str, array: np.ndarray) -> np.ndarray:
    """The array itself if a kernel can read it as it lies, and else a copy; raises TypeError if it is none."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a {type(array).__name__}; pass a numpy.ndarray, as numpy.asarray(...) is.")
    checked_dtype(name, array.dtype)
    array = np.asarray(array)  # of a subclass, what all arrays can do
    return array if _lies_in_entries(array) else array.copy()


def _lies_in_entries(array: np.ndarray) -> bool:
    """Whether each entry is at a multiple of an entry's size from the first one: not so in some structured arrays."""
    size = array.itemsize
    return array.flags.aligned and not any(
        stride % size and n > 1 for stride, n in zip(array.strides, array.shape, strict=True)
    )


def check_like(name: str, array: np.ndarray, other: str, like: np.ndarray) -> np.ndarray:
    """The array, checked, if its dtype is that of another one; raises InputError if not."""
    array = checked(name, array)
    if array.dtype != like.dtype:
        raise InputError(f"{name} is {array.dtype} and {other} {like.dtype}; cast one of them, as by .astype().")
    return array


def check_written(arrays: dict[str, np.ndarray], *, read: dict[str, np.ndarray]) -> None:
    """Raises ValueError unless arrays can be written where they lie, and no other array is written with them."""
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only; pass {name}.copy(), and keep it.")
        if not _lies_in_entries(array):
            raise ValueError(f"{name} is not aligned, as fields of records are; pass {name}.copy(), and keep it.")
        if meets_itself(array.shape, array.strides, array.itemsize):
            raise ValueError(f"several entries of {name} share memory and cannot be stepped apart; pass {name}.copy().")
        for other_name, other in {**read, **arrays}.items():
            if other_name != name and _share_memory(array, other):
                raise ValueError(f"{name} and {other_name} share memory; pass a copy of one of them.")


def _share_memory(one: np.ndarray, other: np.ndarray) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True
