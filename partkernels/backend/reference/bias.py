from __future__ import annotations

from torch import Tensor


def empty_grad_bias(grad_output: Tensor, dim: int, update: int, count: int, *_: object) -> Tensor:
    return grad_output.new_empty(count, grad_output.shape[dim])


def grad_bias(grad_output: Tensor, dim: int, update: int, count: int) -> Tensor:
    """Return the gradient of a bias [C, out]: grad_output summed over all but `dim` in row update, 0 elsewhere."""
    others = [d for d in range(grad_output.dim()) if d != dim % grad_output.dim()]
    grad = grad_output.new_zeros(count, grad_output.shape[dim])
    grad[update - 1] = grad_output.sum(others) if others else grad_output
    return grad
