"""Layers on every backend: errors of at most twice dense PyTorch's. See test_fuzz.py for all kinds of arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from against_dense import (
    BY_ONE_PLAN,
    CASES,
    COMPILED,
    DTYPES,
    EVERY,
    KINDS,
    LAYOUTS,
    TARGETS,
    Case,
    Target,
    check,
    in_layout,
    partition_of,
)
from pairwise import pairwise

import partkernels as pk
from partkernels.operators.registration import calls
from partkernels.testing import Yardstick, poisoned_memory

# When interpreted, these take seconds each, and one dtype is enough.
SLOW = [CASES[name] for name in ("linear blocks", "linear small batch", "linear a tile's rows")]
# Sums with so many terms that the order of addition determines the error; images wider than a workspace.
DEEP = {
    "forward": Case("linear", (20, 16400), (30, 16400)),
    "forward, few rows": Case("linear", (7, 16400), (90, 16400)),
    "grad_input": Case("linear", (20, 30), (16400, 30)),
    "grad_weight": Case("linear", (16400, 20), (30, 20)),
    "conv2d": Case("conv2d", (2, 1825, 4, 3), (20, 1825, 3, 3), {"padding": 1}),
    "conv2d grad_weight": Case("conv2d", (64, 3, 16, 17), (20, 3, 3, 3), {"padding": 1}),
    "wide images": Case("conv2d", (1, 1, 3, 9000), (40, 1, 3, 3), {"padding": 1}),
}


def is_worth_it(case: Case, dtype: torch.dtype, target: Target, *_) -> bool:
    """Return whether a case is neither slow nor redundant: float64 and convolutions have only one plan."""
    is_slow = target not in COMPILED and dtype != torch.bfloat16 and case in SLOW
    return not is_slow and not (target.plan == "fused" and (dtype == torch.float64 or case.operator != "linear"))


@pytest.mark.cases(full=90)
@pairwise(is_worth_it, case=CASES, dtype=DTYPES, target=TARGETS, has_rows=[False, True], layout=LAYOUTS)
def test_backends_agree_with_dense_pytorch(case, dtype, target, has_rows, layout):
    check(case, target, dtype=dtype, has_rows=has_rows, layout=layout)


@pytest.mark.cases(usual=6)
@pytest.mark.parametrize("target", COMPILED, ids=str)
@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP)
def test_errors_of_deep_products_grow_no_faster_than_dense_pytorchs(case, target):
    # Not in float64: MKL's product, which serves as the truth, had 9 times the error of ours.
    check(case, target)


@pytest.mark.cases(usual=10, full=20)
@pairwise(
    lambda case, target: is_worth_it(case, torch.float32, target),
    case={name: case for name, case in CASES.items() if case.operator in ("linear", "conv2d")},
    target=TARGETS,
)
def test_the_gradient_of_a_sum_has_stride_0_everywhere(case, target):
    # With whole numbers, every product and sum is exact, so backends must agree to the bit. On a GPU, cuDNN is exact in
    # float64 and nearly exact in float32, because it transforms images.
    partition = partition_of(case, "zeros").to(target.device)
    numbers = [target.randn(shape).mul(2).round() for shape in (case.x, case.weight)]
    results = []
    for one, dtype in ((Target("reference", target.device), torch.float64), (target, torch.float32)):
        x, weight = (tensor.to(dtype).requires_grad_() for tensor in numbers)
        with one.use(), poisoned_memory():
            y = case.ours(x, weight, partition, active=2, update=1)
            results.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    nearly = 1e-2 if case.operator == "conv2d" and target.device == "cuda" else 0
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=0, atol=nearly)


@pairwise(
    case={name: CASES[name] for name in ("linear odd", "conv2d odd", "conv_transpose2d, groups")},
    numbers=[(1, 1, 1), (2, 1, None), (3, 3, 2), (5, 2, 2), (40, 17, 4)],
    kind=KINDS,
    target=TARGETS,
)
def test_every_kind_of_defaults_and_number_of_bits(case, numbers, kind, target):
    check(case, target, dtype=torch.bfloat16, kind=kind, numbers=numbers)


@pytest.mark.parametrize("target", EVERY, ids=str)
@pytest.mark.parametrize("make", [lambda rows: rows[0, :1].expand(6), lambda rows: rows[:, 0]], ids=["0", "2"])
def test_a_bias_may_have_any_stride(make, target):
    x, weight, bias = target.randn((4, 5)), target.randn((6, 5)), make(target.randn((6, 2)))
    partition = pk.Partition.random((6, 5), (0.5, 0.5), seed=0).to(target.device)
    with target.use():
        found = pk.linear(x, weight, partition, 1, bias=bias)
        assert torch.equal(found, pk.linear(x, weight, partition, 1, bias=bias.contiguous()))


@pytest.mark.parametrize("target", EVERY, ids=str)
def test_many_rows_of_a_bias_are_added_up_as_exactly_as_by_torch(target):
    partition = pk.Partition.random((6, 7), [1 / 200] * 200, seed=0).to(target.device)
    x, weight, rows = target.randn((4, 7)), target.randn((6, 7)), target.randn((200, 6))
    with target.use():
        ours = pk.linear(x, weight, partition, 200, bias=rows)
    Yardstick(lambda dtype: F.linear(x.to(dtype), weight.to(dtype), rows.to(dtype).sum(0)), torch.float32).check(ours)


@pairwise(
    shape=[(0, 5), (3, 0, 5), (1, 1), (7,), (40000,), (3, 4, 5), (2, 3, 4, 5), (300, 70), (3000, 50), (4, 3, 60, 70)],
    dim=[0, 1, -1],
    layout=LAYOUTS,
    dtype=DTYPES,
    target=BY_ONE_PLAN,
)
def test_the_gradient_of_a_biass_rows_is_as_exact_as_torchs(shape, dim, layout, dtype, target):
    grad = in_layout(target.randn(shape).to(dtype), layout)
    dim = min(dim, grad.dim() - 1)
    with target.use(), poisoned_memory():
        ours = calls["grad_bias"](grad, dim, 2, 4, target.backend)
    others = [d for d in range(grad.dim()) if d != dim % grad.dim()]
    Yardstick(lambda dtype: grad.to(dtype).sum(others) if others else grad, dtype).check(ours[1])
    assert ours.shape == (4, shape[dim]) and not ours[[0, 2, 3]].any()
