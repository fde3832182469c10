"""The operators: each backend against dense PyTorch, gradients against finite differences, and saved tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_dense import (
    BACKENDS,
    BY_ONE_PLAN,
    COMPILED,
    DTYPES,
    INTERPRETED,
    LAYOUTS,
    TARGETS,
    TRITON,
    Target,
    assert_within_twice_dense_error,
    in_layout,
)
from pairwise import pairwise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import partkernels as pk
from partkernels.operators import convolution as convolution_operators
from partkernels.operators import linear as linear_operators
from partkernels.operators.registration import calls
from partkernels.testing import poisoned_memory

ops = torch.ops.partkernels
KINDS = ["zeros", "uniform", "normal", "stored"]


def defaults_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> pk.Defaults:
    return {
        "zeros": lambda: pk.Zeros(),
        "uniform": lambda: pk.Uniform(0.5, seed=2**61 + 5, stream=2**35),
        "normal": lambda: pk.Normal(0.5, seed=3),
        "stored": lambda: pk.Stored(torch.randn(shape).to(dtype)),
    }[kind]()


@dataclass
class Case:
    """A layer: the shapes of its input and weight, and its geometry."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: dict = field(default_factory=dict)

    @property
    def is_conv(self) -> bool:
        return len(self.weight) == 4

    def dense(self, x, w, bias):
        return F.conv2d(x, w, bias, **self.geometry) if self.is_conv else F.linear(x, w, bias)

    def ours(self, x, w, partition, active, update=None, bias=None):
        function = pk.conv2d if self.is_conv else pk.linear
        return function(x, w, partition, active, update=update, bias=bias, **self.geometry)


