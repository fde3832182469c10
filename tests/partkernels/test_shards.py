"""Results with a shard of a weight and its partition equal, bit for bit, that part of the complete result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from against_dense import BY_ONE_PLAN, COMPILED, DTYPES, KINDS, TARGETS, TRITON, Target, defaults_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import partkernels as pk

ACTIVE = 2


def on_every_target(cuts: st.SearchStrategy, targets: list[Target] = TARGETS):
    """Test a claim about (target, cut) for random cuts; for only 3 if kernels are interpreted, which takes seconds."""

    def decorate(claim):
        @pytest.mark.parametrize("target", [Target("reference", "cpu"), *targets], ids=str)
        def test(target):
            examples = 3 if target in TRITON and target not in COMPILED else 25
            settings(max_examples=examples, deadline=None)(given(cuts)(lambda cut: claim(target, cut)))()

        return test

    return decorate


@dataclass
class Cut:
    """The shape of a weight and a part of its rows and columns (input channels)."""

    shape: tuple[int, ...]
    count: int
    kind: str
    dtype: torch.dtype
    rows: slice
    columns: slice

    def made(self, target: Target) -> tuple[Tensor, pk.Partition, pk.Partition]:
        """Return the weight, its partition, and the partition's shard."""
        defaults = defaults_of(self.kind, self.shape, self.dtype)
        proportions = [1 / self.count] * self.count
        whole = pk.Partition.random(self.shape, proportions, seed=4, defaults=defaults).to(target.device)
        shard = whole.rows(self.rows.start, self.rows.stop)
        if self.columns != slice(0, self.shape[1]):
            shard = shard.columns(self.columns.start, self.columns.stop)
        return target.randn(self.shape).to(self.dtype), whole, shard

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.rows, self.columns]


