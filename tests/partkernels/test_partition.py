"""Partition: construction, moves, copies, files, and invalid input."""

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
from partkernels.arguments import bits_for, matrix_shape, row_bytes, sizes
from partkernels.backend import dispatch

SHAPE = (4, 6)
IDS = torch.ones(SHAPE, dtype=torch.uint8)


def a_partition(defaults=None) -> pk.Partition:
    return pk.Partition.random(SHAPE, (0.5, 0.25, 0.25), seed=7, defaults=defaults)


ALL_DEFAULTS = [pk.Zeros(), pk.Uniform(0.1, 3, 4), pk.Normal(0.2, 5), pk.Stored(torch.randn(SHAPE))]


def assert_same(a: pk.Partition, b: pk.Partition) -> None:
    assert (a.shape, a.count, a.bits, a.row, a.col) == (b.shape, b.count, b.bits, b.row, b.col)
    assert type(a.defaults) is type(b.defaults)
    assert torch.equal(a.map, b.map)
    assert torch.equal(a.defaults.values(a.shape), b.defaults.values(b.shape))


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_files_keep_every_bit(defaults, copied):
    partition = a_partition(defaults).rows(1, 3)
    if copied == "deepcopy":
        result = copy.deepcopy(partition)
        assert result.map.data_ptr() != partition.map.data_ptr()
    elif copied == "pickle":
        result = pickle.loads(pickle.dumps(partition))
    else:
        file = io.BytesIO()
        torch.save({"partition": partition}, file)
        file.seek(0)
        result = torch.load(file, weights_only=True)["partition"]
    assert_same(result, partition)


def test_what_was_pickled_before_there_were_shards_is_whole():
    state = {name: value for name, value in vars(a_partition()).items() if name not in ("row", "col")}
    restored = object.__new__(pk.Partition)
    restored.__setstate__(state)
    assert (restored.row, restored.col) == (0, 0)


def test_a_damaged_pickle_does_not_become_a_partition():
    partition = a_partition()
    partition.map[1, 0] = 0xFF  # id 3, but ids of 3 partitions are 0 to 2
    with pytest.raises(ValueError, match="above its count of 3"):
        pickle.loads(pickle.dumps(partition))


def test_moves_take_the_map_and_stored_defaults_along():
    partition = a_partition(pk.Stored(torch.randn(SHAPE)))
    moved = partition.to("meta", torch.float64)
    assert moved.map.is_meta and moved.map.dtype == torch.uint8
    assert moved.defaults.tensor.is_meta and moved.defaults.tensor.dtype == torch.float64
    assert not partition.map.is_meta


def test_ids_are_what_from_ids_was_given():
    ids = torch.randint(1, 41, (5, 3, 2, 4), dtype=torch.uint8)
    partition = pk.Partition.from_ids(ids, count=40)
    assert torch.equal(partition.ids(), ids)
    assert partition.bits == 8
    assert partition.sizes() == [int((ids == k).sum()) for k in range(1, 41)]
    assert torch.equal(partition.mask(7), ids == 7)


def test_ids_and_masks_of_a_convolution_lie_as_its_weight_does():
    partition = pk.Partition.random((6, 5, 3, 3), (0.5, 0.5), seed=0)
    assert partition.ids().is_contiguous() and partition.mask(1).is_contiguous()


def test_from_ids_takes_any_strides():
    ids = torch.randint(1, 4, (6, 5), dtype=torch.uint8)
    assert torch.equal(pk.Partition.from_ids(ids.t(), count=3).ids(), ids.t())
    assert torch.equal(pk.Partition.from_ids(ids[:, :1].expand(6, 9), count=3).ids(), ids[:, :1].expand(6, 9))


def test_random_partitions_have_their_proportions_and_differ_by_seed():
    a = pk.Partition.random((30, 30), (0.8, 0.1, 0.1), seed=0)
    b = pk.Partition.random((30, 30), (0.8, 0.1, 0.1), seed=1)
    assert a.sizes() == b.sizes() == [720, 90, 90]
    assert not torch.equal(a.map, b.map)