LINEAR = {
    "one": Case((1, 1), (1, 1)),
    "vector": Case((5,), (3, 5)),
    "odd": Case((37, 61), (53, 61)),
    "blocks": Case((203, 530), (197, 530)),
    "three dimensions": Case((3, 7, 65), (130, 65)),
    "empty batch": Case((0, 3, 2, 9), (4, 9)),  # strides of an empty tensor may not collapse
    "small batch": Case((2, 1030), (100, 1030)),
    "a tile's rows": Case((12, 1030), (100, 1030)),
}
CONV2D = {
    "one": Case((1, 1, 1, 1), (1, 1, 1, 1)),
    "mnist": Case((7, 1, 14, 14), (20, 1, 5, 5), {"padding": 2}),
    "odd": Case((3, 5, 9, 11), (7, 5, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    "groups": Case((2, 6, 8, 7), (9, 2, 3, 3), {"groups": 3, "padding": 1, "stride": 2}),
    "depthwise": Case((8, 5, 9, 9), (10, 1, 3, 3), {"groups": 5}),
    "deep": Case((2, 70, 6, 6), (100, 70, 3, 3), {"padding": "same"}),
    "even kernel, same": Case((2, 3, 6, 5), (4, 3, 4, 2), {"padding": "same"}),
    "unbatched": Case((3, 8, 8), (4, 3, 3, 3), {"stride": 3, "padding": 4}),
    "empty batch": Case((0, 3, 6, 6), (4, 3, 3, 3)),
    "one channel": Case((3, 1, 12, 37), (5, 1, 4, 3), {"padding": (2, 0)}),
    "few channels": Case((2, 3, 9, 21), (7, 3, 3, 2), {"padding": (5, 1), "dilation": (2, 3)}),
    "few channels, large": Case((1, 4, 50, 70), (70, 4, 3, 3), {"padding": 1}),
    "sixty-four channels": Case(
        (3, 64, 7, 5), (70, 64, 3, 2), {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 2)}
    ),
    "sixty-four channels a group": Case((2, 128, 5, 6), (10, 64, 2, 3), {"groups": 2, "padding": 1}),
    "two channels, cropped": Case((2, 2, 8, 7), (6, 2, 1, 1), {"padding": 2}),
    "twenty channels": Case((3, 20, 10, 9), (14, 20, 5, 5), {"padding": 2}),
    "ten channels": Case((3, 10, 10, 9), (14, 10, 3, 3)),
}
WIDE = Case((1, 1, 3, 9000), (40, 1, 3, 3), {"padding": 1})
# Sums with so many terms that the order of addition determines the error.
DEEP = {
    "forward": Case((20, 16400), (30, 16400)),
    "forward, few rows": Case((7, 16400), (90, 16400)),
    "grad_input": Case((20, 30), (16400, 30)),
    "grad_weight": Case((16400, 20), (30, 20)),
    "conv2d": Case((2, 1825, 4, 3), (20, 1825, 3, 3), {"padding": 1}),
    "conv2d grad_weight": Case((64, 3, 16, 17), (20, 3, 3, 3), {"padding": 1}),
}
WEIGHTS = (7,), (5, 300), (6, 5, 3), (3, 4, 2, 5), (3, 4, 2, 2, 3)
CASES = {f"linear {name}": case for name, case in LINEAR.items()} | {
    f"conv2d {name}": case for name, case in CONV2D.items()
}
# When interpreted, these take seconds each, and one dtype is enough.
SLOW = {"linear blocks", "linear small batch", "linear a tile's rows"}


def is_worth_it(case: Case, dtype: torch.dtype, target: Target) -> bool:
    """Return whether a case is neither slow nor redundant: float64 and convolutions have only one plan."""
    is_slow = target not in COMPILED and dtype != torch.bfloat16 and case in [CASES[name] for name in SLOW]
    return not is_slow and not (target.plan == "fused" and (dtype == torch.float64 or len(case.weight) == 4))


def check(case: Case, dtype, kind, count, active, update, x_layout, weight_layout, grad_layout, target) -> None:
    """Compare output and gradients of one case with the dense operator on the materialised weight."""
    partition = pk.Partition.random(
        case.weight, [1 / count] * count, seed=11, defaults=defaults_of(kind, case.weight, dtype)
    ).to(target.device)
    x = in_layout(target.randn(case.x).to(dtype), x_layout).requires_grad_()
    weight = in_layout(target.randn(case.weight).to(dtype), weight_layout)
    bias = target.randn(case.weight[:1]).to(dtype).requires_grad_()
    with pk.use_backend("reference"):
        subnetwork = pk.subnetwork_weight(weight, partition, active)
    weight.requires_grad_()

    with target.use(), poisoned_memory():
        y = case.ours(x, weight, partition, active, update, bias)
        grad = in_layout(target.randn(y.shape).to(dtype), grad_layout)
        ours = torch.autograd.grad(y, (x, weight, bias) if update else (x, bias), grad)
    assert y.dtype == dtype

    def dense(which: int):
        def compute(compute_dtype):
            leaves = [t.detach().to(compute_dtype).requires_grad_() for t in (x, subnetwork, bias)]
            with poisoned_memory():  # in deterministic mode, cuDNN adds in another order
                y = case.dense(*leaves)
                return (y, *torch.autograd.grad(y, leaves, grad.to(compute_dtype)))[which].detach()

        return compute

    assert_within_twice_dense_error(y.detach(), dense(0))
    assert_within_twice_dense_error(ours[0], dense(1))
    assert_within_twice_dense_error(ours[-1], dense(3))
    if update:
        assert ours[1].shape == weight.shape
        mask = partition.mask(update)
        assert (ours[1][~mask] == 0).all(), "other partitions' gradient should be exactly 0"
        # Compare with the error of the complete dense gradient, not only with this partition's few entries.
        truth = dense(2)(torch.float64)
        assert_within_twice_dense_error(torch.where(mask, ours[1], truth.to(dtype)), dense(2))


@pytest.mark.cases(full=50)
@pairwise(is_worth_it, case=CASES, dtype=DTYPES, target=TARGETS)
def test_backends_compute_what_dense_pytorch_computes(case, dtype, target):
    check(case, dtype, "uniform", 3, 2, 2, "contiguous", "contiguous", "contiguous", target)


@pytest.mark.parametrize("target", COMPILED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_images_wider_than_a_workspace(dtype, target):
    check(WIDE, dtype, "uniform", 3, 2, 2, "contiguous", "contiguous", "contiguous", target)


@pytest.mark.cases(usual=5)
@pytest.mark.parametrize("target", COMPILED, ids=str)
@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP)
def test_errors_of_deep_products_grow_no_faster_than_dense_pytorchs(case, target):
    # Not in float64: MKL's product, which serves as the truth, had 9 times the error of ours.
    check(case, torch.float32, "uniform", 3, 2, 2, "contiguous", "contiguous", "contiguous", target)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the cpu backend was not built")
@pairwise(case=CONV2D, dtype=DTYPES, workspace=[0, 10_000])
def test_convolutions_whose_weight_does_not_fit_the_workspace(case, dtype, workspace):
    # 0 bytes: our convolutions run; 10 000 bytes: larger weights are rebuilt slice by slice.
    before = torch.ops.partkernels_cpu.limit_workspace(workspace)
    try:
        for layout in ("contiguous", "channels_last"):
            check(case, dtype, "uniform", 3, 2, 2, layout, layout, layout, Target("cpu", "cpu"))
    finally:
        torch.ops.partkernels_cpu.limit_workspace(before)


@pairwise(
    # In the rebuild plan, only the weight is read by our kernels; PyTorch's operators read x and grad.
    lambda case, layout, which, target: which == "weight" or target.plan != "rebuild",
    case={name: CASES[name] for name in ("linear odd", "linear three dimensions", "conv2d odd", "conv2d groups")},
    layout=LAYOUTS,
    which=["x", "weight", "grad"],
    target=TARGETS,
)
def test_any_strides(case, which, layout, target):
    layouts = [layout if which == name else "contiguous" for name in ("x", "weight", "grad")]
    kind = "uniform" if target in COMPILED else "stored"  # drawn defaults are the slowest to interpret
    check(case, torch.float32, kind, 3, 2, 1, *layouts, target)


@pytest.mark.cases(usual=10, full=20)
@pairwise(is_worth_it, case=CASES, dtype=[torch.float32], target=TARGETS)
def test_the_gradient_of_a_sum_has_stride_0_everywhere(case, dtype, target):
    # With whole numbers, every product and sum is exact, so backends must agree to the bit. On a GPU, cuDNN is exact in
    # float64 and nearly exact in float32, because it transforms images.
    partition = pk.Partition.random(case.weight, (0.5, 0.3, 0.2), seed=3).to(target.device)
    numbers = [target.randn(shape).mul(2).round() for shape in (case.x, case.weight)]
    results = []
    for one, its_dtype in ((Target("reference", target.device), torch.float64), (target, dtype)):
        x, weight = (tensor.to(its_dtype).requires_grad_() for tensor in numbers)
        with one.use(), poisoned_memory():
            y = case.ours(x, weight, partition, active=2, update=1)
            results.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    nearly = 1e-2 if case.is_conv and target.device == "cuda" else 0
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=nearly)


