"""Optimisers' steps over the entries of one partition, in place; all other entries keep their bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partkernels.backend import dispatch
from partkernels.operators.checks import check_weight
from partkernels.operators.registration import define_in_place
from partkernels.partition import NestedPartition, Partition

# Of a tensor all of whose entries are stepped.
WHOLE = None, 1, 1
# Which entries are stepped: those of partition `update`, or without a map all.
_ENTRIES = "Tensor? map, int count, int update"
_sgd = define_in_place(
    "sgd_step",
    f"Tensor(a!) parameter, Tensor grad, Tensor(b!)? momentum_buffer, {_ENTRIES},"
    " float lr, float momentum, float weight_decay, bool nesterov",
)
# The number of the step changes at every call: a symbol, so that compiled code need not be compiled again.
_adam = define_in_place(
    "adam_step",
    f"Tensor(a!) parameter, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, {_ENTRIES},"
    " SymInt step, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled",
)


def sgd_step(
    parameter: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    partition: Partition | None,
    update: int | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """What torch.optim.SGD does to the entries of one partition, in place and in one pass.

    All other entries of parameter and momentum_buffer keep their bits. bfloat16 and float16 are computed in float32.

    Args:
        parameter: floating point, of the partition's shape; any strides.
        grad: dense; like parameter in shape, dtype and device. Its entries outside the partition have no influence.
        momentum_buffer: like parameter, zeros before the first step; None if momentum is 0.
        partition: of the parameter; None steps every entry.
        update: the partition that is stepped, 1..C; without a partition it has no meaning.
        lr: the learning rate.
        momentum: of the buffer; there is no dampening.
        weight_decay: added to the gradient, times the parameter.
        nesterov: Nesterov's momentum; needs one.

    Raises:
        ValueError: a number is out of range, update does not fit the partition, or a tensor does not fit the
            parameter, or what is written shares memory with another tensor. Nothing has changed then.
        TypeError: the parameter is not floating point, or a tensor is missing.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> weight = torch.zeros(1, 2)
        >>> sgd_step(weight, torch.ones(1, 2), None, p, 2, lr=0.5)
        >>> weight
        tensor([[ 0.0000, -0.5000]])
    """
    check_not_negative(lr=lr, weight_decay=weight_decay)
    check_momentum(momentum, nesterov)
    entries = _entries(parameter, partition, update)
    _check_like("grad", grad, parameter)
    if momentum == 0:
        momentum_buffer = None
    elif momentum_buffer is None:
        raise ValueError(
            f"momentum={momentum} without a momentum_buffer; pass torch.zeros_like(parameter), and the same at each"
            " step."
        )
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    _check_written(parameter=parameter, **states)
    for (own, own_grad, own_buffer), which in _blocks(partition, update, entries, parameter, grad, momentum_buffer):
        _sgd(own, own_grad, own_buffer, *which, lr, momentum, weight_decay, nesterov, dispatch.requested())


def adam_step(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
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
    """What torch.optim.Adam or AdamW does to the entries of one partition, in place and in one pass.

    All other entries of parameter and moments keep their bits. bfloat16 and float16 are computed in float32.

    Args:
        parameter, grad, partition, update, lr: as for sgd_step.
        exp_avg, exp_avg_sq: the moments; like parameter, zeros before the first step.
        step: the number of this partition's step, 1 for its first.
        betas: of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: added to the gradient, times the parameter; if decoupled, the parameter is instead multiplied by
            1 - lr * weight_decay (AdamW: Loshchilov and Hutter 2019).

    Raises:
        ValueError, TypeError: as sgd_step.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> weight, exp_avg, exp_avg_sq = torch.zeros(3, 1, 2)
        >>> adam_step(weight, torch.ones(1, 2), exp_avg, exp_avg_sq, p, 2, step=1, lr=0.5)
        >>> weight
        tensor([[ 0.0000, -0.5000]])
    """
    check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"step={step!r}; pass the number of this partition's step, 1 for its first.")
    entries = _entries(parameter, partition, update)
    _check_like("grad", grad, parameter)
    _check_written(parameter=parameter, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    numbers = step, lr, *betas, eps, weight_decay, decoupled
    for tensors, which in _blocks(partition, update, entries, parameter, grad, exp_avg, exp_avg_sq):
        _adam(*tensors, *which, *numbers, dispatch.requested())


def check_not_negative(**numbers: float) -> None:
    """Raises ValueError, which names it, for the first number that is negative, infinite or NaN."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name}={number}; pass a finite number that is not negative.")


def check_momentum(momentum: float, nesterov: bool) -> None:
    """Raises ValueError unless SGD can run with these."""
    check_not_negative(momentum=momentum)
    if nesterov and momentum == 0:
        raise ValueError("nesterov=True with momentum=0; pass a positive momentum.")


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ValueError unless Adam can run with these."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}; pass two numbers in [0, 1).")


def _entries(parameter: Tensor, partition: Partition | None, update: int | None) -> tuple[Tensor | None, int, int]:
    """The arguments of an operator that say which entries are stepped, checked."""
    if partition is None:
        if not parameter.is_floating_point():
            raise TypeError(f"the parameter is {parameter.dtype}; pass a floating-point parameter.")
        return WHOLE
    check_weight(parameter, partition)
    if isinstance(update, bool) or not isinstance(update, int) or not 1 <= update <= partition.count:
        count = partition.count
        raise ValueError(f"update={update!r}, but this partition has {count} parts; pass an int in 1..{count}.")
    return partition.map, partition.count, update


def _blocks(
    partition: Partition | None, update: int | None, entries: tuple, *tensors: Tensor | None
) -> Iterator[tuple[Sequence[Tensor | None], tuple]]:
    """The tensors, and which of their entries are stepped; of a nested partition each of its blocks, as a whole."""
    if not isinstance(partition, NestedPartition):
        yield tensors, entries
        return
    for strip in partition.strips(update):
        yield [None if tensor is None else tensor.detach()[strip] for tensor in tensors], WHOLE


def _check_like(name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Raises ValueError unless a tensor is like the parameter, but for its strides."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; pass a tensor like the parameter.")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; pass a dense tensor, as {name}.to_dense() is.")
    if tensor.shape != parameter.shape:
        _raise_unlike(name, "shape", tuple(tensor.shape), tuple(parameter.shape))
    if tensor.dtype != parameter.dtype:
        _raise_unlike(name, "dtype", tensor.dtype, parameter.dtype)
    if tensor.device != parameter.device:
        _raise_unlike(name, "device", tensor.device, parameter.device)


def _raise_unlike(name: str, what: str, given: object, expected: object) -> None:
    raise ValueError(f"{name} has {what} {given} and the parameter {expected}; pass a tensor like the parameter.")


def _check_written(*, parameter: Tensor, **state: Tensor) -> None:
    """Raises ValueError unless these are like the parameter and each of their entries has memory of its own."""
    for name, tensor in {"parameter": parameter, **state}.items():
        _check_like(name, tensor, parameter)
        if tensor.is_contiguous():  # the usual case, at a tenth of the cost
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"{name} is expanded: several of its entries share memory and cannot be stepped apart; pass"
                f" {name}.contiguous()."
            )
