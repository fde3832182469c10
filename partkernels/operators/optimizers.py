"""Optimizer steps over the entries of one partition, in place; all other entries are left unchanged."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from partkernels.arguments import check_betas, check_momentum, check_not_negative, check_number, check_step
from partkernels.backend import dispatch
from partkernels.operators.checks import check_apart, check_entries_apart, check_weight
from partkernels.operators.registration import PLAIN, define_in_place, is_transformed
from partkernels.partition import NestedPartition, Partition

# Map and count of a tensor that is stepped entirely.
WHOLE = None, 1
# The entries to step: those of partition `update`, or all if there is no map.
_ENTRIES = "Tensor?[] maps, int[] counts, int update"
_ADAM = "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled"
_sgd = define_in_place(
    "sgd_steps",
    f"Tensor(a!)[] parameters, Tensor[] grads, Tensor(b!)[] momentum_buffers, {_ENTRIES},"
    " float lr, float momentum, float weight_decay, bool nesterov",
)
# The numbers of a step, in the order of the operators' arguments.
SGD_NUMBERS = "lr", "momentum", "weight_decay", "nesterov"
ADAM_NUMBERS = "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled"
# Step numbers change at every call and are symbolic, so that compiled code is not recompiled.
_adam = define_in_place(
    "adam_steps",
    f"Tensor(a!)[] parameters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, {_ENTRIES},"
    f" SymInt[] steps, {_ADAM}",
)
_counted_adam = define_in_place(
    "counted_adam_steps",
    f"Tensor(a!)[] parameters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, {_ENTRIES},"
    f" Tensor(d!)[] counters, int place, {_ADAM}",
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
    """Apply torch.optim.SGD's step to the entries of one partition, in place and in one pass.

    All other entries of parameter and momentum_buffer are left unchanged. bfloat16 and float16 are computed in float32.

    Args:
        parameter: floating point, of the partition's shape; any strides.
        grad: dense; like parameter in shape, dtype and device. Its entries outside the partition are ignored.
        momentum_buffer: like parameter, zeros before the first step; None if momentum is 0.
        partition: the parameter's partition; None steps every entry.
        update: the partition that is stepped, 1..C; ignored without a partition.
        lr: the learning rate.
        momentum: the momentum factor, without dampening.
        weight_decay: adds weight_decay * parameter to the gradient.
        nesterov: whether to use Nesterov momentum, which needs momentum > 0.

    Raises:
        ValueError: a number is out of range, update does not fit the partition, a tensor does not fit the parameter, or
            a written tensor shares memory with another tensor. Nothing is changed.
        TypeError: the parameter is not floating point, or a tensor is missing.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> weight = torch.zeros(1, 2)
        >>> sgd_step(weight, torch.ones(1, 2), None, p, 2, lr=0.5)
        >>> weight
        tensor([[ 0.0000, -0.5000]])
    """
    if momentum and momentum_buffer is None:
        raise ValueError(
            f"momentum={momentum} without a momentum_buffer; pass torch.zeros_like(parameter), and the same tensor at"
            " every step."
        )
    numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    sgd_steps([parameter], [grad], [momentum_buffer] if momentum else [], [partition], update, **numbers)


def sgd_steps(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    partitions: Sequence[Partition | None],
    update: int | None,
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """Apply sgd_step to several parameters in one call, with little overhead per parameter.

    Args:
        parameters, grads, partitions: sequences of the same length; any shapes, dtypes and devices.
        momentum_buffers: one per parameter; empty if momentum is 0.
        update, lr, momentum, weight_decay, nesterov: as in sgd_step.

    Raises:
        ValueError, TypeError: as in sgd_step, or the sequences differ in length. Nothing is changed.

    Example:
        >>> weights = [torch.zeros(2), torch.zeros(1, 3)]
        >>> sgd_steps(weights, [torch.ones(2), torch.ones(1, 3)], [], [None, None], None, lr=0.5)
        >>> weights
        [tensor([-0.5000, -0.5000]), tensor([[-0.5000, -0.5000, -0.5000]])]
    """
    check_not_negative(lr=lr, weight_decay=weight_decay)
    check_momentum(momentum, nesterov)
    _check(parameters, grads, {"momentum_buffer": momentum_buffers} if momentum else {}, partitions, update)
    lists = (parameters, grads, momentum_buffers) if momentum else (parameters, grads)
    for maps, counts, (own, own_grads, *buffers) in _alike(partitions, update, *lists):
        numbers = lr, momentum, weight_decay, nesterov
        _sgd(own, own_grads, *(buffers or ([],)), maps, counts, _number(update), *numbers, dispatch.requested())


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
    """Apply torch.optim.Adam's or AdamW's step to the entries of one partition, in place and in one pass.

    All other entries of parameter and moments are left unchanged. bfloat16 and float16 are computed in float32.

    Args:
        parameter, grad, partition, update, lr: as in sgd_step.
        exp_avg, exp_avg_sq: the moments; like parameter, zeros before the first step.
        step: the number of this partition's step, starting at 1.
        betas: the decay rates of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: adds weight_decay * parameter to the gradient; if decoupled, instead multiplies the parameter by
            1 - lr * weight_decay (AdamW: Loshchilov and Hutter 2019).

    Raises:
        ValueError, TypeError: as in sgd_step.

    Example:
        >>> p = Partition.from_ids(torch.tensor([[1, 2]], dtype=torch.uint8))
        >>> weight, exp_avg, exp_avg_sq = torch.zeros(3, 1, 2)
        >>> adam_step(weight, torch.ones(1, 2), exp_avg, exp_avg_sq, p, 2, step=1, lr=0.5)
        >>> weight
        tensor([[ 0.0000, -0.5000]])
    """
    adam_steps(
        [parameter], [grad], [exp_avg], [exp_avg_sq], [partition], update, steps=[step],
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled,
    )  # fmt: skip


def adam_steps(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    partitions: Sequence[Partition | None],
    update: int | None,
    *,
    steps: Sequence[int],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Apply adam_step to several parameters in one call, with little overhead per parameter.

    Args:
        parameters, grads, exp_avgs, exp_avg_sqs, partitions, steps: sequences of the same length; any shapes, dtypes
            and devices.
        update, lr, betas, eps, weight_decay, decoupled: as in adam_step.

    Raises:
        ValueError, TypeError: as in adam_step, or the sequences differ in length. Nothing is changed.

    Example:
        >>> weight, exp_avg, exp_avg_sq = torch.zeros(3, 2)
        >>> adam_steps([weight], [torch.ones(2)], [exp_avg], [exp_avg_sq], [None], None, steps=[1], lr=0.5)
        >>> weight
        tensor([-0.5000, -0.5000])
    """
    check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    for step in steps:
        check_step(step)
    _check(parameters, grads, {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}, partitions, update, steps=steps)
    numbers = lr, *betas, eps, weight_decay, decoupled
    lists = parameters, grads, exp_avgs, exp_avg_sqs, steps
    for maps, counts, (*tensors, own_steps) in _alike(partitions, update, *lists):
        _adam(*tensors, maps, counts, _number(update), own_steps, *numbers, dispatch.requested())


