"""Checks of arrays: whether kernels can read them in place or need a copy, and whether they can write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from partkernels_numpy.arguments import InputError, checked_shape, meets_itself

DTYPES = "float32, float64 or ml_dtypes.bfloat16"
# Limits numpy's search for memory that two arrays share, which can take exponential time.
MOST_WORK = 10_000


def plain(number: Any) -> Any:
    """Convert a numpy int to a Python int; return anything else unchanged."""
    return int(number) if isinstance(number, np.integer) else number


def weight_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a weight as a tuple; raise unless it has 1 to 4 dimensions, each at least 1."""
    shape = checked_shape(shape)
    if len(shape) > 4:
        raise ValueError(f"shape {shape} has {len(shape)} dimensions; pass 1 to 4, such as [rows, in, -1, width].")
    return shape


def checked_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """Return the dtype; raise TypeError unless the kernels support it."""
    if dtype is None:  # numpy takes it as float64
        raise TypeError(f"{name} is None; pass {DTYPES}.")
    dtype = np.dtype(dtype)
    is_taken = dtype.num in (np.dtype(np.float32).num, np.dtype(np.float64).num) or dtype.name == "bfloat16"
    if not is_taken or not dtype.isnative:
        raise TypeError(f"{name} is {dtype}; pass {DTYPES}, in this machine's byte order.")
    return dtype


def checked(name: str, array: np.ndarray) -> np.ndarray:
    """Return the array itself if a kernel can read it in place, otherwise a copy; raise TypeError for other types."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a {type(array).__name__}; pass a numpy.ndarray, such as numpy.asarray(...).")
    checked_dtype(name, array.dtype)
    array = np.asarray(array)  # subclasses may override methods
    return array if _lies_in_entries(array) else array.copy()


def _lies_in_entries(array: np.ndarray) -> bool:
    """Return whether the array is aligned and its strides are whole entries, unlike in some structured arrays."""
    size = array.itemsize
    return array.flags.aligned and not any(
        stride % size and n > 1 for stride, n in zip(array.strides, array.shape, strict=True)
    )


def check_like(name: str, array: np.ndarray, other: str, like: np.ndarray) -> np.ndarray:
    """Return the checked array; raise InputError unless it has the dtype of the array `like`."""
    array = checked(name, array)
    if array.dtype != like.dtype:
        raise InputError(f"{name} is {array.dtype} and {other} {like.dtype}; cast one of them with .astype().")
    return array


def check_writable(arrays: dict[str, np.ndarray], *, read: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless a kernel can write into arrays in place.

    Each must be writeable and aligned. No two entries may share memory: neither of one array, nor of two arrays, nor of
    an array and one of `read`.

    Args:
        arrays: the arrays that the kernel writes into, by the names of its arguments.
        read: those that it only reads.

    Example:
        >>> weight = np.zeros(4, np.float32)
        >>> check_writable({"weight": weight}, read={"grad": weight[:2]})
        Traceback (most recent call last):
        ValueError: weight and grad share memory; pass a copy of one of them.
    """
    for name, array in arrays.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only; pass {name}.copy(), and keep the copy.")
        if not _lies_in_entries(array):
            raise ValueError(f"{name} is not aligned, like fields of records; pass {name}.copy(), and keep the copy.")
        if meets_itself(array.shape, array.strides, array.itemsize):
            raise ValueError(f"several entries of {name} share memory, so a step would be wrong; pass {name}.copy().")
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
