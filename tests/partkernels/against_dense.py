"""What every test of a backend shares: where which backends run, dtypes, layouts, the tolerance rule as one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import partkernels as pk
from partkernels.backend import dispatch
from partkernels.backend.dispatch import READY
from partkernels.backend.plan import NAMES, use_plan
from partkernels.testing import Yardstick


@dataclass(frozen=True)
class Target:
    """A backend and a device that it serves; of a backend with several plans, one of them."""

    backend: str
    device: str
    plan: str | None = None

    def randn(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, device=self.device)

    @contextmanager
    def use(self) -> Iterator[None]:
        with pk.use_backend(self.backend), use_plan(self.plan) if self.plan else nullcontext():
            yield

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}" + (f", {self.plan}" if self.plan else "")


_READY = [name for name, status in pk.backends().items() if status == READY]
# Every backend that runs on the host, besides the reference.
BACKENDS = [name for name in _READY if name == "cpu"]
# Everything that is held against dense PyTorch: also, where there is a GPU, whatever runs there.
TARGETS = [Target(name, "cpu") for name in BACKENDS]
if torch.cuda.is_available():
    TARGETS += [Target(name, "cuda") for name in _READY if name == "reference"]
    TARGETS += [Target(name, "cuda", plan) for plan in NAMES for name in _READY if name == "cuda"]
# Without a GPU its kernels are interpreted.
TRITON = [Target("triton", *dispatch.BACKENDS["triton"].devices, plan) for plan in NAMES if "triton" in _READY]
TARGETS += TRITON
# Where there is but one way: not by each plan again.
BY_ONE_PLAN = [target for target in TARGETS if target.plan != "rebuild"]
# Of the backends that run on the host, those that are interpreted.
INTERPRETED = ["triton"] if any(target.device == "cpu" for target in TRITON) else []
# On a device's own arithmetic, at its own speed: the interpreter's sums are NumPy's, and take seconds.
COMPILED = [target for target in TARGETS if target.backend not in INTERPRETED]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LAYOUTS = ["contiguous", "transposed", "sliced", "expanded", "channels_last", "negated"]


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of the same shape (and, but for 'expanded', of the same values) in another layout."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "expanded":  # stride 0
        return tensor[:1].expand(tensor.shape)
    if layout == "negated":  # a view that says so; its memory has the opposite numbers
        return torch._neg_view(-tensor)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def assert_within_twice_dense_error(got: Tensor, dense: Callable[[torch.dtype], Tensor]) -> None:
    """The tolerance rule (see Yardstick) for a result and the dense operator that it stands for."""
    Yardstick(dense, got.dtype).check(got)
