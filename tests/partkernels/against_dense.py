"""What every test of a backend shares: one tolerance rule and one way to poison memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from partkernels.dispatch import READY, backends

# Every backend that runs here is held against the reference.
BACKENDS = [name for name, status in backends().items() if status == READY and name != "reference"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are filled with NaN, so that an entry that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def assert_within_twice_dense_error(got: Tensor, dense: Callable[[torch.dtype], Tensor]) -> None:
    """The tolerance rule: at most twice the error that the dense operator of the same dtype makes against float64.

    Args:
        got: the result under test.
        dense: computes the result with plain PyTorch in a dtype.
    """
    truth = dense(torch.float64)
    assert got.shape == truth.shape
    assert got.isfinite().all(), "an entry was never written"
    if truth.numel() == 0:
        return
    # Nothing is more precise than float64 here: its error is float32's, scaled by their precisions, and what is
    # called the truth has it too.
    is_double = got.dtype == torch.float64
    measured = torch.float32 if is_double else got.dtype
    scale = torch.finfo(got.dtype).eps / torch.finfo(measured).eps
    error = (dense(measured).double() - truth).abs().max() * scale
    # Rounding the result costs half a unit in the last place, whatever luck the dense operator had.
    error = torch.maximum(error, truth.abs().max() * torch.finfo(got.dtype).eps / 2)
    assert (got.double() - truth).abs().max() <= (3 if is_double else 2) * error