@pytest.mark.cases(usual=1, full=5)
@pairwise(
    lambda name, kind, target: target in COMPILED or name not in SLOW or kind == "uniform",
    name=("linear three dimensions", "conv2d sixty-four channels", "conv2d groups"),
    kind=KINDS,
    target=TRITON,
)
def test_float16_where_a_backend_has_it(name, kind, target):
    check(CASES[name], torch.float16, kind, 3, 2, 1, "contiguous", "contiguous", "contiguous", target)


@pairwise(
    case={name: CASES[name] for name in ("linear odd", "conv2d odd")},
    numbers=[(1, 1, 1), (2, 1, None), (3, 3, 2), (5, 2, 2), (40, 17, 4)],
    kind=KINDS,
    target=TARGETS,
)
def test_every_kind_of_defaults_and_number_of_bits(case, numbers, kind, target):
    count, active, update = numbers
    check(case, torch.bfloat16, kind, count, active, update, "contiguous", "contiguous", "contiguous", target)


@pytest.mark.parametrize("target", COMPILED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_defaults_in_each_dtype(kind, dtype, target):
    # Complete and partial tiles. Each pair compiles to separate loops, and compilers have miscompiled some.
    case = CASES["linear three dimensions"]
    check(case, dtype, kind, 3, 2, 2, "contiguous", "contiguous", "contiguous", target)


@pairwise(
    # Interpreted targets have drawn defaults in one layout, and every layout in one dtype.
    lambda kind, shape, layout, dtype, target: (
        target in COMPILED or layout == "contiguous" or (kind == "stored" and dtype == torch.bfloat16)
    ),
    kind=KINDS,
    shape=WEIGHTS,
    layout=LAYOUTS,
    dtype=DTYPES,
    target=BY_ONE_PLAN,
)
def test_subnetwork_weight_has_the_bits_of_the_reference(kind, shape, layout, dtype, target):
    defaults = defaults_of(kind, shape, dtype)
    partition = pk.Partition.random(shape, (0.5, 0.3, 0.2), seed=4, defaults=defaults).to(target.device)
    weight = in_layout(target.randn(shape).to(dtype), layout).detach().requires_grad_()
    grad = in_layout(target.randn(shape).to(dtype), layout)
    for active in (1, 2, 3):
        with poisoned_memory(), target.use():
            ours = pk.subnetwork_weight(weight, partition, active, update=active)
            ours_grad = torch.autograd.grad(ours, weight, grad)[0]
        live, learns = partition.ids() <= active, partition.ids() == active
        assert torch.equal(ours, torch.where(live, weight, partition.defaults.values(shape, dtype, target.device)))
        assert torch.equal(ours_grad, torch.where(learns, grad, 0))
        assert not pk.subnetwork_weight(weight, partition, active).requires_grad


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("target", [Target("reference", "cpu"), *TARGETS], ids=str)
@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"]])
def test_dead_entries_never_reach_the_result(case, target):
    partition = pk.Partition.random(case.weight, (0.5, 0.5), seed=1, defaults=pk.Uniform(0.1, 0)).to(target.device)
    weight = target.randn(case.weight)
    poisoned = torch.where(partition.mask(2), torch.nan, weight)
    x = target.randn(case.x).requires_grad_()
    with target.use():
        results = [case.ours(x, w, partition, active=1) for w in (weight, poisoned)]
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in results]
    assert torch.equal(*results) and torch.equal(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [LINEAR["blocks"], CONV2D["deep"]])
