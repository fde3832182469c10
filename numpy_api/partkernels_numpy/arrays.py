"""Checks of arrays: what the kernels read as it lies, what is copied for them, and what they write."""

from __future__ import annotations

import numpy as np

from partkernels_numpy.arguments import InputError

DTYPES = "float32, float64 or ml_dtypes.bfloat16"
# Of a search for a place that two arrays share, which may take forever.
MOST_WORK = 10_000


def plain(number):
    """An int of numpy's as one of Python's; anything else as it is."""
    return int(number) if isinstance(number, np.integer) else number


def checked_dtype(name: str, dtype) -> np.dtype:
    """A dtype that the kernels take; raises TypeError for any other."""
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
    return array if _lies_in_entries(array) else array.copy()


def _lies_in_entries(array: np.ndarray) -> bool:
    """Whether each entry is at a multiple of an entry's size from the first one: not so in some structured arrays."""
    return array.flags.aligned and all(stride % array.itemsize == 0 for stride in array.strides)


def check_like(name: str, array: np.ndarray, other: str, like: np.ndarray) -> np.ndarray:
    """The array, checked, if its dtype is that of another one; raises InputError if not."""
    array = checked(name, array)
    if array.dtype != like.dtype:
        raise InputError(f"{name} is {array.dtype} and {other} {like.dtype}; cast one of them, as by .astype().")
    return array


def check_written(arrays: dict[str, np.ndarray], *, read: dict[str, np.ndarray]) -> None:
    """Raises ValueError unless arrays can be written where they lie, and no other array is written with them."""
    for name, array in arrays.items():
        if not array.flags.writeable or not _lies_in_entries(array):
            raise ValueError(f"{name} cannot be written, or lies across entries; pass {name}.copy(), and keep it.")
        if any(stride == 0 and size > 1 for stride, size in zip(array.strides, array.shape, strict=True)):
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
