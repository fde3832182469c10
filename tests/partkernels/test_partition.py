"""Partition: construction, moves, copies and files."""

from __future__ import annotations

import copy
import io
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import partkernels as pk
from partkernels.arguments import sizes
from partkernels.backend import dispatch

SHAPE = (4, 6)


def a_partition(defaults=None) -> pk.Partition:
    return pk.Partition.random(SHAPE, (0.5, 0.25, 0.25), seed=7, defaults=defaults)


ALL_DEFAULTS = [pk.Zeros(), pk.Uniform(0.1, 3, 4), pk.Normal(0.2, 5), pk.Stored(torch.randn(SHAPE))]


def assert_same(a: pk.Partition, b: pk.Partition) -> None:
    assert (a.shape, a.num_partitions, a.bits, a.row, a.col) == (b.shape, b.num_partitions, b.bits, b.row, b.col)
    assert type(a.defaults) is type(b.defaults)
    assert torch.equal(a.map, b.map)
    assert torch.equal(a.defaults.values(a.shape), b.defaults.values(b.shape))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one)), "torch.save": saved}


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_and_files_keep_every_bit(defaults, copied):
    partition = a_partition(defaults).rows(1, 3)
    result = COPIES[copied](partition)
    assert result.map.data_ptr() != partition.map.data_ptr()
    assert_same(result, partition)


def test_a_damaged_pickle_does_not_become_a_partition():
    partition = a_partition()
    partition.map[1, 0] = 0xFF  # id 3, but ids of 3 partitions are 0 to 2
    with pytest.raises(ValueError, match="an id above 3"):
        pickle.loads(pickle.dumps(partition))


def test_moves_take_the_map_and_stored_defaults_along():
    partition = a_partition(pk.Stored(torch.randn(SHAPE)))
    moved = partition.to("meta", torch.float64)
    assert moved.map.is_meta and moved.map.dtype == torch.uint8
    assert moved.defaults.tensor.is_meta and moved.defaults.tensor.dtype == torch.float64
    assert not partition.map.is_meta


def test_ids_and_masks_of_a_convolution_lie_as_its_weight_does():
    partition = pk.Partition.random((6, 5, 3, 3), (0.5, 0.5), seed=0)
    assert partition.ids().is_contiguous() and partition.mask(1).is_contiguous()


def test_from_ids_takes_any_strides():
    ids = torch.randint(1, 4, (6, 5), dtype=torch.uint8)
    assert torch.equal(pk.Partition.from_ids(ids.t(), num_partitions=3).ids(), ids.t())
    assert torch.equal(pk.Partition.from_ids(ids[:, :1].expand(6, 9), num_partitions=3).ids(), ids[:, :1].expand(6, 9))


@pytest.mark.parametrize("module", ["reference", "cpu"])
def test_maps_are_made_on_the_cpu_whatever_the_default_device(module):
    with torch.device("meta"):
        made = dispatch.choose(module, torch.device("cpu")).random_map(3, 5, [10, 5], 0)
        partition = pk.Partition.random(SHAPE, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, 0))
    assert made.device.type == partition.map.device.type == "cpu"
    assert partition.defaults == pk.Uniform(0.5, 0)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**9) | st.integers(0, 10**18),
    st.lists(st.integers(0, 1000), min_size=1, max_size=256).filter(any),
    st.sampled_from([lambda p: p, np.float32, lambda p: math.ceil(p * 1e7) / 1e7, lambda p: math.floor(p * 1e9) / 1e9]),
)
@example(2_000_000, [1], lambda p: 1.0000009)
@example(10**8, [8, 1, 1, 0], np.float32)
@example(1000, [1] * 7, lambda p: 0.1428571)
@example(10**18, [1] * 7, lambda p: p)
def test_sizes_are_the_rounded_shares_whatever_the_proportions_were_rounded_to(total, parts, rounded):
    proportions = [float(rounded(part / sum(parts))) for part in parts]
    if abs(sum(proportions) - 1) > 9e-7:
        return
    found = sizes(total, proportions)
    whole = sum(map(Fraction, proportions))
    assert sum(found) == total
    assert all(abs(n - Fraction(p) / whole * total) < 1 for n, p in zip(found, proportions, strict=True))
    assert sizes(total, np.array(proportions)) == found


@pytest.mark.parametrize("kind", [pk.Uniform, pk.Normal])
def test_a_scale_of_numpys_is_its_value(kind):
    for scale in (np.float16(3e-6), np.float32(0.3)):
        one, same = kind(scale, seed=0), kind(float(scale), seed=0)
        assert one == same and torch.equal(one.values((30, 40)), same.values((30, 40)))


def test_a_shard_of_a_shard_is_a_shard_of_the_whole():
    whole = pk.Partition.random((40, 500), (0.5, 0.3, 0.2), seed=1, defaults=pk.Normal(0.1, seed=2))
    once = whole.columns(128, 450).rows(7, 20)
    twice = whole.rows(5, 30).columns(64, 460).columns(64, 386).rows(2, 15)
    assert (once.row, once.col) == (twice.row, twice.col) == (7, 128)
    assert torch.equal(once.map, twice.map)


def test_rows_share_the_wholes_map_and_stored_defaults():
    whole = pk.Partition.random((5, 70), (0.5, 0.5), seed=1, defaults=pk.Stored(torch.randn(5, 70)))
    shard = whole.rows(2, 4)
    assert shard.map.data_ptr() == whole.map[2:].data_ptr()
    assert shard.defaults.tensor.data_ptr() == whole.defaults.tensor[2:].data_ptr()


def test_moved_and_copied_shards_stay_where_they_were():
    shard = (
        pk.Partition.random((5, 70), (0.5, 0.5), seed=1, defaults=pk.Uniform(0.1, seed=0)).rows(2, 4).columns(64, 70)
    )
    for other in (shard.to("meta"), shard.to(dtype=torch.float64), shard.map_tensors(torch.clone)):
        assert (other.row, other.col) == (2, 64)
    assert repr(shard).endswith("row=2, col=64)")
