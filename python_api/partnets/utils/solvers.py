"""Solvers of linear equations from products with a matrix, such as a Hessian: conjugate gradients, Neumann series."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor, most: int) -> Tensor:
    """Solve A x = right for a positive definite A by at most `most` products with A."""
    solution, residual = torch.zeros_like(right), right
    direction, square = right, right @ right
    # Below the dtype's resolution, the curvature along a residual is noise.
    enough = square * torch.finfo(right.dtype).eps ** 2
    for _ in range(most):
        if square <= enough:
            break
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:
            least = (curvature / (direction @ direction)).item()
            raise ArithmeticError(
                f"the training loss has curvature {least:.3g} along a conjugate gradient, including damping, but it"
                f" must be positive; add more than {abs(least):.3g} to damping, or take more inner steps."
            )
        length = square / curvature
        solution, residual = solution + length * direction, residual - length * image
        square, last = residual @ residual, square
        direction = residual + square / last * direction
    return solution


def neumann(product: Callable[[Tensor], Tensor], right: Tensor, terms: int, alpha: float) -> Tensor:
    """Compute alpha Σ_{j<terms} (I - alpha A)ʲ right, which converges to A⁻¹ right."""
    total = term = right
    for _ in range(terms - 1):
        term = term - alpha * product(term)
        total = total + term
    if not term.norm() <= right.norm():  # also if it has overflowed
        raise ArithmeticError(
            f"the Neumann series grows: its last of {terms} terms is {(term.norm() / right.norm()).item():.3g} times"
            f" as long as its first; pass a lower alpha than {alpha}, or damping if the training loss has negative"
            " curvature."
        )
    return alpha * total
