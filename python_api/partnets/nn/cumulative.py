"""Rows: a parameter with a row for each partition, and the sum or product of the rows that are live (Appendix I.2)."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch import Tensor, nn


def with_rows(parameter: nn.Parameter, count: int, neutral: float) -> nn.Parameter:
    """The parameter as row 1 of [count, ...], with `neutral` in all other rows; itself if count is 1.

    Example:
        >>> with_rows(nn.Parameter(torch.tensor([2.0, 3.0])), 2, neutral=1.0).tolist()
        [[2.0, 3.0], [1.0, 1.0]]
    """
    if count == 1:
        return parameter
    shape = (count, *parameter.shape)
    rows = torch.full(shape, neutral, dtype=parameter.dtype, device=parameter.device)
    rows[0] = parameter.detach()
    return nn.Parameter(rows, requires_grad=parameter.requires_grad)


def raise_without_rows(what: str, parameter: Tensor, count: int) -> NoReturn:
    """Of a parameter that somebody has assigned since: all subnetworks would read all of it."""
    raise ValueError(
        f"a {what} of shape {list(parameter.shape)} is in a layer of {count} partitions, which has a row for each;"
        f" assign [{count}, ...], the first row what it is to be and 0 in the others, or set it before"
        " partnets.partition."
    )


def live_sum(parameter: Tensor, count: int, active: int, update: int | None) -> Tensor:
    """b_1 + ... + b_active, of rows [count, ...] or, if count is 1, of the parameter itself.

    Gradients reach row `update` only; with None there are none. The value doesn't depend on update, to the bit.

    Example:
        >>> rows = torch.tensor([[1.0], [10.0], [100.0]], requires_grad=True)
        >>> live_sum(rows, count=3, active=2, update=1)
        tensor([11.], grad_fn=<SumBackward1>)
    """
    return torch.stack(_live(parameter, count, active, update)).sum(0)


def live_product(parameter: Tensor, count: int, active: int, update: int | None) -> Tensor:
    """s_1 * ... * s_active; arguments, gradients and value as for `live_sum`.

    Example:
        >>> rows = torch.tensor([[2.0], [3.0], [5.0]], requires_grad=True)
        >>> live_product(rows, count=3, active=2, update=1)
        tensor([6.], grad_fn=<MulBackward0>)
    """
    # Not torch.prod, whose gradient is result / row, inexact, and asks the device whether a row has a 0.
    return functools.reduce(torch.mul, _live(parameter, count, active, update))


def _live(parameter: Tensor, count: int, active: int, update: int | None) -> list[Tensor]:
    rows = parameter if count > 1 else parameter[None]
    if rows.dim() == 0 or len(rows) != count:
        raise_without_rows("parameter", parameter, count)
    live = list(rows.detach()[:active].unbind())
    if update is not None:
        live[update - 1] = rows[update - 1]
    return live
