"""gather_entries and scatter_entries: a mask's entries in order, for any strides, dtype and backend."""

from __future__ import annotations

import pytest
import torch
from against_dense import BY_ONE_PLAN, INTERPRETED, Target
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

import partkernels as pk
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


@pytest.mark.parametrize("nested", [False, True])
def test_what_does_not_fit_is_refused_before_anything_changes(nested):
    partition = pk.Partition.nested((4, 6), (2, 4), (3, 6))
    partition = partition if nested else partition.explicit()
    tensor = torch.zeros(4, 6)
    length = partition.sizes()[1]
    for number in (0, 3, True, 1.0):
        with pytest.raises(ValueError, match="number="):
            pk.gather_entries(tensor, partition, number)
    with pytest.raises(ValueError, match="shape"):
        pk.gather_entries(torch.zeros(4, 5), partition, 1)
    with pytest.raises(TypeError, match="floating"):
        pk.gather_entries(torch.zeros(4, 6, dtype=torch.int64), partition, 1)
    for values in (torch.ones(length, dtype=torch.float64), torch.ones(length, 1), torch.ones(length, device="meta")):
        with pytest.raises(ValueError, match="values are"):
            pk.scatter_entries(tensor, partition, 2, values)
    for backend in ("auto", "reference", *INTERPRETED):
        with pk.use_backend(backend), pytest.raises((ValueError, RuntimeError), match=r"values|entries"):
            pk.scatter_entries(tensor, partition, 2, torch.ones(length + 1))
    assert not tensor.any()


def test_values_that_share_memory_are_refused():
    partition = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    tensor = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="share memory"):
        pk.scatter_entries(tensor, partition, 1, tensor.view(-1)[:12])


@pytest.mark.parametrize("tensor", [torch.zeros(1, 6).expand(4, 6), torch.zeros(9).as_strided((4, 6), (1, 1))])
def test_entries_that_share_memory_cannot_be_written_apart(tensor):
    partition = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    with pytest.raises(ValueError, match="tensor has entries that share memory"):
        pk.scatter_entries(tensor, partition, 1, torch.ones(partition.sizes()[0]))
    assert not tensor.any()


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("backend", ["auto", "reference", *INTERPRETED])
def test_operators_are_registered_as_torch_wants_them(backend):
    partition = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
    library = torch.ops.partkernels
    arguments = 1, partition.map, 2, backend
    torch.library.opcheck(library.gather_entries.default, (torch.ones(4, 6), *arguments))
    torch.library.opcheck(library.scatter_entries.default, (torch.ones(4, 6), torch.zeros(12), *arguments))
