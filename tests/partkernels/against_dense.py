"""Shared tools of the backends' tests: targets, dtypes, layouts, layers, and the comparison with dense PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partkernels as pk
from partkernels.backend import dispatch
from partkernels.backend.dispatch import READY
from partkernels.backend.plan import NAMES, use_plan
from partkernels.testing import Yardstick, poisoned_memory


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
# With the definition itself.
EVERY = [Target("reference", "cpu"), *BY_ONE_PLAN]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LAYOUTS = ["contiguous", "transposed", "sliced", "expanded", "channels_last", "negated"]
KINDS = ["zeros", "uniform", "normal", "stored"]


def defaults_of(kind: str, shape: Sequence[int], dtype: torch.dtype) -> pk.Defaults:
    return {
        "zeros": lambda: pk.Zeros(),
        "uniform": lambda: pk.Uniform(0.5, seed=2**61 + 5, stream=2**35),
        "normal": lambda: pk.Normal(0.5, seed=3),
        "stored": lambda: pk.Stored(torch.randn(shape).to(dtype)),
    }[kind]()


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


def assert_within_twice_dense_error(got: Tensor, dense: Callable[[torch.dtype], Tensor], _: Any = None) -> None:
    """Check a result against its dense operator by the tolerance rule (see Yardstick)."""
    Yardstick(dense, got.dtype).check(got)


@dataclass
class Case:
    """A layer: the name of its operator here and in torch.nn.functional, the shapes of x and weight, its geometry."""

    operator: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: dict = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        is_transposed = "transpose" in self.operator
        return self.weight[1] * self.geometry.get("groups", 1) if is_transposed else self.weight[0]

    def dense(self, x, weight, bias):
        return getattr(F, self.operator)(x, weight, bias, **self.geometry)

    def ours(self, x, weight, partition, active, update=None, **bias):
        return getattr(pk, self.operator)(x, weight, partition, active, update=update, **bias, **self.geometry)


LINEAR = {
    "one": Case("linear", (1, 1), (1, 1)),
    "vector": Case("linear", (5,), (3, 5)),
    "odd": Case("linear", (37, 61), (53, 61)),
    "blocks": Case("linear", (203, 530), (197, 530)),
    "three dimensions": Case("linear", (3, 7, 65), (130, 65)),
    "empty batch": Case("linear", (0, 3, 2, 9), (4, 9)),  # strides of an empty tensor may not collapse
    "small batch": Case("linear", (2, 1030), (100, 1030)),
    "a tile's rows": Case("linear", (12, 1030), (100, 1030)),
}
CONV2D = {
    "one": Case("conv2d", (1, 1, 1, 1), (1, 1, 1, 1)),
    "mnist": Case("conv2d", (7, 1, 14, 14), (20, 1, 5, 5), {"padding": 2}),
    "odd": Case("conv2d", (3, 5, 9, 11), (7, 5, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    "groups": Case("conv2d", (2, 6, 8, 7), (9, 2, 3, 3), {"groups": 3, "padding": 1, "stride": 2}),
    "depthwise": Case("conv2d", (8, 5, 9, 9), (10, 1, 3, 3), {"groups": 5}),
    "deep": Case("conv2d", (2, 70, 6, 6), (100, 70, 3, 3), {"padding": "same"}),
    "even kernel, same": Case("conv2d", (2, 3, 6, 5), (4, 3, 4, 2), {"padding": "same"}),
    "unbatched": Case("conv2d", (3, 8, 8), (4, 3, 3, 3), {"stride": 3, "padding": 4}),
    "empty batch": Case("conv2d", (0, 3, 6, 6), (4, 3, 3, 3)),
    "one channel": Case("conv2d", (3, 1, 12, 37), (5, 1, 4, 3), {"padding": (2, 0)}),
    "few channels": Case("conv2d", (2, 3, 9, 21), (7, 3, 3, 2), {"padding": (5, 1), "dilation": (2, 3)}),
    "few channels, large": Case("conv2d", (1, 4, 50, 70), (70, 4, 3, 3), {"padding": 1}),
    "sixty-four channels": Case(
        "conv2d", (3, 64, 7, 5), (70, 64, 3, 2), {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 2)}
    ),
    "sixty-four channels a group": Case("conv2d", (2, 128, 5, 6), (10, 64, 2, 3), {"groups": 2, "padding": 1}),
    "two channels, cropped": Case("conv2d", (2, 2, 8, 7), (6, 2, 1, 1), {"padding": 2}),
    "twenty channels": Case("conv2d", (3, 20, 10, 9), (14, 20, 5, 5), {"padding": 2}),
    "ten channels": Case("conv2d", (3, 10, 10, 9), (14, 10, 3, 3)),
}
# Operators that reuse conv2d's kernels. Transposed convolutions have weights [in, out / groups, ...].
OTHERS = {
    "conv1d": Case("conv1d", (2, 4, 9), (6, 4, 3)),
    "conv1d, groups": Case("conv1d", (2, 4, 9), (6, 2, 3), {"groups": 2, "stride": 2, "padding": 1}),
    "conv1d, same": Case("conv1d", (4, 9), (6, 4, 4), {"padding": "same", "dilation": 2}),
    "conv1d, empty": Case("conv1d", (0, 4, 9), (6, 4, 1), {"padding": "valid"}),
    "conv_transpose1d": Case("conv_transpose1d", (2, 4, 9), (4, 6, 3)),
    "conv_transpose1d, groups": Case(
        "conv_transpose1d", (2, 4, 9), (4, 3, 3), {"groups": 2, "stride": 3, "padding": 1, "output_padding": 2}
    ),
    "conv_transpose1d, unbatched": Case("conv_transpose1d", (4, 9), (4, 6, 2), {"dilation": 2}),
    "conv_transpose1d, dilated": Case(
        "conv_transpose1d", (2, 4, 9), (4, 6, 2), {"stride": 2, "dilation": 4, "output_padding": 3}
    ),
    "conv_transpose2d": Case("conv_transpose2d", (2, 4, 7, 5), (4, 6, 3, 3)),
    "conv_transpose2d, groups": Case(
        "conv_transpose2d",
        (2, 4, 7, 5),
        (4, 3, 3, 2),
        {"groups": 2, "stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)},
    ),
    "conv_transpose2d, unbatched": Case("conv_transpose2d", (4, 7, 5), (4, 6, 2, 3), {"dilation": (1, 2)}),
    "conv_transpose2d, empty": Case("conv_transpose2d", (0, 4, 7, 5), (4, 6, 3, 3)),
    "conv_transpose2d, dilated": Case(
        "conv_transpose2d",
        (2, 4, 7, 5),
        (4, 3, 2, 3),
        {"groups": 2, "dilation": (3, 1), "output_padding": (2, 0), "padding": (1, 0)},
    ),
    # torch's conv2d_input rejects this output_padding, which conv_transpose2d accepts.
    "conv_transpose2d, padded": Case(
        "conv_transpose2d", (2, 3, 5, 5), (3, 4, 3, 3), {"stride": 2, "output_padding": 2, "dilation": 3}
    ),
}
CASES = {f"{case.operator} {name}": case for cases in (LINEAR, CONV2D) for name, case in cases.items()} | OTHERS


def partition_of(case: Case, kind: str = "uniform", dtype: torch.dtype = torch.float32, count: int = 3) -> pk.Partition:
    defaults = defaults_of(kind, case.weight, dtype)
    return pk.Partition.random(case.weight, [1 / count] * count, seed=11, defaults=defaults)


def check(
    case: Case,
    target: Target,
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "uniform",
    numbers: tuple[int, int, int | None] = (3, 2, 2),
    layout: str = "contiguous",
    has_rows: bool = False,
) -> None:
    """Compare one case with the dense operator.

    Args:
        numbers: the number of partitions, `active` and `update`.
        layout: of x, weight and the output's gradient.
        has_rows: whether the bias has a row for each partition.
    """
    count, active, update = numbers
    partition = partition_of(case, kind, dtype, count).to(target.device)
    x, weight = (in_layout(target.randn(shape).to(dtype), layout) for shape in (case.x, case.weight))
    bias = target.randn((count, case.outputs) if has_rows else (case.outputs,)).to(dtype)
    given = {"x": x, "weight": weight, "partition": partition, "active": active, "update": update, "bias": bias}
    compare(getattr(pk, case.operator), given | case.geometry, target, layout)


def compare(
    function: Callable,
    arguments: dict[str, Any],
    target: Target,
    grad_layout: str = "contiguous",
    near: Callable[..., None] = assert_within_twice_dense_error,
) -> None:
    """Compare output and gradients of a product with the dense operator on the materialised weight.

    Args:
        arguments: x, weight, partition, active, update, bias (None, a vector, or a row for each partition), geometry.
        near: a function of our tensor, one that computes the dense tensor in a dtype, and one that computes for each
            entry the sum of the absolute values of its terms.
    """
    geometry = dict(arguments)
    x, weight, bias = (geometry.pop(name) for name in ("x", "weight", "bias"))
    partition, active, update = (geometry.pop(name) for name in ("partition", "active", "update"))
    with pk.use_backend("reference"):
        subnetwork = pk.subnetwork_weight(weight, partition, active)
    x, weight, bias = (None if t is None else t.detach().requires_grad_() for t in (x, weight, bias))
    has_rows = bias is not None and bias.dim() == 2
    with target.use(), poisoned_memory():
        y = function(**arguments | {"x": x, "weight": weight, "bias": bias})
        grad = in_layout(target.randn(y.shape).to(y.dtype), grad_layout)
        leaves = [t for t in (x, weight, bias) if t is not None]
        ours = [y.detach(), *torch.autograd.grad(y, leaves, grad, allow_unused=True)]
    assert y.dtype == weight.dtype

    @functools.cache
    def dense(dtype: torch.dtype, absolute: bool = False) -> list[Tensor]:
        leaves = [t.detach().to(dtype) for t in (x, subnetwork, bias) if t is not None]
        leaves = [(leaf.abs() if absolute else leaf.clone()).requires_grad_() for leaf in leaves]
        vector = None if bias is None else leaves[2][:active].sum(0) if has_rows else leaves[2]
        out = grad.to(dtype)
        with poisoned_memory():  # in deterministic mode, cuDNN adds in another order
            y = getattr(F, function.__name__)(*leaves[:2], vector, **geometry)
            return [y.detach(), *torch.autograd.grad(y, leaves, out.abs() if absolute else out)]

    def check_one(got: Tensor, i: int, row: Any = ...) -> None:
        near(got, lambda dtype: dense(dtype)[i][row], lambda: dense(torch.float64, True)[i][row])

    check_one(ours[0], 0)
    check_one(ours[1], 1)
    if update is None:
        assert ours[2] is None
    else:
        mask = partition.mask(update).to(weight.device)
        assert ours[2].shape == weight.shape
        assert (ours[2][~mask] == 0).all(), "other partitions' gradient should be exactly 0"
        # Compare with the error of the complete dense gradient, not only with this partition's few entries.
        check_one(torch.where(mask, ours[2], dense(torch.float64)[2].to(weight.dtype)), 2)
    if has_rows and update is None:
        assert ours[3] is None
    elif has_rows:
        others = torch.arange(partition.num_partitions, device=bias.device) != update - 1
        assert not ours[3][others].any(), "other rows' gradient should be exactly 0"
        check_one(ours[3][update - 1], 3, 0)
    elif bias is not None:
        check_one(ours[3], 3)
