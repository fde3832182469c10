"""Operators as PyTorch sees them: schemas, gradients, compilation, autocast, transforms, and saved tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from against_dense import BACKENDS, CONV2D, INTERPRETED, KINDS, LINEAR, Case, partition_of
from torch import Tensor

import partkernels as pk
from partkernels.operators import convolution as convolution_operators
from partkernels.operators import linear as linear_operators
from partkernels.operators.registration import calls

ops = torch.ops.partkernels


def operator_calls(backend: str) -> dict[str, tuple]:
    """Return float64 arguments for each operator; those with a derivative require gradients."""

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    def state():
        return [torch.rand(4, 5, dtype=torch.float64)]

    linear = pk.Partition.random((4, 5), (0.4, 0.3, 0.3), seed=2, defaults=pk.Uniform(1.0, 3))
    conv = pk.Partition.random((4, 2, 3, 2), (0.4, 0.3, 0.3), seed=2, defaults=pk.Normal(1.0, 3))
    stored = pk.Partition.random((4, 5), (0.4, 0.6), seed=2, defaults=pk.Stored(torch.randn(4, 5).double()))
    geometry = ([2, 1], [1, 1], [1, 2], 2)
    owners = (linear.map, linear.num_partitions, backend)
    conv_owners = (conv.map, conv.num_partitions, backend)
    entries = ([linear.map], [linear.num_partitions], 2)
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
        "gather_entries": (torch.ones(4, 5), 2, *owners),
        "scatter_entries": (torch.ones(4, 5), torch.zeros(linear.sizes()[1]), 2, *owners),
        "sgd_steps": (state(), state(), state(), *entries, 0.1, 0.9, 0.2, True, backend),
        "adam_steps": (*(state() for _ in range(4)), *entries, [3], 0.1, 0.9, 0.99, 1e-8, 0.2, True, backend),
        "linear with rows": (leaf(3, 5), leaf(4, 5), leaf(3, 4), 2, 2, *linear.flat(), backend),
        "conv2d with rows": (leaf(2, 4, 5, 6), leaf(4, 2, 3, 2), leaf(3, 4), *geometry, 2, 2, *conv.flat(), backend),
    }  # fmt: skip


OPERATORS = operator_calls("reference")
LEARN = [name for name, args in OPERATORS.items() if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)]
# The arguments that have a gradient only in partition `update`: weights by a map, biases by their rows.
WEIGHT = {"embedding": 0, "linear": 1, "conv2d": 1, "linear_grad_input": 1, "conv2d_grad_input": 1}


@pytest.mark.cases(usual=6, full=20)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS, *INTERPRETED])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_well_registered(name, backend):
    operator = getattr(ops, name.partition(" ")[0]).default
    assert set(torch.library.opcheck(operator, operator_calls(backend)[name]).values()) == {"SUCCESS"}


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("backend", BACKENDS)  # all backends share the gradient formulas
@pytest.mark.parametrize("name", LEARN)
def test_gradients_agree_with_finite_differences(name, backend):
    args, (operator, _, has_rows) = operator_calls(backend)[name], name.partition(" ")
    leaves = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
    map_index = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dtype == torch.uint8), None)

    def call(*values):
        filled = list(args)
        for i, value in zip(leaves, values, strict=True):
            update, map, _, count = args[map_index - 1 : map_index + 3] if map_index else (None,) * 4
            owner = None
            if i == WEIGHT.get(operator):  # only the entries of partition `update` are variables
                owner = pk.Partition(tuple(value.shape), count, map).mask(update)
            elif i == 2 and has_rows:
                owner = torch.arange(count).view(-1, 1) == update - 1
            if owner is not None:
                value = torch.where(owner, value, value.detach().clone().fill_(0.3))
            filled[i] = value
        return getattr(ops, operator)(*filled)

    values = [args[i] for i in leaves]
    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d", "conv_transpose2d"])
def test_gradients_of_gradients_of_the_other_convolutions(name):
    spatial = (9,) if "1d" in name else (4, 3)
    shape = (4, 6, *[2] * len(spatial)) if "transpose" in name else (6, 4, *[2] * len(spatial))
    partition = pk.Partition.random(shape, (0.5, 0.3, 0.2), seed=0)
    weight = torch.randn(shape, dtype=torch.float64)

    def bent(x):
        return getattr(pk, name)(x, weight, partition, 2, stride=2).sin()

    x = torch.randn(2, 4, *spatial, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(bent, (x,), fast_mode=True)


def test_meta_tensors_have_the_operators_shapes_and_no_backend():
    partition = pk.Partition.random((4, 3), (0.5, 0.5), seed=0)
    flat = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in partition.flat()]
    x, weight = torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")
    y = calls["linear"](x, weight, None, 1, None, *flat, "auto")
    assert y.is_meta and y.shape == (2, 4)


TABLE = Case("embedding", (), (15, 70), {"padding_idx": 1})


def leaves(case):
    x = torch.tensor([[3, 0], [3, 1]]) if case is TABLE else torch.randn(case.x, requires_grad=True)
    return x, torch.randn(case.weight, requires_grad=True)


@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"], TABLE], ids=lambda case: case.operator)
@pytest.mark.parametrize("update", [None, 2])
def test_nothing_but_x_weight_and_map_is_saved(case, update):
    partition, (x, weight), saved = partition_of(case, count=2), leaves(case), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        case.ours(x, weight, partition, 2, update)
    expected = set() if case is TABLE else {weight.data_ptr(), partition.map.data_ptr()}
    assert set(saved) == expected | ({x.data_ptr(), partition.map.data_ptr()} if update else set())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_is_never_materialised(backend):
    partition = pk.Partition.random((5000, 64), (0.5, 0.3, 0.2), seed=0, defaults=pk.Uniform(0.5, 0))
    ids, weight = torch.randint(5000, (10,)), torch.randn(5000, 64)
    with pk.use_backend(backend), torch.profiler.profile(profile_memory=True) as profile:
        out = pk.embedding(ids, weight, partition, 2)
    taken = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert out.nbytes <= sum(bytes for bytes in taken if bytes > 0) < 4 * out.nbytes


PROGRAMS = {"linear": LINEAR["odd"], "conv2d": CONV2D["odd"], "conv2d, same": CONV2D["even kernel, same"]}
PROGRAMS["embedding"] = TABLE


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("case", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS, *INTERPRETED])
def test_compiles_without_a_graph_break(case, backend):
    partition, (x, weight) = partition_of(case), leaves(case)

    def step(x, weight):
        return (case.ours(x, weight, partition, 2, 2).sin() ** 2).sum()

    learned = [each for each in (x, weight) if each.requires_grad]
    torch.compiler.reset()  # `step` is one function to the compiler, with a limit of recompilations
    with pk.use_backend(backend):
        eager = torch.autograd.grad(step(x, weight), learned)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        traced = torch.autograd.grad(compiled(x, weight), learned)
    assert all(map(torch.equal, eager, traced))


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
@pytest.mark.parametrize("case", [LINEAR["odd"], CONV2D["odd"]], ids=["linear", "conv2d"])
def test_autocast_casts_as_for_torchs_own_operator(case, kind):
    partition, (x, weight) = partition_of(case, kind, count=2), leaves(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = case.ours(x, weight, partition, 1, update=1)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    lowered = case.ours(x.bfloat16(), weight.bfloat16(), partition.to(dtype=torch.bfloat16), 1)
    assert torch.equal(y, lowered)


@pytest.mark.cases(usual=4)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("shape, weight", [((2, 3, 8), (4, 8)), ((8,), (4, 8)), ((2, 5, 5), (4, 2, 3, 3))])
@pytest.mark.parametrize("has_bias, update", [(False, 2), (True, 2), (True, None)])
def test_a_result_can_be_changed_in_place(backend, shape, weight, has_bias, update):
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


@pytest.mark.parametrize("ours", [pk.linear, pk.conv2d])
@pytest.mark.parametrize(
    ("run", "update", "expected"),
    [
        (lambda y, x, w: torch.autograd.grad(y, x), 1, {"input"}),
        (lambda y, x, w: torch.autograd.grad(y, w), 1, {"weight"}),
        (lambda y, x, w: torch.autograd.grad(y, [w, x]), 1, {"input", "weight"}),
        (lambda y, x, w: y.backward(), 1, {"input", "weight"}),
        (lambda y, x, w: y.backward(), None, {"input"}),
        (lambda y, x, w: y.backward(inputs=[x]), 1, {"input"}),
        (lambda y, x, w: torch.autograd.grad(y, x, create_graph=True), 1, {"input"}),
    ],
)
def test_only_gradients_that_are_asked_for_are_computed(run, update, expected, ours, monkeypatch):
    ran = set()
    for module in (linear_operators, convolution_operators):
        for name in ("input", "weight"):
            operator = getattr(module, f"_grad_{name}")
            counted = lambda *args, name=name, operator=operator: ran.add(name) or operator(*args)  # noqa: E731
            monkeypatch.setattr(module, f"_grad_{name}", counted)
    shape = (3, 4) if ours is pk.linear else (3, 4, 2, 2)
    leaves = torch.randn(5, 4, *shape[2:], requires_grad=True), torch.randn(shape, requires_grad=True)
    partition = pk.Partition.random(shape, (0.5, 0.5), seed=0)
    run(ours(2 * leaves[0], 2 * leaves[1], partition, 2, update=update).sum(), *leaves)
    assert ran == expected


# torch.func's transforms: the result of dense PyTorch or an error, never a silent 0.


@pytest.fixture(params=["linear", "conv2d"])
def both(request):
    """Return our layer and torch's as functions of (x, weight, bias with two rows), and such tensors."""
    shape = {"linear": (4, 3), "conv2d": (4, 3, 2, 2)}[request.param]
    partition = pk.Partition.random(shape, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, 0))

    def ours(x, weight, rows):
        return getattr(pk, request.param)(x, weight, partition, 2, update=2, bias=rows)

    def theirs(x, weight, rows):
        weight = torch.where(partition.mask(2), weight, weight.detach())
        return getattr(F, request.param)(x, weight, rows[0].detach() + rows[1])

    x = (5, 3, *[4, 3][: len(shape) - 2])
    return ours, theirs, [torch.randn(size, dtype=torch.float64) for size in (x, shape, (2, 4))]