@st.composite
def cuts(draw, kernel: int = 1, *, is_conv: bool = False) -> Cut:
    """Draw a cut of a linear layer, or of a convolution with `kernel` kernel rows; with several, keep all columns."""
    rows, cols = draw(st.integers(1, 12)), draw(st.integers(1, 200))
    count = draw(st.sampled_from([2, 3, 9, 40]))
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from(DTYPES))
    first_row = draw(st.integers(0, rows - 1))
    bits = pk.Partition.random((1, 1), [1 / count] * count, seed=0).bits
    step = 64 if kind in ("uniform", "normal") else 8 // bits
    first_col = 0 if kernel > 1 else step * draw(st.integers(0, (cols - 1) // step))
    last_col = cols if kernel > 1 else draw(st.integers(first_col + 1, cols))
    shape = (rows, cols, kernel, 1) if is_conv else (rows, cols)
    return Cut(
        shape, count, kind, dtype, slice(first_row, draw(st.integers(first_row + 1, rows))), slice(first_col, last_col)
    )


@on_every_target(st.one_of(cuts(), cuts(is_conv=True), cuts(kernel=3, is_conv=True)), BY_ONE_PLAN)
def test_the_weight_of_a_shards_subnetwork_is_that_part_of_the_wholes(target, cut):
    weight, whole, shard = cut.made(target)
    part = cut.of(weight).detach().requires_grad_()
    weight.requires_grad_()
    with target.use():
        expected = pk.subnetwork_weight(weight, whole, 1, update=1)
        ours = pk.subnetwork_weight(part, shard, 1, update=1)
        grad = torch.autograd.grad(expected.sum(), weight)[0]
        ours_grad = torch.autograd.grad(ours.sum(), part)[0]
    assert torch.equal(ours, cut.of(expected)) and torch.equal(ours_grad, cut.of(grad))


@pytest.mark.cases(usual=2)
@on_every_target(cuts())
def test_a_shards_products_with_unit_vectors_are_that_part_of_the_whole_weight(target, cut):
    weight, whole, shard = cut.made(target)
    with pk.use_backend("reference"):
        expected = cut.of(pk.subnetwork_weight(weight, whole, ACTIVE))
    part = cut.of(weight).detach().requires_grad_()
    rows, cols = part.shape
    x = torch.eye(cols, dtype=cut.dtype, device=target.device, requires_grad=True)
    grad = torch.eye(cols, rows, dtype=cut.dtype, device=target.device)
    with target.use():
        y = pk.linear(x, part, shard, ACTIVE, update=ACTIVE)
        grad_x, grad_w = torch.autograd.grad(y, (x, part), grad)
    assert torch.equal(y.t(), expected)
    assert torch.equal(grad_x[:rows], expected[:cols]) and not grad_x[rows:].any()
    assert torch.equal(grad_w, torch.where(cut.of(whole.mask(ACTIVE)), grad.t(), 0))


@on_every_target(st.one_of(cuts(is_conv=True), cuts(kernel=2, is_conv=True)))
def test_a_shards_convolutions_of_single_pixels_are_that_part_of_the_whole_weight(target, cut):
    weight, whole, shard = cut.made(target)
    with pk.use_backend("reference"):
        expected = cut.of(pk.subnetwork_weight(weight, whole, ACTIVE))
    part = cut.of(weight).detach()
    pixels = expected[0].numel()
    # One image per input channel and kernel row: 1 at this position, 0 elsewhere.
    x = torch.eye(pixels, dtype=cut.dtype, device=target.device).view(pixels, *expected.shape[1:]).requires_grad_()
    with target.use():
        y = pk.conv2d(x, part, shard, ACTIVE)
        grad = torch.eye(pixels, len(part), dtype=cut.dtype, device=target.device)[:, :, None, None]
        grad_x = torch.autograd.grad(y, x, grad)[0]
    assert torch.equal(y[:, :, 0, 0].t(), expected.flatten(1))
    some = min(pixels, len(part))
    assert torch.equal(grad_x[:some], expected[:some]) and not grad_x[some:].any()


@on_every_target(cuts(), BY_ONE_PLAN)
def test_a_shards_steps_are_that_part_of_the_wholes(target, cut):
    weight, whole, shard = cut.made(target)
    grad, first, second = (target.randn(cut.shape).to(cut.dtype) for _ in range(3))
    tensors = [weight, grad, first, second.abs()]
    parts = [cut.of(tensor).clone() for tensor in tensors]
    with target.use():
        for (parameter, grad, first, second), partition in ((tensors, whole), (parts, shard)):
            pk.sgd_step(parameter, grad, first, partition, ACTIVE, lr=0.1, momentum=0.9, weight_decay=0.1)
            pk.adam_step(parameter, grad, first, second, partition, ACTIVE, step=3, lr=0.1, weight_decay=0.1)
    for ours, theirs in zip(parts, tensors, strict=True):
        torch.testing.assert_close(ours, cut.of(theirs))


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


@pytest.mark.parametrize("target", COMPILED, ids=str)
def test_stored_defaults_of_columns_are_read_by_their_own_strides(target):
    defaults = pk.Stored(torch.randn(48, 300))
    whole = pk.Partition.random((48, 300), (0.5, 0.3, 0.2), seed=1, defaults=defaults).to(target.device)
    shard, weight = whole.columns(64, 192), target.randn((48, 128))
    with pk.use_backend("reference"):
        expected = pk.subnetwork_weight(weight, shard, ACTIVE)
    with target.use():
        y = pk.linear(torch.eye(128, device=target.device), weight, shard, ACTIVE)
    assert shard.defaults.stored.stride(0) != weight.stride(0) and torch.equal(y.t(), expected)


def test_moved_and_copied_shards_stay_where_they_were():
    shard = (
        pk.Partition.random((5, 70), (0.5, 0.5), seed=1, defaults=pk.Uniform(0.1, seed=0)).rows(2, 4).columns(64, 70)
    )
    for other in (shard.to("meta"), shard.to(dtype=torch.float64), shard.map_tensors(torch.clone)):
        assert (other.row, other.col) == (2, 64)
    assert repr(shard).endswith("row=2, col=64)")