class Steps:
    """Steps of the same parameters again and again, where only gradients are checked: for an optimizer.

    Args:
        parameters: floating point, any dtypes and devices.
        moments: lists of tensors like the parameters: of momentum buffers, or of two moments for Adam.
        partitions: those of the parameters, none of them nested; None steps every entry.
        update: the partition that is stepped.
        counters: for Adam, the number of steps of each partition, int64 [C] for each parameter, on its device. A step
            adds 1. On a GPU the kernel reads them, so that the host does not wait and a CUDA graph can replay the step.

    Example:
        >>> weight = torch.zeros(2)
        >>> steps = Steps([weight], [], [None], 1)
        >>> steps([torch.ones(2)], lr=0.5, momentum=0.0, weight_decay=0.0, nesterov=False)
        >>> weight
        tensor([-0.5000, -0.5000])
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        partitions: Sequence[Partition | None],
        update: int,
        counters: Sequence[Tensor] | None = None,
    ) -> None:
        self._call, self._name, self._numbers = _sgd, "sgd_steps", SGD_NUMBERS
        if counters is not None:
            self._call, self._name, self._numbers = _counted_adam, "counted_adam_steps", ADAM_NUMBERS
        numbered = counters or [None] * len(parameters)
        self._groups = []
        lists = parameters, parameters, *moments, numbered, range(len(parameters))
        for maps, counts, (own, _, *rest, counting, places) in _alike(partitions, update, *lists):
            written = rest or [[]]
            tail = (maps, counts, update) if counters is None else (maps, counts, update, counting, update - 1)
            kept = [tensor for tensor in (*own, *itertools.chain(*rest), *counting) if tensor is not None]
            # Other tensors, and those in one storage, need the operator's own checks.
            is_plain = all(type(tensor) in PLAIN for tensor in kept)
            is_plain = is_plain and not any(
                tensor.is_meta or tensor.is_neg() or tensor.is_inference() for tensor in kept
            )
            storages = [tensor.untyped_storage() for tensor in kept] if is_plain else []
            ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages if one.nbytes())
            apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
            self._groups.append((places, own, written, tail, kept, ranges if is_plain and apart else None))

    def __call__(self, grads: Sequence[Tensor], **numbers: float | bool) -> None:
        """Take a step with a gradient for each parameter, and the operator's numbers by their names.

        Raises:
            ValueError: a gradient is sparse, does not fit its parameter or shares memory with a tensor that is written.
        """
        requested, ordered = dispatch.requested(), [numbers[name] for name in self._numbers]
        is_seen = torch.compiler.is_compiling() or is_transformed()
        with torch.no_grad():
            for places, own, written, tail, kept, ranges in self._groups:
                mine = [grads[i] for i in places]
                if is_seen or ranges is None or not all(map(_fits, mine, own)) or _meets(mine, ranges):
                    for grad, parameter in zip(mine, own, strict=True):
                        _check_like("grad", grad, parameter)
                    self._call(own, mine, *written, *tail, *ordered, requested)
                    continue
                backend = dispatch.choose(requested, own[0].device, own[0].dtype)
                dispatch.note(self._name, backend, requested, own[0])
                getattr(backend, self._name)(own, mine, *written, *tail, *ordered)
                increment_version(kept)


def _fits(grad: Tensor, parameter: Tensor) -> bool:
    """Return whether a gradient can be read like the parameter, without further checks."""
    return (
        type(grad) in PLAIN
        and grad.layout is torch.strided
        and grad.shape == parameter.shape
        and grad.dtype is parameter.dtype
        and grad.device == parameter.device
        and not grad.is_neg()
    )


def _meets(grads: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether the storage of a gradient reaches into one of the ascending ranges of addresses."""
    for grad in grads:
        storage = grad.untyped_storage()
        start = storage.data_ptr()
        place = bisect.bisect_right(ranges, (start + storage.nbytes(),))
        if place and ranges[place - 1][1] > start:
            return True
    return False


