"""`embedding` returns the rows of the materialised weight, bit for bit, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from against_dense import (
    COMPILED,
    DTYPES,
    EVERY,
    INTERPRETED,
    KINDS,
    LAYOUTS,
    TRITON,
    Target,
    defaults_of,
    in_layout,
)
from pairwise import pairwise
from torch import Tensor

import partkernels as pk
from partkernels.testing import poisoned_memory

EVERY_BACKEND = pytest.mark.parametrize("target", EVERY, ids=str)


def table(shape, dtype, kind, target, count=3) -> tuple[Tensor, pk.Partition]:
    partition = pk.Partition.random(shape, [1 / count] * count, seed=4, defaults=defaults_of(kind, shape, dtype))
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
    lambda count, kind, dtype, target: (
        (target.backend not in INTERPRETED or count == 3 or kind == "uniform")
        and (dtype != torch.float16 or target in TRITON)
    ),
    count=[1, 2, 3, 9, 40],
    kind=KINDS,
    dtype=[*DTYPES, torch.float16],
    target=EVERY,
)
def test_rows_are_those_of_the_materialised_weight(count, kind, dtype, target):
    weight, partition = table((37, 130), dtype, kind, target, count)
    for active in {1, (count + 1) // 2, count}:
        check(ids_of(37, (9,), target), weight, partition, active, target)


@pytest.mark.cases(usual=2)
@pairwise(
    dtype=[torch.int32, torch.int64],
    batch=[(), (0,), (1,), (2, 0, 3), (70,), (3, 2, 5), (501,)],  # many ids are divided among threads
    shape=[(1, 1), (5, 64), (3, 700), (300, 5), (40, 150)],
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


@pytest.mark.parametrize("target", COMPILED, ids=str)
def test_a_table_is_never_materialised(target):
    weight, partition = table((5000, 64), torch.float32, "uniform", target)
    ids = ids_of(5000, (10,), target)
    with target.use(), torch.profiler.profile(profile_memory=True) as profile:
        out = pk.embedding(ids, weight, partition, 2)
    taken = [event.self_cpu_memory_usage + event.self_device_memory_usage for event in profile.key_averages()]
    assert out.nbytes <= sum(bytes for bytes in taken if bytes > 0) < 4 * out.nbytes


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
