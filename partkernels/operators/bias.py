"""The gradient of a bias [C, out] with one row per partition (Appendix I.2)."""

from __future__ import annotations

from torch import Tensor

from partkernels.backend.reference.bias import empty_grad_bias
from partkernels.operators.registration import define, differentiate

_grad_bias = define("grad_bias", "Tensor grad_output, int dim, int update, int count", empty_grad_bias)


def _setup_context(ctx, inputs, output):
    grad_output, ctx.dim, ctx.update, *_ = inputs
    ctx.shape = grad_output.shape


def _backward(ctx, grad):
    ones = [1] * len(ctx.shape)
    ones[ctx.dim] = -1
    return grad[ctx.update - 1].view(ones).expand(ctx.shape), *[None] * 4


differentiate("grad_bias", _setup_context, _backward)


def grad_of_rows(grad_output: Tensor, dim: int, update: int | None, count: int, backend: str) -> Tensor | None:
    """Return the gradient of bias rows [count, out], which is 0 except in row `update`; None if update is None.

    Dimension dim of grad_output has the outputs.
    """
    return None if update is None else _grad_bias(grad_output, dim, update, count, backend)