def _number(update: int | None) -> int:
    """Return update, or 1 without any partition, when update may be anything."""
    return update if isinstance(update, int) else 1


def _check_update(partition: Partition | None, parameter: Tensor, update: int | None) -> None:
    """Raise unless these entries of a parameter can be stepped."""
    if partition is None:
        if not parameter.is_floating_point():
            raise TypeError(f"the parameter is {parameter.dtype}; pass a floating-point parameter.")
        return
    check_weight(parameter, partition)
    if partition.defaults.stored is not None:
        check_apart(parameter, partition.defaults.stored)
    check_number("update", update, partition)


def _check(
    parameters: Sequence[Tensor], grads: Sequence[Tensor], states: dict[str, Sequence[Tensor]],
    partitions: Sequence[Partition | None], update: int | None, **others: Sequence[Any],
) -> None:  # fmt: skip
    """Raise unless all parameters can be stepped with these gradients and states."""
    lists = {"grads": grads, **states, "partitions": partitions, **others}
    for name, each in lists.items():
        if len(each) != len(parameters):
            raise ValueError(f"{len(each)} {name} for {len(parameters)} parameters; pass one for each.")
    for i, (parameter, grad, partition) in enumerate(zip(parameters, grads, partitions, strict=True)):
        _check_update(partition, parameter, update)
        _check_like("grad", grad, parameter)
        _check_written(parameter=parameter, **{name: each[i] for name, each in states.items()})


def _alike(
    partitions: Sequence[Partition | None], update: int | None, *lists: Sequence[Any]
) -> Iterator[tuple[list[Tensor | None], list[int], list[list[Any]]]]:
    """Group tensors by device and dtype of the parameters; the first list has parameters, the second gradients.

    Each block of a nested partition is stepped as a separate tensor.

    Yields:
        maps, counts, and the group's part of each list.

    Raises:
        ValueError: a gradient is sparse.
    """
    found: dict[tuple, list[tuple]] = defaultdict(list)
    for partition, *each in zip(partitions, *lists, strict=True):
        parameter, grad = each[:2]
        if grad.layout != torch.strided:
            _check_like("grad", grad, parameter)
        kind = parameter.device, parameter.dtype
        if partition is None:
            found[kind].append((*WHOLE, *each))
        elif not isinstance(partition, NestedPartition):
            found[kind].append((partition.map, partition.num_partitions, *each))
        else:
            # Blocks of one tensor go into separate calls; one call would compare each block's memory with all others.
            for place, strip in enumerate(partition.strips(update)):
                block = [one.detach()[strip] if isinstance(one, Tensor) else one for one in each]
                found[(*kind, place) if place else kind].append((*WHOLE, *block))
    for rows in found.values():
        maps, counts, *columns = map(list, zip(*rows, strict=True))
        yield maps, counts, columns


def _check_like(name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Raise unless a tensor is like the parameter, except for strides."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; pass a tensor like the parameter.")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; pass a dense tensor, such as {name}.to_dense().")
    if tensor.shape != parameter.shape:
        _raise_unlike(name, "shape", tuple(tensor.shape), tuple(parameter.shape))
    if tensor.dtype != parameter.dtype:
        _raise_unlike(name, "dtype", tensor.dtype, parameter.dtype)
    if tensor.device != parameter.device:
        _raise_unlike(name, "device", tensor.device, parameter.device)


def _raise_unlike(name: str, what: str, given: object, expected: object) -> None:
    raise ValueError(f"{name} has {what} {given} and the parameter {expected}; pass a tensor like the parameter.")


def _check_written(*, parameter: Tensor, **state: Tensor) -> None:
    """Raise ValueError unless these are like the parameter and their entries do not share memory."""
    for name, tensor in {"parameter": parameter, **state}.items():
        _check_like(name, tensor, parameter)
        check_entries_apart(name, tensor)
