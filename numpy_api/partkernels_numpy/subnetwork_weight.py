"""A subnetwork's weight, for operations without a kernel, and its gradient."""

from __future__ import annotations

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.checks import check_defaults, check_weight, checked_number
from partkernels_numpy.partition import Partition


def subnetwork_weight(weight: np.ndarray, partition: Partition, active: int) -> np.ndarray:
    """Return w_s^(active): the weight's entries in partitions 1..active, and defaults elsewhere (Section 3).

    Args:
        weight: the weight; any strides.
        partition: the weight's partition.
        active: k in 1..C.

    Returns:
        A contiguous array of the weight's shape and dtype.

    Raises:
        ValueError, TypeError: an argument is out of range or does not fit the weight.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> subnetwork_weight(np.array([[3.0, 4.0]]), p, active=1)
        array([[3., 0.]])
    """
    weight = check_weight("the weight", weight, partition)
    active = checked_number("active", active, partition)
    check_defaults(weight, partition)
    out = np.empty(weight.shape, weight.dtype)
    _library.subnetwork_weight(weight, partition.native, active, out)
    return out


def subnetwork_weight_grad(grad: np.ndarray, partition: Partition, update: int) -> np.ndarray:
    """Return the gradient at the entries of partition `update`, and exactly 0 elsewhere (Eq. 3).

    Args:
        grad: the gradient of a subnetwork's weight; any strides.
        partition: the weight's partition.
        update: the partition, in 1..C.

    Returns:
        A contiguous array like grad.

    Raises:
        ValueError, TypeError: an argument is out of range or does not fit the partition.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> subnetwork_weight_grad(np.array([[3.0, 4.0]]), p, update=2)
        array([[0., 4.]])
    """
    grad = check_weight("grad", grad, partition)
    update = checked_number("update", update, partition)
    out = np.empty(grad.shape, grad.dtype)
    _library.subnetwork_weight_grad(grad, partition.native, update, out)
    return out
