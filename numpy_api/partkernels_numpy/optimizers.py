"""Optimiser steps for the entries of one partition, in place; all other entries keep their bits."""

from __future__ import annotations

import numpy as np

from partkernels_numpy import _library
from partkernels_numpy.arguments import check_betas, check_momentum, check_not_negative, check_step
from partkernels_numpy.arrays import check_like, check_writable, checked, plain
from partkernels_numpy.checks import check_weight, checked_number
from partkernels_numpy.partition import Partition


def sgd_step(
    parameter: np.ndarray,
    grad: np.ndarray,
    momentum_buffer: np.ndarray | None,
    partition: Partition | None,
    update: int | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Perform a step of torch.optim.SGD for the entries of one partition, in place and in one pass.

    All other entries of parameter and momentum_buffer keep their bits. bfloat16 is computed in float32.

    Args:
        parameter: the parameter, in the partition's shape; any strides.
        grad: like parameter in shape and dtype. Its entries outside the partition have no influence.
        momentum_buffer: like parameter, zeros before the first step; None if momentum is 0.
        partition: the parameter's partition; None steps every entry.
        update: the partition to step, in 1..C; ignored without a partition.
        lr: the learning rate.
        momentum: the momentum factor; there is no dampening.
        weight_decay: added to the gradient, times the parameter.
        nesterov: Nesterov momentum; requires momentum > 0.

    Raises:
        ValueError, TypeError: a number is out of range, an array does not fit, or an output is not writeable or shares
            memory with another array. Nothing is changed in this case.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> weight = np.zeros((1, 2))
        >>> sgd_step(weight, np.ones((1, 2)), None, p, 2, lr=0.5)
        >>> weight
        array([[ 0. , -0.5]])
    """
    check_not_negative(lr=lr, weight_decay=weight_decay)
    check_momentum(momentum, nesterov)
    if momentum and momentum_buffer is None:
        raise ValueError(
            f"momentum={momentum} without a momentum_buffer; pass numpy.zeros_like(parameter), the same array at each"
            " step."
        )
    _check_flag("nesterov", nesterov)
    buffers = {"momentum_buffer": momentum_buffer} if momentum else {}
    update = _checked_update(partition, update)
    parameter, grad, *buffer = _checked(parameter, grad, buffers, partition)
    numbers = float(lr), float(momentum), float(weight_decay), bool(nesterov)
    _library.sgd_step(parameter, grad, *(buffer or (None,)), partition and partition.native, update, *numbers)


def adam_step(
    parameter: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    partition: Partition | None,
    update: int | None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Perform a step of torch.optim.Adam or AdamW for the entries of one partition, in place and in one pass.

    All other entries of parameter and moments keep their bits. bfloat16 is computed in float32.

    Args:
        parameter, grad, partition, update, lr: as in sgd_step.
        exp_avg, exp_avg_sq: the moments; like parameter, zeros before the first step.
        step: the number of this partition's step, 1 for its first.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter; if decoupled, the parameter is instead multiplied by
            1 - lr * weight_decay (AdamW: Loshchilov and Hutter 2019).

    Raises:
        ValueError, TypeError: as in sgd_step.

    Example:
        >>> p = Partition.from_ids(np.array([[1, 2]], np.uint8))
        >>> weight, exp_avg, exp_avg_sq = np.zeros((3, 1, 2))
        >>> adam_step(weight, np.ones((1, 2)), exp_avg, exp_avg_sq, p, 2, step=1, lr=0.5)
        >>> weight
        array([[ 0. , -0.5]])
    """
    check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    check_step(plain(step))
    _check_flag("decoupled", decoupled)
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    update = _checked_update(partition, update)
    arrays = _checked(parameter, grad, moments, partition)
    numbers = map(float, (lr, *betas, eps, weight_decay))
    _library.adam_step(*arrays, partition and partition.native, update, plain(step), *numbers, bool(decoupled))


def _checked_update(partition: Partition | None, update: int | None) -> int:
    """Return the checked partition to step, or 1 for a parameter without partitions."""
    return 1 if partition is None else checked_number("update", update, partition)


def _checked(
    parameter: np.ndarray, grad: np.ndarray, states: dict[str, np.ndarray], partition: Partition | None
) -> list[np.ndarray]:
    """Return parameter, gradient and states with at most 4 dimensions; raise unless they can be stepped."""
    if partition is not None:
        check_weight("the parameter", parameter, partition)
    checked("the parameter", parameter)
    arrays = {"parameter": parameter, "grad": check_like("grad", grad, "the parameter", parameter)}
    for name, array in states.items():
        check_like(name, array, "the parameter", parameter)
        arrays[name] = array
    for name, array in arrays.items():
        if array.shape != parameter.shape:
            raise ValueError(f"{name} has shape {array.shape} and the parameter {parameter.shape}; pass equal shapes.")
    read = {"grad": arrays.pop("grad")}
    if partition is not None and partition.defaults.stored is not None:
        read["the array of Stored"] = partition.defaults.stored
    check_writable(arrays, read=read)
    arrays = {"parameter": arrays.pop("parameter"), "grad": read["grad"], **arrays}
    if partition is None:
        if all(array.flags.c_contiguous for array in arrays.values()):
            return [array.reshape(1, -1) for array in arrays.values()]
        if parameter.ndim > 4:
            raise ValueError(f"the parameter has {parameter.ndim} dimensions; pass at most 4, or contiguous arrays.")
    return list(arrays.values())


def _check_flag(name: str, flag: bool) -> None:
    """Raise TypeError unless the flag is a bool: any non-empty string would be true."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{name}={flag!r}; pass True or False.")
