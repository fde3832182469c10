from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from partkernels.arguments import bits_for
from partkernels.formats.packed_map import unpack_weight


def _owned(parameter: Tensor, map: Tensor | None, count: int, update: int) -> Tensor:
    """Return True at the entries that are stepped."""
    if map is None:
        return torch.ones_like(parameter, dtype=torch.bool)
    return unpack_weight(map, tuple(parameter.shape), bits_for(count)) == update - 1


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast the tensors to the dtype in which steps are computed: float64 for float64, otherwise float32."""
    return [None if t is None else t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _replace(tensor: Tensor, owned: Tensor, new: Tensor) -> None:
    torch.where(owned, new.to(tensor.dtype), tensor, out=tensor)


def sgd_steps(
    parameters: list[Tensor], grads: list[Tensor], momentum_buffers: list[Tensor], maps: list[Tensor | None],
    counts: list[int], *rest: Any,
) -> None:  # fmt: skip
    """Apply torch.optim.SGD's step to the entries of one partition of each parameter."""
    buffers = momentum_buffers or [None] * len(parameters)
    for each in zip(parameters, grads, buffers, maps, counts, strict=True):
        _sgd_step(*each, *rest)


def adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, steps: list[int], *rest: Any,
) -> None:  # fmt: skip
    """Apply torch.optim.Adam's step, or AdamW's if decoupled, to the entries of one partition of each parameter."""
    for *each, step in zip(parameters, grads, exp_avgs, exp_avg_sqs, maps, counts, steps, strict=True):
        _adam_step(*each, update, step, *rest)


def counted_adam_steps(
    parameters: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    maps: list[Tensor | None], counts: list[int], update: int, counters: list[Tensor], place: int, *rest: Any,
) -> None:  # fmt: skip
    """Count a step of each parameter, and apply adam_steps; on a GPU, this waits for the numbers of steps."""
    steps = [counter[place].add_(1).item() for counter in counters]
    adam_steps(parameters, grads, exp_avgs, exp_avg_sqs, maps, counts, update, steps, *rest)


def _sgd_step(
    parameter: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    map: Tensor | None,
    count: int,
    update: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    owned = _owned(parameter, map, count, update)
    p, g, buffer = _wide(parameter, grad, momentum_buffer)
    if weight_decay:
        g = g + weight_decay * p
    if momentum_buffer is not None:
        buffer = momentum * buffer + g
        g = g + momentum * buffer if nesterov else buffer
        _replace(momentum_buffer, owned, buffer)
    _replace(parameter, owned, p - lr * g)


def _adam_step(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    map: Tensor | None,
    count: int,
    update: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    owned = _owned(parameter, map, count, update)
    p, g, mean, square = _wide(parameter, grad, exp_avg, exp_avg_sq)
    if weight_decay and decoupled:
        p = p * (1 - lr * weight_decay)
    elif weight_decay:
        g = g + weight_decay * p
    mean = mean.lerp(g, 1 - beta1)
    square = beta2 * square + (1 - beta2) * g * g
    denominator = square.sqrt() / math.sqrt(1 - beta2**step) + eps
    _replace(parameter, owned, p - lr / (1 - beta1**step) * mean / denominator)
    _replace(exp_avg, owned, mean)
    _replace(exp_avg_sq, owned, square)
