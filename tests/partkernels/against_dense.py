"""Shared tools of the backends' tests: which backends run on which devices, dtypes, layouts and the tolerance rule."""

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
    """A backend, a device that it serves and, if the backend has several plans, one plan."""

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
# Every backend that runs on the host, except the reference.
BACKENDS = [name for name in _READY if name == "cpu"]
# All targets that are compared with dense PyTorch; with a GPU, also its backends.
TARGETS = [Target(name, "cpu") for name in BACKENDS]
if torch.cuda.is_available():
    TARGETS += [Target(name, "cuda") for name in _READY if name == "reference"]
    TARGETS += [Target(name, "cuda", plan) for plan in NAMES for name in _READY if name == "cuda"]
# Without a GPU, Triton's kernels are interpreted.
TRITON = [Target("triton", *dispatch.BACKENDS["triton"].devices, plan) for plan in NAMES if "triton" in _READY]
TARGETS += TRITON
# Targets for operators with only one plan: no repetition for each plan.
BY_ONE_PLAN = [target for target in TARGETS if target.plan != "rebuild"]
# Backends with kernels that are interpreted on the host.
INTERPRETED = ["triton"] if any(target.device == "cpu" for target in TRITON) else []
# Targets that use the device's arithmetic at full speed: the interpreter adds with NumPy and takes seconds.
COMPILED = [target for target in TARGETS if target.backend not in INTERPRETED]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LAYOUTS = ["contiguous", "transposed", "sliced", "expanded", "channels_last", "negated"]


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor of the same shape (and, except for 'expanded', the same values) in another layout."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "expanded":  # stride 0
        return tensor[:1].expand(tensor.shape)
    if layout == "negated":  # a view with the negative bit set; its memory has the negated values
        return torch._neg_view(-tensor)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def assert_within_twice_dense_error(got: Tensor, dense: Callable[[torch.dtype], Tensor]) -> None:
    """Check a result against its dense operator by the tolerance rule (see Yardstick)."""
    Yardstick(dense, got.dtype).check(got)
