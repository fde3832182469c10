"""A subnetwork's weight, for what has no kernel of its own, and its gradient."""

from __future__ import annotations

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.checks import check_defaults, check_weight, checked_number
from partkernels_numpy.partition import Partition


def subnetwork_weight(weight: np.ndarray, partition: Partition, active: int) -> np.ndarray:
    """w_s^(active): the weight where partitions 1..active own it, and the default elsewhere (Section 3).

    Args:
        weight: any strides.
        partition: of the weight.
        active: k, 1..C.

    Returns:
        Of the weight's shape and dtype, contiguous.

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
    """The gradient at the entries of partition `update` and exactly 0 elsewhere (Eq. 3).

    Args:
        grad: of a subnetwork's weight; any strides.
        partition: of the weight.
        update: 1..C.

    Returns:
        Like grad, contiguous.

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