@pytest.mark.parametrize("module", ["reference", "cpu"])
def test_maps_are_made_on_the_cpu_whatever_the_default_device(module):
    with torch.device("meta"):
        made = dispatch.choose(module, torch.device("cpu")).random_map(3, 5, [10, 5], 0)
        partition = pk.Partition.random(SHAPE, (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, 0))
    assert made.device.type == partition.map.device.type == "cpu"
    assert partition.defaults == pk.Uniform(0.5, 0)


def test_256_partitions_fit():
    partition = pk.Partition.random((32, 32), [1 / 256] * 256, seed=0)
    assert (partition.bits, partition.sizes()) == (8, [4] * 256)
    assert partition.ids().max() == 256
    assert_same(copy.deepcopy(partition), partition)
    assert_same(pk.Partition(partition.shape, 256, partition.map), partition)


@pytest.mark.full
@settings(deadline=None)
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


# Sizes that earlier versions computed, including ties of rounded products; saved maps depend on them.
@pytest.mark.parametrize(
    ("total", "proportions", "expected"),
    [(25, (0.7, 0.2, 0.1), [18, 5, 2]), (8, (0.7, 0.2, 0.1), [5, 2, 1]), (14, (0.6, 0.3, 0.1), [9, 4, 1])],
)
def test_maps_of_before_stay(total, proportions, expected):
    assert sizes(total, proportions) == expected


