"""`embedding` returns the rows of the materialised weight, bit for bit, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from against_dense import BY_ONE_PLAN, COMPILED, DTYPES, INTERPRETED, LAYOUTS, TRITON, Target, in_layout
from pairwise import pairwise
from torch import Tensor

import partkernels as pk
from partkernels.testing import poisoned_memory

KINDS = {
    "zeros": lambda shape, dtype: pk.Zeros(),
    "uniform": lambda shape, dtype: pk.Uniform(0.5, seed=2**61 + 5, stream=2**35),
    "normal": lambda shape, dtype: pk.Normal(0.5, seed=3),
    "stored": lambda shape, dtype: pk.Stored(torch.randn(shape).to(dtype)),
}
EVERY = [Target("reference", "cpu"), *BY_ONE_PLAN]
EVERY_BACKEND = pytest.mark.parametrize("target", EVERY, ids=str)


def table(shape, dtype, kind, target, count=3) -> tuple[Tensor, pk.Partition]:
    partition = pk.Partition.random(shape, [1 / count] * count, seed=4, defaults=KINDS[kind](shape, dtype))
    return target.randn(shape).to(dtype), partition.to(target.device)


def ids_of(rows: int, shape: tuple[int, ...], target: Target, dtype=torch.int64) -> Tensor:
    return torch.randint(rows, shape, dtype=dtype, device=target.device)


def check(ids, weight, partition, active, target) -> None:
    with pk.use_backend("reference"):
        expected = F.embedding(ids, pk.subnetwork_weight(weight, partition, active))
    with target.use(), poisoned_memory():
        ours = pk.embedding(ids, weight, partition, active)
    assert ours.dtype == weight.dtype and ours.is_contiguous() and torch.equal(ours, expected)


@pairwise(
    # Interpreted targets have every count with one kind, and every kind with one count.
    lambda count, kind, dtype, target: target.backend not in INTERPRETED or count == 3 or kind == "uniform",
    count=[1, 2, 3, 9, 40],
    kind=list(KINDS),
    dtype=DTYPES,
    target=EVERY,
)
def test_rows_are_those_of_the_materialised_weight(count, kind, dtype, target):
    weight, partition = table((37, 130), dtype, kind, target, count)
    for active in {1, (count + 1) // 2, count}:
        check(ids_of(37, (9,), target), weight, partition, active, target)


@pytest.mark.cases(usual=2)
@pairwise(
    dtype=[torch.int32, torch.int64],
    batch=[(), (0,), (1,), (2, 0, 3), (70,), (3, 2, 5)],
    shape=[(1, 1), (5, 64), (3, 700), (300, 5)],
    target=EVERY,
)
def test_ids_of_any_shape(dtype, batch, shape, target):
    weight, partition = table(shape, torch.float32, "uniform", target)
    check(ids_of(shape[0], batch, target, dtype), weight, partition, 2, target)


@pytest.mark.cases(usual=4)
@pairwise(layout=LAYOUTS, kind=["uniform", "stored"], target=EVERY)
def test_weight_and_ids_of_any_strides(layout, kind, target):
    weight, partition = table((20, 70), torch.float32, kind, target)
    ids = ids_of(20, (4, 6), target)
    strided = torch.stack([ids, ids + 10**9], dim=-1)[..., 0]  # the skipped values are out of range
    for each in (ids.t(), strided, ids[:1].expand(3, 6)):
        check(each, in_layout(weight, layout), partition, 2, target)


@pytest.mark.cases(usual=2)
@EVERY_BACKEND
def test_many_ids_are_divided_among_threads(target):
    weight, partition = table((40, 150), torch.float32, "normal", target)
    check(ids_of(40, (501,), target), weight, partition, 2, target)


@pytest.mark.parametrize("target", COMPILED, ids=str)
def test_a_table_is_never_materialised(target):
    weight, partition = table((5000, 64), torch.float32, "uniform", target)
    ids = ids_of(5000, (10,), target)
    with target.use(), torch.profiler.profile(profile_memory=True) as profile:
        out = pk.embedding(ids, weight, partition, 2)
    taken = [event.self_cpu_memory_usage + event.self_device_memory_usage for event in profile.key_averages()]
    assert out.nbytes <= sum(bytes for bytes in taken if bytes > 0) < 4 * out.nbytes


@pytest.mark.parametrize("target", TRITON, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_float16_where_a_backend_has_it(kind, target):
    weight, partition = table((20, 70), torch.float16, kind, target)
    check(ids_of(20, (7,), target), weight, partition, 2, target)


@pytest.mark.cases(usual=3)
@EVERY_BACKEND
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_looks_up_its_own_rows_and_columns(kind, target):
    weight, whole = table((30, 200), torch.bfloat16, kind, target)
    with pk.use_backend("reference"):
        expected = pk.subnetwork_weight(weight, whole, 1)
    ids = ids_of(12, (9,), target)
    with target.use():
        ours = pk.embedding(ids, weight[11:23, 64:180], whole.rows(11, 23).columns(64, 180), 1)
    assert torch.equal(ours, expected[11:23, 64:180][ids])


@pairwise(padding_idx=[None, 0, 7, -2], dtype=DTYPES, target=EVERY)
def test_the_gradient_is_the_dense_one_in_one_partition(padding_idx, dtype, target):
    weight, partition = table((15, 70), dtype, "uniform", target)
    weight.requires_grad_()
    ids = ids_of(15, (4, 15), target)  # with repeated ids
    grad = target.randn((4, 15, 70)).to(dtype)
    dense = F.embedding(ids, weight, padding_idx)
    with target.use(), poisoned_memory():
        y = pk.embedding(ids, weight, partition, 2, update=1, padding_idx=padding_idx)
        ours = torch.autograd.grad(y, weight, grad)[0]
    expected = torch.autograd.grad(dense, weight, grad)[0]
    assert torch.equal(ours, torch.where(partition.mask(1), expected, 0))
    assert padding_idx is None or not ours[padding_idx].any()


@EVERY_BACKEND
def test_no_update_saves_nothing_and_computes_no_gradient(target):
    weight, partition = table((15, 70), torch.float32, "uniform", target)
    weight.requires_grad_()
    ids = ids_of(15, (4,), target)
    saved = []
    with target.use(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        y = pk.embedding(ids, weight, partition, 2)
    y.sum().backward()
    assert weight.grad is None and not saved


def test_only_ids_and_the_map_are_saved():
    weight, partition = table((15, 70), torch.float32, "uniform", Target("reference", "cpu"))
    ids = torch.tensor([3, 1])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        pk.embedding(ids, weight.requires_grad_(), partition, 2, update=2)
    assert set(saved) == {ids.data_ptr(), partition.map.data_ptr()}


@pytest.mark.parametrize("active", [1, 3])
@pytest.mark.parametrize("wrong", [-1, 15, 2**40])
@pytest.mark.parametrize("target", [target for target in EVERY if target.device == "cpu"], ids=str)
def test_ids_out_of_range_raise_on_a_cpu(target, wrong, active):
    weight, partition = table((15, 70), torch.float32, "uniform", target)
    low, high = min(wrong, 3), max(wrong, 3)
    with target.use(), pytest.raises(IndexError, match=rf"from {low} to {high}, but .* 15 rows; pass ids in 0\.\.14"):
        pk.embedding(torch.tensor([3, wrong]), weight, partition, active)


@pytest.mark.full
@EVERY_BACKEND
def test_compiles_without_a_graph_break(target):
    weight, partition = table((15, 70), torch.float32, "uniform", target)
    weight.requires_grad_()

    def step(ids, weight):
        return (pk.embedding(ids, weight, partition, 2, update=2, padding_idx=1).sin() ** 2).sum()

    with target.use():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
        for batch in ((4,), (7,)):
            ids = ids_of(15, batch, target)
            ours, eager = (torch.autograd.grad(f(ids, weight), weight)[0] for f in (compiled, step))
            assert torch.equal(ours, eager)


def error_cases():
    p = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    conv = pk.Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
    ids, w = torch.tensor([1]), torch.randn(4, 6)
    yield lambda: pk.embedding(ids, w, p, 3), ValueError, "active=3"
    yield lambda: pk.embedding(ids, w, p, 1, update=2), ValueError, "update=2 with active=1"
    yield lambda: pk.embedding(ids, w.t(), p, 1), ValueError, r"shape \(6, 4\) and its partition \(4, 6\)"
    yield lambda: pk.embedding(ids, torch.randn(4, 3, 3, 3), conv, 1), ValueError, r"takes \[rows, features\]"
    yield lambda: pk.embedding(ids.float(), w, p, 1), pk.InputError, "ids are torch.float32; pass torch.int32 or"
    yield lambda: pk.embedding(ids.byte(), w, p, 1), pk.InputError, "torch.uint8"
    yield lambda: pk.embedding(ids.to("meta"), w, p, 1), pk.InputError, "ids are on meta and the weight on cpu"
    yield (
        lambda: pk.embedding(ids, w, p, 1, padding_idx=4),
        ValueError,
        r"padding_idx=4, but the weight has 4 rows; pass an int in \[-4, 4\)",
    )
    yield lambda: pk.embedding(ids, w, p, 1, padding_idx=-5), ValueError, "padding_idx=-5"


@pytest.mark.parametrize(("call", "error", "message"), list(error_cases()))
def test_bad_input_raises_and_names_the_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()
