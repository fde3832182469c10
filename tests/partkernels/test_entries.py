"""Entries exchanged at given places, and rows summed, by every backend. See test_fuzz.py for masks."""

from __future__ import annotations

import pytest
import torch
from against_dense import EVERY, Target

import partkernels as pk
from partkernels.backend.dispatch import BACKENDS
from partkernels.operators.entries import Exchange, combine_rows, exchange_entries
from partkernels.testing import poisoned_memory

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES)
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
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("target", EVERY, ids=str)
def test_tensors_of_an_exchange_may_move_in_memory(target):
    tensor, vector, rows = target.randn((4,)), target.randn((2,)), target.randn((3, 2))
    places = torch.tensor([1], dtype=torch.int32, device=target.device)
    value = torch.full((1,), 7.0, device=target.device)
    with target.use():
        exchange = Exchange([tensor], [places], [value], [None], [vector], [rows], [False])
        exchange(2)
        with torch.no_grad():
            tensor.data, vector.data, rows.data = (torch.full_like(one, 5.0) for one in (tensor, vector, rows))
        exchange(2)
    assert tensor.tolist() == [5, 7, 5, 5] and vector.tolist() == [10, 10]


@pytest.mark.parametrize(
    "changed",
    [
        lambda tensor, vector, rows: setattr(tensor, "data", tensor.data.double()),
        lambda tensor, vector, rows: setattr(tensor, "data", torch.zeros(8)[::2]),
        lambda tensor, vector, rows: setattr(vector, "data", vector.data.bfloat16()),
        lambda tensor, vector, rows: setattr(vector, "data", torch.zeros(4)[::2]),
        lambda tensor, vector, rows: setattr(rows, "data", torch.zeros(3, 5)),
        lambda tensor, vector, rows: setattr(rows, "data", torch.zeros(2, 3).t()),
    ],
)
def test_an_exchange_refuses_tensors_that_do_not_fit_any_more(changed):
    tensors = torch.zeros(4), torch.zeros(2), torch.ones(3, 2)
    tensor, vector, rows = tensors
    exchange = Exchange([tensor], [torch.tensor([1])], [torch.ones(1)], [None], [vector], [rows], [False])
    changed(*tensors)
    with pytest.raises(RuntimeError, match=r"(do|does) not fit"):
        exchange(2)
    assert not tensor.any() and not vector.any()


def test_a_prepared_exchange_follows_the_backend_that_is_requested():
    tensor, values = torch.zeros(3), torch.ones(1)
    exchange = Exchange([tensor], [torch.tensor([1])], [values], [None])
    with pk.use_backend("reference"):
        exchange(1)
        assert exchange._operators is BACKENDS["reference"].operators()
    assert tensor.tolist() == [0, 1, 0]
