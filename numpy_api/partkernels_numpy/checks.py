"""Checks of the arguments that all functions share: the partition, its weight and partition numbers."""

from __future__ import annotations

import numpy as np

from partkernels_numpy.arguments import check_number
from partkernels_numpy.arrays import checked, plain
from partkernels_numpy.partition import Partition


def checked_number(name: str, number: int, partition: Partition) -> int:
    """Return the partition number as a Python int; raise ValueError unless it is in 1..C."""
    _check_partition(partition)
    check_number(name, plain(number), partition)
    return plain(number)


def check_weight(name: str, weight: np.ndarray, partition: Partition) -> np.ndarray:
    """Return the weight, or a copy that kernels can read; raise unless it is an array of the partition's shape.

    `name` is the weight's name in error messages.
    """
    _check_partition(partition)
    weight = checked(name, weight)
    if weight.shape != partition.shape:
        raise ValueError(
            f"{name} has shape {weight.shape} and its partition {partition.shape}; make the partition with"
            f" Partition.random({weight.shape}, ...)."
        )
    return weight


def check_defaults(weight: np.ndarray, partition: Partition) -> None:
    """Raise TypeError if stored defaults differ from the weight in dtype."""
    stored = partition.defaults.stored
    if stored is not None and stored.dtype != weight.dtype:
        raise TypeError(f"the stored defaults are {stored.dtype} and the weight is {weight.dtype}; cast one of them.")


def _check_partition(partition: Partition) -> None:
    if not isinstance(partition, Partition):
        raise TypeError(f"partition is a {type(partition).__name__}; pass a partkernels_numpy.Partition.")
