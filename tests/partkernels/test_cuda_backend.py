"""The Python code of the CUDA backend: which products its kernels compute, which PyTorch computes, and their arguments.

Runs without a GPU: the reference's operators replace the kernels, and their arguments are recorded.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import partkernels as pk
from partkernels.backend import dispatch, plan, rebuilt
from partkernels.backend.cuda import operators as cuda
from partkernels.backend.reference import operators as reference

DEFAULTS = [pk.Zeros(), pk.Uniform(0.3, seed=2**40 + 7), pk.Normal(0.3, seed=9), pk.Stored(torch.ones(40, 72))]


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, tuple]]:
    """Return the list in which calls of kernels are recorded: their names and arguments."""
    seen = []

    def kernel(name: str, function):
        def call(*arguments):
            seen.append((name, arguments))
            return function(*arguments)

        return call

    kernels = {
        "linear": reference.linear,
        "subnetwork_weight": reference.subnetwork_weight,
        "subnetwork_weight_out": lambda out, *rest: out.copy_(reference.subnetwork_weight(*rest)),
        "subnetwork_weight_grad_out": lambda out, *rest: out.copy_(reference.subnetwork_weight_grad(*rest)),
    }
    operators = SimpleNamespace(**{name: kernel(name, function) for name, function in kernels.items()})
    monkeypatch.setattr(cuda, "_cuda", operators)
    monkeypatch.setattr(cuda, "_is_hopper", lambda device: True)
    return seen


def products(dtype: torch.dtype, defaults: pk.Defaults, active: int, rows: int = 3) -> dict[str, tuple]:
    """Return the arguments of each product."""
    if isinstance(defaults, pk.Stored):
        defaults = pk.Stored(torch.randn(40, 72, dtype=dtype))
    partition = pk.Partition.random((40, 72), (0.4, 0.3, 0.3), seed=1, defaults=defaults)
    x, weight, y = (torch.randn(shape).to(dtype) for shape in ((2, rows, 72), (40, 72), (2, rows, 40)))
    bias = torch.randn(3, 40).to(dtype)
    return {
        "linear": (x, weight, bias, active, None, *partition.flat()),
        "linear_grad_input": (y, weight, active, None, *partition.flat()),
        "linear_grad_weight": (y, x, active, partition.map, partition.num_partitions),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("defaults", DEFAULTS, ids=lambda defaults: type(defaults).__name__)
@pytest.mark.parametrize("chosen", plan.NAMES)
@pytest.mark.parametrize("active", [1, 3])
def test_products_are_the_references_by_each_plan(dtype, defaults, chosen, active, calls):
    for name, arguments in products(dtype, defaults, active).items():
        with plan.use_plan(chosen):
            ours = getattr(cuda, name)(*arguments)
        expected = getattr(reference, name)(*arguments)
        torch.testing.assert_close(ours, expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6)
        assert ours.stride() == expected.stride()
    fused = chosen == "fused" and dtype.itemsize == 2 and active < 3
    names = {name for name, _ in calls}
    assert ("linear" in names) == fused
    assert ("subnetwork_weight_out" in names) == (active < 3)


def test_slices_of_a_weight_are_rebuilt_from_their_part_of_the_map(monkeypatch, calls):
    monkeypatch.setattr(rebuilt, "SLICE", 64 * 130 * 4)  # fits 41 rows or 64 columns
    for count in (2, 3, 9, 40):
        partition = pk.Partition.random((130, 200), [1 / count] * count, seed=1, defaults=pk.Uniform(0.1, seed=0))
        weight = torch.randn(130, 200)
        expected = reference.subnetwork_weight(weight, 1, *partition.flat())
        y = cuda.linear(torch.eye(200), weight, None, 1, None, *partition.flat())
        rows = cuda.linear_grad_input(torch.eye(130), weight, 1, None, *partition.flat())
        assert torch.equal(y.t(), expected) and torch.equal(rows, expected)
    assert len({arguments[0].data_ptr() for _, arguments in calls[:4]}) == 1, "slices should reuse the same memory"


@pytest.mark.parametrize("chosen", plan.NAMES)
def test_an_empty_batch(chosen, calls):
    for name, arguments in products(torch.bfloat16, DEFAULTS[1], 1, rows=0).items():
        with plan.use_plan(chosen):
            ours = getattr(cuda, name)(*arguments)
        assert torch.equal(ours, getattr(reference, name)(*arguments))


@pytest.mark.parametrize(
    ("x", "is_copied"),
    [
        (torch.ones((), dtype=torch.bfloat16).expand(2, 3, 40), True),
        (torch.randn(6, 40, 2).bfloat16()[..., 0], True),
        (torch.randn(6, 41).bfloat16()[:, 1:], True),
        (torch.randn(128).bfloat16().as_strided((6, 40), (8, 1)), True),
        (torch.randn(6, 48).bfloat16()[:, :40], False),
        (torch.randn(2, 3, 40).bfloat16(), False),
    ],
    ids=["stride 0", "every other", "not aligned", "overlapping", "gaps", "dense"],
)
def test_kernels_get_rows_that_copies_of_16_bytes_take(x, is_copied, calls):
    partition = pk.Partition.random((16, 40), (0.5, 0.5), seed=0)
    weight = torch.randn(16, 40).bfloat16()
    with plan.use_plan("fused"):
        cuda.linear(x, weight, None, 1, None, *partition.flat())
    ((name, arguments),) = calls
    taken = arguments[0]
    assert name == "linear" and torch.equal(taken, x) and (taken.data_ptr() != x.data_ptr()) == is_copied
    assert not is_copied or taken.is_contiguous()


def explained(weight: torch.Tensor, rows: int, defaults: pk.Defaults | None = None) -> str:
    """Return the note of a linear layer with so many rows of x."""
    partition = pk.Partition.random(tuple(weight.shape), (0.5, 0.5), seed=0, defaults=defaults)
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    with dispatch.noting() as notes:
        notes.append("linear")
        cuda.linear(x, weight, None, 1, None, *partition.flat())
    return notes[0]


@pytest.mark.parametrize(
    ("defaults", "rows", "dtype", "is_fused", "reason"),
    [
        (pk.Uniform(0.1, 0), 8, torch.bfloat16, True, "estimated, not measured, for 8 rows of x"),
        (pk.Uniform(0.1, 0), 8192, torch.bfloat16, False, "estimated, not measured"),
        (pk.Zeros(), 1024, torch.bfloat16, True, "estimated, not measured"),
        (pk.Normal(0.1, 0), 100, torch.float16, True, "estimated, not measured"),
        (pk.Normal(0.1, 0), 1024, torch.float16, False, "estimated, not measured"),
        (pk.Zeros(), 8, torch.float32, False, "the fused kernels have no float32"),
    ],
)
def test_a_plan_and_its_reason(defaults, rows, dtype, is_fused, reason, calls):
    note = explained(torch.randn(8, 16).to(dtype), rows, defaults)
    assert reason in note and ("; fused" in note) == is_fused


@pytest.mark.parametrize(
    ("weight", "rows", "is_hopper", "reason"),
    [
        (torch.randn(16, 8).t(), 8, True, "multiples of 16 bytes"),
        (torch.randn(8, 12), 8, True, "multiples of 16 bytes"),
        (torch.randn(8, 16), 17, False, "need compute capability 9.0"),
        (torch.randn(9, 16), 17, True, "a multiple of 8 outputs"),
    ],
)
def test_operands_that_no_kernel_serves_are_rebuilt(weight, rows, is_hopper, reason, calls, monkeypatch):
    monkeypatch.setattr(cuda, "_is_hopper", lambda device: is_hopper)
    assert reason in explained(weight.bfloat16(), rows)
    assert {name for name, _ in calls} == {"subnetwork_weight_out"}


@pytest.mark.parametrize("name", ["conv2d", "conv2d_grad_input", "conv2d_grad_weight"])
@pytest.mark.parametrize("active", [1, 2])
def test_convolutions_are_torchs_own_with_a_rebuilt_weight(name, active, calls):
    partition = pk.Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0, defaults=pk.Uniform(0.1, seed=1))
    x, weight, y = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)
    geometry = (1, 1), (1, 1), (1, 1), 1
    arguments = {
        "conv2d": (x, weight, None, *geometry, active, None, *partition.flat()),
        "conv2d_grad_input": (y, weight, x.shape, *geometry, active, None, *partition.flat()),
        "conv2d_grad_weight": (y, x, (3, 3), *geometry, active, partition.map, partition.num_partitions),
    }[name]
    assert torch.equal(getattr(cuda, name)(*arguments), getattr(reference, name)(*arguments))
