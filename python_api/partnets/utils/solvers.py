"""Linear equations with a matrix of which only products are known, as a Hessian's: by few of them, or as a series."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(product: Callable[[Tensor], Tensor], right: Tensor, most: int) -> Tensor:
    """x with A x = right of a positive definite A, by at most so many products with it."""
    solution, residual = torch.zeros_like(right), right
    direction, square = right, right @ right
    # Below the dtype's resolution a residual's curvature is noise.
    enough = square * torch.finfo(right.dtype).eps ** 2
    for _ in range(most):
        if square <= enough:
            break
        image = product(direction)
        curvature = direction @ image
        if not curvature > 0:
            least = (curvature / (direction @ direction)).item()
            raise ArithmeticError(
                f"the training loss has curvature {least:.3g} along a conjugate gradient, damping included, where a"
                f" minimum has more than 0; add more than {abs(least):.3g} to damping, or take more inner steps."
            )
        length = square / curvature
        solution, residual = solution + length * direction, residual - length * image
        square, last = residual @ residual, square
        direction = residual + square / last * direction
    return solution


def neumann(product: Callable[[Tensor], Tensor], right: Tensor, terms: int, alpha: float) -> Tensor:
    """alpha Σ_{j<terms} (I - alpha A)ʲ right, which tends to A⁻¹ right."""
    total = term = right
    for _ in range(terms - 1):
        term = term - alpha * product(term)
        total = total + term
    if term.norm() > right.norm():
        raise ArithmeticError(
            f"the Neumann series grows: its last of {terms} terms is {(term.norm() / right.norm()).item():.3g} times"
            f" as long as its first; pass a lower alpha than {alpha}, or, where the training loss has negative"
            " curvature, damping."
        )
    return alpha * total