def test_results_do_not_depend_on_the_number_of_threads(case, backend):
    partition = pk.Partition.random(case.weight, (0.8, 0.1, 0.1), seed=1, defaults=pk.Uniform(0.1, 0))
    x, weight = torch.randn(case.x, requires_grad=True), torch.randn(case.weight, requires_grad=True)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            with pk.use_backend(backend):
                y = case.ours(x, weight, partition, active=2, update=1)
                results.append((y, *torch.autograd.grad((y * y).sum(), (x, weight))))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def operator_calls(backend: str) -> dict[str, tuple]:
    """Return float64 arguments for each operator that require gradients."""

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    linear = pk.Partition.random((4, 5), (0.4, 0.3, 0.3), seed=2, defaults=pk.Uniform(1.0, 3))
    conv = pk.Partition.random((4, 2, 3, 2), (0.4, 0.3, 0.3), seed=2, defaults=pk.Normal(1.0, 3))
    stored = pk.Partition.random((4, 5), (0.4, 0.6), seed=2, defaults=pk.Stored(torch.randn(4, 5).double()))
    geometry = ([2, 1], [1, 1], [1, 2], 2)
    owners = (linear.map, linear.count, backend)
    conv_owners = (conv.map, conv.count, backend)
    return {
        "linear": (leaf(3, 5), leaf(4, 5), leaf(4), 2, 2, *linear.flat(), backend),
        "linear_grad_input": (leaf(3, 4), leaf(4, 5), 2, 1, *linear.flat(), backend),
        "grad_bias": (leaf(2, 3, 4), 1, 2, 3, backend),
        "linear_grad_weight": (leaf(3, 4), leaf(3, 5), 2, *owners),
        "conv2d": (leaf(2, 4, 5, 6), leaf(4, 2, 3, 2), leaf(4), *geometry, 2, 2, *conv.flat(), backend),
        "conv2d_grad_input": (
            leaf(2, 4, 3, 6), leaf(4, 2, 3, 2), [2, 4, 5, 6], *geometry, 2, 1, *conv.flat(), backend
        ),
        "conv2d_grad_weight": (leaf(2, 4, 3, 6), leaf(2, 4, 5, 6), [3, 2], *geometry, 2, *conv_owners),
        "embedding": (leaf(4, 5), torch.tensor([[3, 0], [3, 1]]), -1, 2, 2, *linear.flat(), backend),
        "subnetwork_weight": (leaf(4, 5), 1, *stored.flat(), backend),
        "subnetwork_weight_grad": (leaf(4, 5), 2, 3, *owners),
    }  # fmt: skip


