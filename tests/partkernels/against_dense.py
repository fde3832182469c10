"""What every test of a backend shares: where which backends run, the dtypes, and the tolerance rule as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partkernels.dispatch import READY, backends
from partkernels.testing import Yardstick


@dataclass(frozen=True)
class Target:
    """A backend and a device that it serves."""

    backend: str
    device: str

    def randn(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, device=self.device)

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}"


_READY = [name for name, status in backends().items() if status == READY]
# Every backend that runs on the host, besides the reference.
BACKENDS = [name for name in _READY if name == "cpu"]
# Everything that is held against dense PyTorch: also, where there is a GPU, whatever runs there.
TARGETS = [Target(name, "cpu") for name in BACKENDS]
if torch.cuda.is_available():
    TARGETS += [Target(name, "cuda") for name in _READY if name != "cpu"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def assert_within_twice_dense_error(got: Tensor, dense: Callable[[torch.dtype], Tensor]) -> None:
    """The tolerance rule (see Yardstick) for a result and the dense operator that it stands for."""
    Yardstick(dense, got.dtype).check(got)
