"""Tools to test and benchmark a backend: a tolerance rule, and memory filled with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Yardstick:
    """A tolerance rule: at most twice the error that the dense operator of the same dtype makes against float64.

    Args:
        dense: computes the result with plain PyTorch in a dtype.
        dtype: the dtype of the results under test.

    Attributes:
        truth: the result in float64.
        allowed: the largest absolute error that passes, and the largest root mean square of all errors.

    Example:
        >>> x = torch.rand(8, 8)
        >>> yardstick = Yardstick(lambda dtype: x.to(dtype) @ x.to(dtype), torch.float32)
        >>> yardstick.check(x @ x)
        >>> yardstick.check(x @ x + 1e-3)
        Traceback (most recent call last):
        AssertionError: the result is off by 1.0e-03...
    """

    def __init__(self, dense: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
        self.truth = dense(torch.float64)
        # No higher precision than float64 is available here, so its error is estimated as float32's, scaled by their
        # precisions. The float64 truth has this error too.
        is_double = dtype == torch.float64
        measured = torch.float32 if is_double else dtype
        if self.truth.numel() == 0:
            self.allowed = 0.0, 0.0
            return
        largest, spread = _size(dense(measured), self.truth)
        # With few entries the largest error is chance. One in two million normal errors exceeds 5 standard deviations.
        errors = max(largest, 5 * spread), spread
        # Rounding the result costs half a unit in the last place, however small the dense operator's error was.
        least = self.truth.abs().max().item() * torch.finfo(dtype).eps / 2
        scale = torch.finfo(dtype).eps / torch.finfo(measured).eps
        self.allowed = tuple((3 if is_double else 2) * max(error * scale, least) for error in errors)

    def check(self, got: Tensor, *, slack: float = 1.0) -> None:
        """Raise AssertionError, stating the error, if a result is further from the truth than allowed.

        Args:
            got: the result under test.
            slack: a factor on the allowed error.
        """
        assert got.shape == self.truth.shape, f"the result has shape {tuple(got.shape)}, not {tuple(self.truth.shape)}"
        assert got.isfinite().all(), "the result has entries that are not finite; an entry may be unwritten"
        if got.numel():
            for error, allowed in zip(_size(got, self.truth), self.allowed, strict=True):
                assert error <= slack * allowed, (
                    f"the result is off by {error:.1e} from float64; {slack * allowed:.1e} is allowed"
                )


def _size(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the largest error and the root mean square of all errors."""
    errors = got.double() - truth
    return errors.abs().max().item(), errors.square().mean().sqrt().item()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill fresh tensors with NaN inside the context, which exposes entries that are never written.

    Example:
        >>> with poisoned_memory():
        ...     torch.empty(2)
        tensor([nan, nan])
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