OPERATORS = list(operator_calls("reference"))


@pytest.mark.cases(usual=3, full=15)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS, *INTERPRETED])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_well_registered(name, backend):
    args = operator_calls(backend)[name]
    results = torch.library.opcheck(getattr(ops, name).default, args)
    assert set(results.values()) == {"SUCCESS"}


class Seen(TorchDispatchMode):
    """A mode that records the namespace and name of each dispatched operator."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the cpu backend was not built")
def test_for_plain_tensors_the_backend_is_called_at_once():
    partition = pk.Partition.random((4, 3), (0.5, 0.5), seed=0)
    x, weight = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)

    def seen(x, weight):
        with Seen() as mode:
            pk.linear(x, weight, partition, 1, update=1)
        return mode.names

    assert seen(x, weight.detach()) == ["partkernels_cpu::linear"]
    with torch.no_grad():
        assert seen(x, weight) == ["partkernels_cpu::linear"]
    assert seen(x, weight)[-1] == "partkernels_cpu::linear"
    # Subclasses and autocast override the operator.
    assert seen(x.as_subclass(Subclass), weight.detach())[0] == "partkernels::linear"
    with torch.autocast("cpu", torch.bfloat16):
        assert "partkernels::linear" in seen(x, weight.detach())


def test_meta_tensors_have_the_operators_shapes_and_no_backend():
    partition = pk.Partition.random((4, 3), (0.5, 0.5), seed=0)
    flat = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in partition.flat()]
    x, weight = torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")
    y = calls["linear"](x, weight, None, 1, None, *flat, "auto")
    assert y.is_meta and y.shape == (2, 4)


def updatable(name: str, args: tuple) -> list[bool]:
    """Return for each argument whether it is a weight with a gradient in only one partition."""
    index = {"embedding": 0, "linear": 1, "conv2d": 1, "linear_grad_input": 1, "conv2d_grad_input": 1}.get(name)
    return [i == index for i in range(len(args))]


# All backends share the gradient formulas, and the reference is the slowest.
@pytest.mark.cases(usual=3)
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.weekly), *BACKENDS])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_agree_with_finite_differences(name, backend):
    args = operator_calls(backend)[name]
    leaves = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
    is_confined = updatable(name, args)
    map_index = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dtype == torch.uint8), None)

    def call(*values):
        filled = list(args)
        for i, value in zip(leaves, values, strict=True):
            if is_confined[i]:  # only the entries of partition `update` are variables
                update, map, _, count = args[map_index - 1 : map_index + 3]
                owner = pk.Partition(tuple(value.shape), count, map).mask(update)
                value = torch.where(owner, value, value.detach().clone().fill_(0.3))
            filled[i] = value
        return getattr(ops, name)(*filled)

    values = [args[i] for i in leaves]
    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_may_call_at_once(backend):
    case = LINEAR["blocks"]
    partition = pk.Partition.random(case.weight, (0.8, 0.1, 0.1), seed=1, defaults=pk.Uniform(0.1, 0))
    inputs, weight = torch.randn(16, *case.x), torch.randn(case.weight)

    def layer(x):
        with torch.no_grad():
            return case.ours(x, weight, partition, active=2)

    with pk.use_backend(backend), ThreadPoolExecutor(2) as threads:
        alone = [layer(x) for x in inputs]
        together = list(threads.map(layer, inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_no_update_computes_no_weight_gradient(monkeypatch):
    from partkernels.backend.reference import operators as reference

    monkeypatch.setattr(reference, "linear_grad_weight", lambda *_: pytest.fail("a weight gradient was computed"))
    partition = pk.Partition.random((4, 5), (0.5, 0.5), seed=0)
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with pk.use_backend("reference"):
        pk.linear(x, weight, partition, active=1).sum().backward()
    assert weight.grad is None and x.grad is not None


@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"]])
@pytest.mark.parametrize("update", [None, 2])
def test_nothing_but_x_weight_and_map_is_saved(case, update):
    partition = pk.Partition.random(case.weight, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.1, 0))
    x, weight = torch.randn(case.x, requires_grad=True), torch.randn(case.weight, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        case.ours(x, weight, partition, 2, update)
    expected = {weight.data_ptr(), partition.map.data_ptr()} | ({x.data_ptr()} if update else set())
    assert set(saved) == expected


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"], CONV2D["even kernel, same"]])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_compiles_without_a_graph_break(case, backend):
    partition = pk.Partition.random(case.weight, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.1, 0))
    x, weight = torch.randn(case.x, requires_grad=True), torch.randn(case.weight, requires_grad=True)

    def step(x, weight):
        y = case.ours(x, weight, partition, 2, update=2)
        return (y.sin() ** 2).sum()

    with pk.use_backend(backend):
        eager = torch.autograd.grad(step(x, weight), (x, weight))
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        traced = torch.autograd.grad(compiled(x, weight), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.full
def test_compiles_for_dynamic_batches_and_every_subnetwork():
    partition = pk.Partition.random((8, 2, 3, 3), (0.5, 0.3, 0.2), seed=0, defaults=pk.Normal(0.1, 0))
    weight = torch.randn(8, 2, 3, 3, requires_grad=True)

    def layer(x, active):
        return pk.conv2d(x, weight, partition, active, update=active, padding=1)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, active in [(2, 1), (5, 2), (3, 3), (4, 1)]:
        x = torch.randn(batch, 2, 6, 7)
        results = [function(x, active) for function in (layer, compiled)]
        grads = [torch.autograd.grad(y.sum(), weight)[0] for y in results]
        assert torch.equal(*results) and torch.equal(*grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"]])
def test_autocast_casts_as_for_torchs_own_operator(case, kind):
    partition = pk.Partition.random(
        case.weight, (0.5, 0.5), seed=0, defaults=defaults_of(kind, case.weight, torch.float32)
    )
    x, weight = torch.randn(case.x, requires_grad=True), torch.randn(case.weight, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = case.ours(x, weight, partition, 1, update=1)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    lowered = case.ours(x.bfloat16(), weight.bfloat16(), partition.to(dtype=torch.bfloat16), 1)
    assert torch.equal(y, lowered)


def error_cases():
    p = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    stored = pk.Partition.random((4, 6), (0.5, 0.5), seed=0, defaults=pk.Stored(torch.zeros(4, 6)))
    pc = pk.Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
    x, w, xc, wc = torch.randn(2, 6), torch.randn(4, 6), torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    meta = p.to("meta")
    yield lambda: pk.linear(x, w, p, 0), ValueError, r"active=0, but this partition has 2 parts; pass an int in 1\.\.2"
    yield lambda: pk.linear(x, w, p, 3), ValueError, "active=3"
    yield lambda: pk.linear(x, w, p, 1.0), ValueError, "active=1.0"
    yield lambda: pk.linear(x, w, p, True), ValueError, "active=True"
    yield lambda: pk.subnetwork_weight(w, p, 3), ValueError, "active=3"
    yield lambda: pk.linear(x, w, p, 1, update=2), ValueError, r"update=2 with active=1; pass an int in 1\.\.1, or None"
    yield lambda: pk.linear(x, w, p, 2, update=0), ValueError, "update=0"
    yield lambda: pk.linear(x, w.t(), p, 1), ValueError, r"shape \(6, 4\) and its partition \(4, 6\)"
    yield lambda: pk.linear(x, w, meta, 1), ValueError, r"partition\.to\('cpu'\)"
    yield lambda: pk.linear(x.double(), w, p, 1), pk.InputError, "x is torch.float64 and the weight torch.float32"
    yield lambda: pk.linear(x, w.int(), p, 1), TypeError, "the weight is torch.int32"
    yield lambda: pk.linear(x.double(), w.double(), stored, 1), TypeError, r"partition\.to\(dtype=torch\.float64\)"
    yield lambda: pk.linear(x.to("meta"), w, p, 1), pk.InputError, "x is on meta and the weight on cpu"
    yield lambda: pk.linear(x[:, :5], w, p, 1), pk.InputError, r"x has shape \(2, 5\); this weight takes \[\.\.\., 6\]"
    yield lambda: pk.linear(torch.tensor(1.0), w, p, 1), pk.InputError, "x has shape"
    yield lambda: pk.linear(x, w, p, 1, bias=torch.zeros(5)), pk.InputError, r"bias has shape \(5,\)"
    yield lambda: pk.linear(x, w, p, 1, bias=torch.zeros(4).double()), pk.InputError, "bias is torch.float64"
    yield lambda: pk.linear(xc, wc, pc, 1), ValueError, r"linear takes \[out_features, in_features\]"
    yield lambda: pk.conv2d(x, w, p, 1), ValueError, "conv2d takes"
    yield lambda: pk.conv2d(xc[:, :2], wc, pc, 1), pk.InputError, r"takes \[batch, 3, height, width\]"
    yield lambda: pk.conv2d(xc, wc, pc, 1, groups=3), ValueError, "groups=3 does not divide"
    yield lambda: pk.conv2d(xc, wc, pc, 1, stride=0), ValueError, "stride=0; pass an int or a pair of ints, each at"
    yield lambda: pk.conv2d(xc, wc, pc, 1, padding=-1), ValueError, "padding=-1"
    yield lambda: pk.conv2d(xc, wc, pc, 1, padding="full"), ValueError, "'valid' or 'same'"
    yield lambda: pk.conv2d(xc, wc, pc, 1, padding="same", stride=2), ValueError, "'same' needs stride 1"
    yield lambda: pk.conv2d(xc, wc, pc, 1, dilation=(1, 2, 3)), ValueError, r"dilation=\(1, 2, 3\)"
    yield lambda: pk.conv2d(xc[..., :2], wc, pc, 1), pk.InputError, "smaller than the kernel"
    yield lambda: pk.conv2d(xc, wc, pc, 1, bias=torch.zeros(3)), pk.InputError, "bias has shape"


@pytest.mark.parametrize(("call", "error", "message"), list(error_cases()))
def test_bad_input_raises_and_names_the_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("shape, weight", [((2, 3, 8), (4, 8)), ((8,), (4, 8)), ((2, 5, 5), (4, 2, 3, 3))])
@pytest.mark.parametrize("has_bias, update", [(False, 2), (True, 2), (True, None)])
def test_what_an_operator_gives_can_be_changed_in_place(backend, shape, weight, has_bias, update):
    partition = pk.Partition.random(weight, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, seed=1))
    x, w = torch.randn(shape, requires_grad=True), torch.randn(weight, requires_grad=True)
    operator = pk.conv2d if len(weight) == 4 else pk.linear
    options = {"bias": torch.randn(2, weight[0]) if has_bias else None, "active": 2, "update": update}
    with pk.use_backend(backend):
        y = operator(x, w, partition, **options)
        expected = torch.autograd.grad((2 * y).square().sum(), x)
        y = operator(x, w, partition, **options)
        y *= 2
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x), expected)


def passes(monkeypatch, run) -> set[str]:
    """Return the gradients that a function computes: "input", "weight"."""
    ran = set()
    for module in (linear_operators, convolution_operators):
        for name in ("input", "weight"):
            operator = getattr(module, f"_grad_{name}")

            def counted(*args, name=name, operator=operator):
                ran.add(name)
                return operator(*args)

            monkeypatch.setattr(module, f"_grad_{name}", counted)
    run()
    return ran


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("ours", [pk.linear, pk.conv2d])
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda y, x, w: torch.autograd.grad(y, x), {"input"}),
        (lambda y, x, w: torch.autograd.grad(y, w), {"weight"}),
        (lambda y, x, w: torch.autograd.grad(y, [w, x]), {"input", "weight"}),
        (lambda y, x, w: y.backward(), {"input", "weight"}),
        (lambda y, x, w: y.backward(inputs=[x]), {"input"}),
        (lambda y, x, w: torch.autograd.grad(y, x, create_graph=True), {"input"}),
    ],
)
def test_only_gradients_that_are_asked_for_are_computed(run, expected, ours, hidden, monkeypatch):
    shape = (3, 4) if ours is pk.linear else (3, 4, 2, 2)
    leaves = torch.randn(5, 4, *shape[2:], requires_grad=True), torch.randn(shape, requires_grad=True)
    partition = pk.Partition.random(shape, (0.5, 0.5), seed=0)
    x, w = (2 * leaf for leaf in leaves) if hidden else leaves
    y = ours(x, w, partition, 2, update=1).sum()
    assert passes(monkeypatch, lambda: run(y, *leaves)) == expected


def test_defaults_that_would_learn_with_their_weight_are_refused():
    weight = torch.randn(3, 4, requires_grad=True)
    shared = pk.Partition.random((3, 4), (0.5, 0.5), seed=0, defaults=pk.Stored(weight))
    message = r"share memory, so training would change both; pass Stored\(weight.clone\(\)\)"
    with pytest.raises(ValueError, match=message):
        pk.linear(torch.ones(1, 4), weight, shared, 1)
    with pytest.raises(ValueError, match=message):
        pk.sgd_step(weight.detach(), torch.ones(3, 4), None, shared, 2, lr=1.0)
    pk.linear(torch.ones(1, 4), weight.detach(), shared, 1)  # a frozen weight's defaults do not change


def test_defaults_that_meet_their_weight_in_an_array_of_numpy_are_refused():
    array = np.zeros((3, 4), np.float32)
    weight = torch.from_numpy(array).requires_grad_()
    shared = pk.Partition.random((3, 4), (0.5, 0.5), seed=0, defaults=pk.Stored(torch.from_numpy(array)))
    with pytest.raises(ValueError, match="share memory, so training would change both"):
        pk.linear(torch.ones(1, 4), weight, shared, 1)


@pytest.mark.parametrize("missing", ["all", "one entry"])
def test_a_tensor_whose_memory_was_taken_away_is_refused(missing):
    def emptied(*shape):
        tensor = torch.ones(shape)
        # PyTorch aligns memory to 64 bytes, so the missing entry cannot belong to another tensor.
        tensor.untyped_storage().resize_(0 if missing == "all" else tensor.nbytes - tensor.itemsize)
        return tensor

    matrix, kernels = (pk.Partition.random(shape, (0.5, 0.5), seed=0) for shape in ((4, 6), (4, 6, 3, 3)))
    stored = pk.Partition.random((4, 6), (0.5, 0.5), seed=0, defaults=pk.Stored(emptied(4, 6)))
    x, indices = torch.ones(2, 6), torch.tensor([3])
    calls = [
        lambda: pk.linear(x, emptied(4, 6), matrix, 1),
        lambda: pk.linear(emptied(2, 6), torch.ones(4, 6), matrix, 1),
        lambda: pk.linear(x, torch.ones(4, 6), stored, 1),
        lambda: pk.conv2d(torch.ones(1, 6, 5, 5), emptied(4, 6, 3, 3), kernels, 1),
        lambda: pk.embedding(indices, emptied(4, 6), matrix, 1),
        lambda: pk.sgd_step(emptied(4, 6), torch.ones(4, 6), None, matrix, 1, lr=0.1),
        lambda: pk.gather_entries(emptied(4, 6), matrix, 1),
        lambda: pk.scatter_entries(emptied(4, 6), matrix, 1, torch.ones(matrix.sizes()[0])),
    ]
    for call in calls:
        with pk.use_backend("cpu"), pytest.raises(RuntimeError, match="has a storage of"):
            call()


def test_small_numbers_of_numpys_do_not_wrap():
    partition = pk.Partition.random((2, 1, 3, 3), (0.5, 0.5), seed=0)
    y = pk.conv2d(torch.ones(1, 1, 5, 5), torch.ones(2, 1, 3, 3), partition, 1, padding=(np.uint8(130),) * 2)
    assert y.shape == (1, 2, 263, 263)


@pytest.mark.parametrize("name", ["x", "bias"])
def test_arrays_of_numpy_are_named(name):
    weight, given = torch.randn(4, 8), {"x": torch.randn(2, 8), "bias": torch.randn(4)}
    given[name] = given[name].numpy()
    partition = pk.Partition.random(weight.shape, (0.5, 0.5), seed=0)
    with pytest.raises(TypeError, match=rf"{name} is a numpy ndarray; pass torch.from_numpy\({name}\)"):
        pk.linear(given["x"], weight, partition, 1, bias=given["bias"])
    given[name] = tuple(given[name].tolist())
    with pytest.raises(TypeError, match=f"{name} is a tuple; pass a tensor"):
        pk.linear(given["x"], weight, partition, 1, bias=given["bias"])