def map_of(shape, count):
    rows, cols = matrix_shape(shape)
    return torch.zeros(rows, row_bytes(cols, bits_for(count)), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pk.Partition.random(SHAPE, (0.5, 0.4), seed=0), ValueError, "sum to 0.9; pass numbers"),
        (lambda: pk.Partition.random(SHAPE, (1.5, -0.5), seed=0), ValueError, "not negative"),
        (lambda: pk.Partition.random(SHAPE, (float("nan"), 1), seed=0), ValueError, "pass numbers"),
        (lambda: pk.Partition.random(SHAPE, (), seed=0), ValueError, "pass 1 to 256"),
        (lambda: pk.Partition.random(SHAPE, [1 / 257] * 257, seed=0), ValueError, "257 proportions.*1 to 256"),
        (lambda: pk.Partition.random(SHAPE, (1.0,), seed=-1), ValueError, r"seed=-1 .* \[0, 2\*\*63\)"),
        (lambda: pk.Partition.random(SHAPE, (1.0,), seed=2**63), ValueError, "out of range"),
        (lambda: pk.Partition.random(SHAPE, (1.0,), seed=0.5), TypeError, "pass an int"),
        (lambda: pk.Partition.random((4, 0), (1.0,), seed=0), ValueError, r"\(4, 0\) is empty"),
        (lambda: pk.Partition.random((), (1.0,), seed=0), ValueError, "is empty"),
        (lambda: pk.Partition.from_ids(torch.zeros(2, 2, dtype=torch.uint8)), ValueError, "numbered from 1"),
        (lambda: pk.Partition.from_ids(torch.zeros(2, 2, dtype=torch.uint8), count=2), ValueError, "from 0 to 0"),
        (lambda: pk.Partition.from_ids(torch.ones(2, 2)), ValueError, "pass torch.uint8"),
        (
            lambda: pk.Partition.from_ids(torch.full((2, 2), 4, dtype=torch.uint8), count=3),
            ValueError,
            r"from 4 to 4, but there are 3 .* 1\.\.3",
        ),
        (lambda: pk.Partition(SHAPE, 300, map_of(SHAPE, 3)), ValueError, "count=300; pass an int from 1 to 256"),
        (lambda: pk.Partition(SHAPE, 3, map_of((5, 6), 3)), ValueError, r"shape \(4, 16\).*from_ids"),
        (lambda: pk.Partition(SHAPE, 3, map_of(SHAPE, 3).int()), ValueError, "torch.int32"),
        (lambda: pk.Partition(SHAPE, 3, map_of(SHAPE, 3) | 3), ValueError, "above its count of 3"),
        (lambda: pk.Partition(SHAPE, 4, map_of(SHAPE, 4) | 0x40), ValueError, "padding that is not 0"),
        (lambda: a_partition(pk.Stored(torch.zeros(4, 7))), ValueError, r"\(4, 7\); pass Stored.*\(4, 6\)"),
        (
            lambda: a_partition(pk.Stored(torch.zeros(SHAPE, device="meta"))),
            ValueError,
            "on meta and the map is on cpu",
        ),
        (lambda: pk.Stored(torch.zeros(2, dtype=torch.int32)), TypeError, "floating-point"),
        (lambda: a_partition().rows(2, 2), ValueError, r"rows\(2, 2\) of 4; pass 0 <= start < stop <= 4"),
        (lambda: a_partition().rows(-1, 2), ValueError, r"rows\(-1, 2\)"),
        (lambda: a_partition().columns(0, 7), ValueError, r"columns\(0, 7\) of 6"),
        (lambda: a_partition().columns(2, 6), ValueError, "inside a byte of the map; begin at a multiple of 4"),
        (lambda: a_partition(pk.Uniform(0.1, 3)).columns(4, 6), ValueError, "begin at a multiple of 64, or keep"),
        (
            lambda: pk.Partition.random((4, 8, 3, 1), (1.0,), seed=0).columns(0, 4),
            ValueError,
            "a kernel of 1x1; cut it",
        ),
        (lambda: pk.Partition.random((4,), (1.0,), seed=0).columns(0, 1), ValueError, r"\(4,\) cannot be cut"),
        (lambda: pk.Partition(SHAPE, 3, map_of(SHAPE, 3), row=-1), ValueError, r"row=-1, col=0; pass the position"),
        (lambda: pk.Partition(SHAPE, 3, map_of(SHAPE, 3), col=2**31), ValueError, r"in \[0, 2\*\*31\)"),
        (lambda: pk.Partition(SHAPE, 3, map_of(SHAPE, 3), row="1"), ValueError, "row='1'"),
        (lambda: pk.Partition(SHAPE, True, map_of(SHAPE, 1)), ValueError, "count=True; pass an int"),
        (lambda: pk.Partition.from_ids(IDS, count=2.5), ValueError, "count=2.5; pass an int from 1 to 256"),
        (lambda: pk.Partition.random((4.5, 3), (1.0,), seed=0), TypeError, r"\(4.5, 3\) is not a sequence of ints"),
        (lambda: pk.Partition.random(4, (1.0,), seed=0), TypeError, "shape 4 is not a sequence of ints"),
        (lambda: pk.Uniform(True, 0), TypeError, "scale=True is a bool; pass a number"),
        (lambda: pk.Normal("0.1", 0), TypeError, "std='0.1' is a str"),
        (lambda: pk.Stored(torch.ones(2, 2).to_sparse()), TypeError, "torch.sparse_coo; pass a dense one"),
        (lambda: pk.Uniform(float("nan"), 0), ValueError, "scale=nan"),
        (lambda: pk.Uniform(-1.0, 0), ValueError, r"scale=-1.0 .* or use Zeros\(\)"),
        (lambda: pk.Normal(float("inf"), 0), ValueError, "std=inf"),
        (lambda: pk.Normal(1.0, -2), ValueError, "seed=-2"),
        (lambda: pk.Uniform(1.0, 0, stream=-2), ValueError, "stream=-2"),
    ],
)
def test_bad_input_raises_and_names_the_cure(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_partition_that_there_is_not_has_no_mask():
    partition = pk.Partition.random((4, 4), (0.5, 0.5), seed=0)
    for number in (0, 3, None):
        with pytest.raises(ValueError, match=f"partition={number}, but this partition has 2 parts"):
            partition.mask(number)


@pytest.mark.parametrize("defaults", [False, 0.5, pk.Uniform])
def test_what_are_no_defaults_are_refused(defaults):
    with pytest.raises(TypeError, match="pass Zeros"):
        pk.Partition.random((4, 4), (0.5, 0.5), seed=0, defaults=defaults)


@pytest.mark.parametrize("kind", [pk.Uniform, pk.Normal])
def test_a_scale_of_numpys_is_its_value(kind):
    for scale in (np.float16(3e-6), np.float32(0.3)):
        one, same = kind(scale, seed=0), kind(float(scale), seed=0)
        assert one == same and torch.equal(one.values((30, 40)), same.values((30, 40)))
