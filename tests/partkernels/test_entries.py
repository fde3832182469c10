"""Entries of a partition or at given places, gathered, scattered and exchanged by every backend; sums of rows."""

from __future__ import annotations

import pytest
import torch
from against_dense import BY_ONE_PLAN, EVERY, INTERPRETED, Target
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

import partkernels as pk
from partkernels.backend.dispatch import BACKENDS
from partkernels.operators.entries import Exchange, combine_rows, exchange_entries
from partkernels.testing import poisoned_memory

# Some shapes span several tiles in each dimension: interpreted tiles have 64 rows and 512 columns.
SHAPES = [(1,), (130,), (5, 7), (3, 1100), (9, 5, 3), (4, 70, 3, 3), (2, 3, 9, 8), (2, 3, 2, 3, 2), (300, 128)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Each layout and its minimal number of dimensions.
LAYOUTS = {"contiguous": 1, "transposed": 2, "channels last": 4, "taps transposed": 4, "with gaps": 1}
DEFAULT, REFERENCE = Target("auto", "cpu"), Target("reference", "cpu")


def tensor_of(shape, layout: str, dtype, device: str = "cpu") -> torch.Tensor:
    tensor = torch.arange(1, torch.Size(shape).numel() + 1, device=device).view(shape).to(dtype)
    if layout == "transposed" and len(shape) > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels last" and len(shape) == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "taps transposed" and len(shape) > 3:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "with gaps":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def check(tensor: torch.Tensor, partition: pk.Partition, target: Target) -> None:
    """Gather a partition's entries and scatter them into NaNs; other partitions' entries must stay NaN."""
    before, count = tensor.clone(), partition.count
    for k in [(count + 1) // 2] if target.backend in INTERPRETED else range(1, count + 1):
        mask = (partition.ids() == k).to(tensor.device)
        with target.use(), poisoned_memory():
            values = pk.gather_entries(tensor, partition, k)
        assert torch.equal(values, before[mask])
        version = tensor.fill_(torch.nan)._version
        with target.use():
            pk.scatter_entries(tensor, partition, k, values)
        assert tensor._version > version or not len(values)
        others = torch.full_like(before, torch.nan)
        torch.testing.assert_close(tensor, torch.where(mask, before, others), rtol=0, atol=0, equal_nan=True)
        tensor.copy_(before)


@pairwise(
    lambda shape, layout, *_: len(shape) >= LAYOUTS[layout],
    shape=SHAPES,
    layout=list(LAYOUTS),
    dtype=DTYPES,
    target=BY_ONE_PLAN,
)
def test_they_are_what_a_mask_selects(shape, layout, dtype, target):
    tensor = tensor_of(shape, layout, dtype, target.device)
    for count in (1, 2, 3, 7, 40):
        check(tensor, pk.Partition.random(shape, (1 / count,) * count, seed=0).to(target.device), target)
    ends = [max(1, n // 2) for n in shape[:2]]
    cols = None if len(shape) == 1 else (ends[1], ends[1], shape[1])
    check(tensor, pk.Partition.nested(shape, (0, ends[0], shape[0]), cols), target)


@pytest.mark.full
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    count=st.sampled_from([1, 2, 3, 5, 17]),
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_any_partition(shape, count, layout, seed):
    ids = torch.randint(1, count + 1, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    partition = pk.Partition.from_ids(ids, count=count)
    for target in (DEFAULT, REFERENCE):
        check(tensor_of(shape, layout, torch.float32), partition, target)


@pytest.mark.cases(usual=3)
@pytest.mark.parametrize("target", [DEFAULT, REFERENCE, *BY_ONE_PLAN], ids=str)
def test_shards_and_threads(target):
    partition = pk.Partition.random((512, 256), (0.8, 0.1, 0.1), seed=0).to(target.device)
    tensor = target.randn((512, 256))
    check(tensor[100:400], partition.rows(100, 400), target)
    check(tensor[:, 64:192], partition.columns(64, 192), target)


def test_gradients_stay_behind():
    partition = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    weight = torch.nn.Parameter(torch.ones(4, 6))
    assert not pk.gather_entries(weight, partition, 1).requires_grad
    pk.scatter_entries(weight, partition, 1, torch.zeros(12))
    assert weight.is_leaf and weight.sum() == 12


LENGTHS = [1, 7, 1024, 3000]


def tensors_of(target: Target, dtype: torch.dtype) -> tuple[list, list, list]:
    """Return vectors, distinct places in them, and values for these."""
    tensors = [target.randn((size,)).to(dtype) for size in LENGTHS]
    places = [torch.randperm(size)[: (size + 1) // 2].sort().values.int().to(target.device) for size in LENGTHS]
    return tensors, places, [target.randn(at.shape).to(dtype) for at in places]


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("target", EVERY, ids=str)
def test_entries_are_saved_and_replaced(target, dtype):
    tensors, places, values = tensors_of(target, dtype)
    before, given = [tensor.clone() for tensor in tensors], [value.clone() for value in values]
    versions = [tensor._version for tensor in tensors]
    with target.use(), poisoned_memory():
        saved = [None if i == 1 else torch.empty_like(value) for i, value in enumerate(values)]
        exchange_entries(tensors, places, values, saved)
    for tensor, at, value, kept, old, new in zip(tensors, places, values, saved, before, given, strict=True):
        assert kept is None or torch.equal(kept, old[at.long()])
        assert torch.equal(tensor, old.index_put((at.long(),), new)) and torch.equal(value, new)
    assert all(tensor._version > version for tensor, version in zip(tensors, versions, strict=True))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("target", EVERY, ids=str)
def test_several_lists_of_places_in_one_tensor_take_turns(target, is_sorted):
    ids = torch.rand(100_000)  # beyond a part that stays in the cache
    places = [((low < ids) & (ids < low + 0.1)).nonzero().view(-1) for low in (0.1, 0.2, 0.7)]
    if not is_sorted:
        places = [at[torch.randperm(len(at))] for at in places]
    places = [at.int().to(target.device) for at in places]
    tensor = target.randn((len(ids),)).float()
    before, values = tensor.clone(), [target.randn(at.shape).float() for at in places]
    saved = [torch.full_like(value, torch.nan) for value in values]
    with target.use():
        Exchange([tensor] * 3, places, values, saved)(1)
    assert all(torch.equal(kept, before[at.long()]) for kept, at in zip(saved, places, strict=True))
    assert torch.equal(tensor, before.index_put((torch.cat(places).long(),), torch.cat(values)))


@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("target", EVERY, ids=str)
def test_rows_are_summed_or_multiplied(target, dtype, active):
    shapes = [(), (5,), (1, 3, 4), (2000,)]
    rows = [target.randn((4, *shape)).to(dtype) for shape in shapes]
    are_products = [False, True, False, True]
    with target.use(), poisoned_memory():
        vectors = [torch.empty(shape, dtype=dtype, device=target.device) for shape in shapes]
        combine_rows(vectors, rows, active, are_products)
    for vector, each, is_product in zip(vectors, rows, are_products, strict=True):
        exact = each[:active].double()
        exact = exact.prod(0) if is_product else exact.sum(0)
        torch.testing.assert_close(
            vector.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )


def test_places_that_do_not_fit_are_refused_before_anything_changes():
    tensor, values = torch.arange(4.0), torch.zeros(2)
    for places, others in [
        (torch.tensor([0, 1, 2]), values),
        (torch.tensor([0.0, 1.0]), values),
        (torch.tensor([0, 1]), values.double()),
        (torch.tensor([[0, 1]]), values),
    ]:
        with pytest.raises((RuntimeError, ValueError)):
            exchange_entries([tensor], [places], [others], [None])
    assert torch.equal(tensor, torch.arange(4.0)) and not values.any()


def test_a_prepared_exchange_follows_the_backend_that_is_requested():
    tensor, values = torch.zeros(3), torch.ones(1)
    exchange = Exchange([tensor], [torch.tensor([1])], [values], [None])
    with pk.use_backend("reference"):
        exchange(1)
        assert exchange._operators is BACKENDS["reference"].operators()
    assert tensor.tolist() == [0, 1, 0]
