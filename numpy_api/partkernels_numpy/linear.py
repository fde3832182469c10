"""linear and its gradients: x times the transpose of a subnetwork's weight, computed from the packed map."""

from __future__ import annotations

import math

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.arguments import InputError
from partkernels_numpy.arrays import check_like, checked
from partkernels_numpy.bias import live_bias
from partkernels_numpy.checks import check_defaults, check_weight, checked_number
from partkernels_numpy.partition import Partition


def linear(
    x: np.ndarray, weight: np.ndarray, partition: Partition, active: int, *, bias: np.ndarray | None = None
) -> np.ndarray:
    """Compute x @ w_s^(active).T + bias, without materialising the subnetwork's weight.

    Args:
        x: [..., in_features], the weight's dtype; any strides. The batch may be empty.
        weight: [out_features, in_features]; any strides.
        partition: the weight's partition.
        active: k in 1..C. Partitions 1..k are active; the others have their default values.
        bias: [out_features]; or [C, out_features], for the bias b_1 + ... + b_active (Appendix I.2); or None.

    Returns:
        [..., out_features], x's dtype. bfloat16 is accumulated in float32.

    Raises:
        ValueError, TypeError: an argument is out of range, or the partition does not fit the weight.
        InputError: x or bias does not fit the weight.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> linear(np.array([[1.0, 1.0]]), np.array([[3.0, 4.0]]), p, active=1)
        array([[3.]])
    """
    weight = _check_matrix(weight, partition)
    active = checked_number("active", active, partition)
    shift = live_bias(bias, weight, partition, active)
    rows = _rows("x", x, "the weight", weight, weight.shape[1])
    y = np.empty((len(rows), weight.shape[0]), weight.dtype)
    _library.linear(rows, weight, shift, partition.native, active, y)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_grad_input(grad_output: np.ndarray, weight: np.ndarray, partition: Partition, active: int) -> np.ndarray:
    """Compute the gradient of x: grad_output @ w_s^(active).

    Args:
        grad_output: [..., out_features], the weight's dtype.
        weight, partition, active: as in linear.

    Returns:
        [..., in_features].

    Raises:
        ValueError, TypeError, InputError: as in linear.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> linear_grad_input(np.array([[2.0]]), np.array([[3.0, 4.0]]), p, active=1)
        array([[6., 0.]])
    """
    weight = _check_matrix(weight, partition)
    active = checked_number("active", active, partition)
    rows = _rows("grad_output", grad_output, "the weight", weight, weight.shape[0])
    grad_x = np.empty((len(rows), weight.shape[1]), weight.dtype)
    _library.linear_grad_input(rows, weight, partition.native, active, grad_x)
    return grad_x.reshape(*grad_output.shape[:-1], weight.shape[1])


def linear_grad_weight(grad_output: np.ndarray, x: np.ndarray, partition: Partition, update: int) -> np.ndarray:
    """Compute the weight's gradient: grad_output.T @ x at the entries of partition `update`, 0 elsewhere (Eq. 3).

    The gradient of a bias is grad_output's sum over all but its last dimension; for a bias [C, out], it is the gradient
    of row `update`.

    Args:
        grad_output: [..., out_features], x's dtype.
        x: [..., in_features], with the same leading dimensions.
        partition: the weight's partition.
        update: the partition, in 1..C.

    Returns:
        [out_features, in_features].

    Raises:
        ValueError, TypeError: update is out of range, or the partition is not of a matrix.
        InputError: x and grad_output do not fit each other, or the partition.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> linear_grad_weight(np.array([[2.0]]), np.array([[3.0, 4.0]]), p, update=2)
        array([[0., 8.]])
    """
    update = checked_number("update", update, partition)
    _check_shape(partition)
    out_features, in_features = partition.shape
    x = checked("x", x)
    ins = _rows("x", x, "x", x, in_features)
    outs = _rows("grad_output", grad_output, "x", x, out_features)
    if x.shape[:-1] != grad_output.shape[:-1]:
        raise InputError(
            f"grad_output has shape {grad_output.shape} and x {x.shape}; only the last dimension may differ."
        )
    grad_w = np.empty(partition.shape, x.dtype)
    _library.linear_grad_weight(outs, ins, partition.native, update, grad_w)
    return grad_w


def _check_shape(partition: Partition) -> None:
    if len(partition.shape) != 2:
        raise ValueError(f"the weight has shape {partition.shape}; linear takes [out_features, in_features].")


def _check_matrix(weight: np.ndarray, partition: Partition) -> np.ndarray:
    weight = check_weight("the weight", weight, partition)
    _check_shape(partition)
    check_defaults(weight, partition)
    return weight


def _rows(name: str, x: np.ndarray, other: str, like: np.ndarray, features: int) -> np.ndarray:
    """Return x [..., features] as a matrix: a view if possible."""
    x = check_like(name, x, other, like)
    if x.ndim == 0 or x.shape[-1] != features:
        raise InputError(f"{name} has shape {x.shape}; this weight takes [..., {features}].")
    return x.reshape(math.prod(x.shape[:-1]), features)