def squares(layer):
    return lambda *args: layer(*args).square().sum()


TRANSFORMS = {
    "gradients": lambda f: torch.func.grad(squares(f), argnums=(0, 1, 2)),
    "gradients of each example": lambda f: torch.vmap(torch.func.grad(squares(f), (1, 2)), (0, None, None)),
    "a stack of weights": lambda f: lambda x, w, b: torch.vmap(f, (None, -1, None))(x, torch.stack([w, 2 * w], -1), b),
    "jacobians": torch.func.jacrev,
    "gradients of gradients": lambda f: torch.func.jacrev(torch.func.grad(squares(f))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_transforms_are_torchs(both, name, backend):
    ours, theirs, tensors = both
    with pk.use_backend(backend):
        torch.testing.assert_close(TRANSFORMS[name](ours)(*tensors), TRANSFORMS[name](theirs)(*tensors))


@pytest.mark.full
def test_vmap_compiles(both):
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    ours, theirs, (x, *others) = both
    compiled = torch.compile(torch.vmap(lambda x: ours(x, *others)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x, *others))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # raised by modules that torch imports
def test_forward_mode_raises(both):
    ours, _, (x, *others) = both
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: ours(x, *others), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        ours(torch.autograd.forward_ad.make_dual(x, x), *others)
