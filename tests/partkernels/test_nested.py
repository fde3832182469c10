"""Nested partitions give the results of the equivalent explicit map, computed from active channels only."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import partkernels as pk
from partkernels.operators import nested as products
from partkernels.testing import poisoned_memory

ENDS = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.integers(0, size), max_size=3).map(lambda e: [*sorted(e), size])
)
SEGMENTS = st.lists(ENDS, min_size=1, max_size=3)


def nested(shape, rows, cols=None) -> pk.NestedPartition:
    return pk.Partition.nested(shape, rows, cols)


# Each case: operator, weight shape, active rows n and columns m of each subnetwork, shape of x, and options.
CASES = {
    "linear": (pk.linear, (7, 9), (3, 5, 7), (2, 6, 9), (4, 9), {}),
    "linear, segments": (pk.linear, (7, 9), ((1, 1, 2), (2, 4, 5)), ((1, 3, 4), (1, 1, 3), (0, 1, 2)), (4, 9), {}),
    "linear, all inputs": (pk.linear, (7, 9), (3, 5, 7), None, (2, 3, 9), {}),
    "linear of a vector": (pk.linear, (7, 9), (3, 3, 7), (2, 6, 9), (9,), {}),
    "linear, empty": (pk.linear, (7, 9), (3, 5, 7), (2, 6, 9), (0, 9), {}),
    "linear, nothing at first": (pk.linear, (7, 9), (0, 5, 7), (0, 6, 9), (4, 9), {}),
    "conv2d, no output at first": (pk.conv2d, (6, 5, 3, 3), (0, 5, 6), (1, 4, 5), (2, 5, 7, 6), {"padding": 1}),
    "conv2d, no input at first": (pk.conv2d, (6, 5, 3, 3), (2, 5, 6), (0, 4, 5), (2, 5, 7, 6), {"stride": 2}),
    "conv_transpose2d, nothing": (pk.conv_transpose2d, (5, 6, 3, 3), (0, 4, 5), (0, 5, 6), (2, 5, 4, 4), {"stride": 2}),
    "conv2d": (pk.conv2d, (6, 5, 3, 2), (2, 5, 6), (1, 4, 5), (2, 5, 7, 6), {"padding": 1, "stride": (2, 1)}),
    "conv2d, segments": (pk.conv2d, (6, 5, 3, 3), ((2, 3, 4), (0, 1, 2)), ((1, 2, 2), (2, 2, 3)), (2, 5, 5, 6), {}),
    "conv2d, same": (pk.conv2d, (6, 5, 3, 2), (2, 5, 6), (1, 4, 5), (2, 5, 7, 6), {"padding": "same"}),
    "conv2d of an image": (pk.conv2d, (6, 5, 3, 3), (2, 5, 6), (1, 4, 5), (5, 7, 6), {"dilation": 2}),
    "conv2d by depth": (pk.conv2d, (6, 1, 3, 3), (2, 5, 6), None, (2, 6, 5, 5), {"groups": 6}),
    "conv2d, whole groups": (pk.conv2d, (6, 2, 3, 3), (2, 4, 6), None, (2, 6, 5, 5), {"groups": 3}),
    "conv2d, parts of groups": (pk.conv2d, (6, 2, 3, 3), (1, 3, 6), (1, 1, 2), (2, 6, 5, 5), {"groups": 3}),
    "conv2d, segments of groups": (
        pk.conv2d, (6, 2, 3, 3), ((1, 2, 4), (0, 1, 2)), None, (2, 6, 5, 5), {"groups": 3}
    ),
    "conv1d": (pk.conv1d, (6, 5, 3), (2, 5, 6), (1, 4, 5), (2, 5, 9), {"stride": 2}),
    "conv_transpose2d": (
        pk.conv_transpose2d, (5, 6, 3, 3), (1, 4, 5), (2, 5, 6), (2, 5, 4, 4), {"stride": 2, "output_padding": 1}
    ),
    "conv_transpose2d, segments": (
        pk.conv_transpose2d, (5, 6, 3, 3), ((1, 2, 2), (1, 2, 3)), ((2, 3, 4), (0, 1, 2)), (2, 5, 4, 4), {}
    ),
    "conv_transpose1d": (pk.conv_transpose1d, (5, 6, 3), (1, 4, 5), (2, 5, 6), (2, 5, 4), {"padding": 1}),
    "conv_transpose2d, groups": (pk.conv_transpose2d, (4, 3, 3, 3), (2, 3, 4), (1, 2, 3), (2, 4, 4, 4), {"groups": 2}),
}  # fmt: skip
LIVE = [(1, 1), (2, None), (2, 1), (2, 2), (3, 2), (3, 3)]


def inputs(case: str, dtype=torch.float64):
    operator, shape, rows, cols, x_shape, options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (x_shape, shape))
    made = shape[1] * options.get("groups", 1) if "transpose" in case else shape[0]
    rows_of_bias = torch.randn(3, made, generator=generator, dtype=torch.float64).to(dtype)
    return operator, x, weight, rows_of_bias, nested(shape, rows, cols), options


def computed(operator, x, weight, bias, partition, active, update, **options):
    """Return the result and the gradients of x, weight and bias; None for an input without a gradient."""
    leaves = [one.detach().clone().requires_grad_() for one in (x, weight, bias)]
    y = operator(leaves[0], leaves[1], partition, active, update=update, bias=leaves[2], **options)
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, leaves, grad, allow_unused=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("active, update", LIVE)
def test_nested_partitions_agree_with_their_explicit_maps(case, active, update):
    operator, x, weight, bias, partition, options = inputs(case)
    for own_bias in (bias, bias[0]):
        with pk.use_backend("reference"):
            expected = computed(operator, x, weight, own_bias, partition.explicit(), active, update, **options)
        if "groups" not in case:  # whose inactive channels are multiplied, too
            weight[partition.ids() > active] = torch.nan
        for backend in ("auto", "reference"):
            with pk.use_backend(backend), poisoned_memory():
                found = computed(operator, x, weight, own_bias, partition, active, update, **options)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            if update is not None:
                assert not found[2][~partition.mask(update)].any()


@pytest.mark.parametrize("case", CASES)
def test_sliced_channels_give_the_active_part_of_the_full_output(case):
    operator, x, weight, bias, partition, options = inputs(case)
    kind = options.get("groups", 1), "transpose" in case
    taken, made = products.inputs(partition, *kind), products.outputs(partition, *kind)
    dim = {"linear": -1, "conv1d": -2}.get(operator.__name__, -2 if "1d" in case else -3)
    for active, update in LIVE:
        whole = operator(x, weight, partition, active, update=update, bias=bias, **options)
        few = taken.take(x, dim, active)
        found = operator(few, weight, partition, active, update=update, bias=bias, narrow=True, **options)
        torch.testing.assert_close(found, made.take(whole, dim, active), rtol=1e-12, atol=1e-12)
        with pk.use_backend("reference"):
            again = operator(few, weight, partition, active, update=update, bias=bias, narrow=True, **options)
        torch.testing.assert_close(again, found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("active, update", [(2, 1), (3, 3)])
def test_second_derivatives_are_the_equal_maps(case, active, update):
    """Differentiate a penalty on gradients; the derivatives of other partitions are 0."""
    operator, x, weight, bias, partition, options = inputs(case)
    found = []
    for each in (partition, partition.explicit()):
        leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
        y = operator(leaves[0], leaves[1], each, active, update=update, bias=leaves[2], **options)
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in first), leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert not found[0][1][~partition.mask(update)].any()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch's compiler
def test_transforms_compilers_and_autocast():
    _, x, weight, bias, partition, _ = inputs("linear", torch.float32)

    def loss(weight, x):
        return pk.linear(x, weight, partition, 2, update=2, bias=bias, narrow=True).square().sum()

    expected = torch.stack([torch.func.grad(loss)(weight, one) for one in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x), expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf = weight.clone().requires_grad_()
    compiled(leaf, x).backward()
    torch.testing.assert_close(leaf.grad, torch.func.grad(loss)(weight, x))
    with torch.autocast("cpu", torch.bfloat16):
        y = pk.linear(x, leaf, partition, 2, update=2)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert leaf.grad.dtype == torch.float32


@pytest.mark.full
@given(rows=SEGMENTS, cols=SEGMENTS, kernel=st.sampled_from([(), (2,)]))
@settings(max_examples=80)
def test_an_entry_belongs_to_the_later_partition_of_its_row_and_column(rows, cols, kernel):
    count = max(len(ends) for ends in (*rows, *cols))
    rows, cols = ([[*ends, *[ends[-1]] * (count - len(ends))] for ends in segments] for segments in (rows, cols))
    partition = nested((*(sum(ends[-1] for ends in segments) for segments in (rows, cols)), *kernel), rows, cols)
    owners = [
        [1 + sum(end <= i for end in ends) for ends in segments for i in range(ends[-1])] for segments in (rows, cols)
    ]
    expected = torch.maximum(*(torch.tensor(own).unsqueeze(d) for own, d in zip(owners, (1, 0), strict=True)))
    ids = partition.ids()
    assert torch.equal(ids, expected.view(*expected.shape, *[1] * len(kernel)).expand(ids.shape).byte())
    assert partition.sizes() == [int((ids == k).sum()) for k in range(1, count + 1)]
    assert pk.Channels.of_owners(owners[0], count).owners().tolist() == owners[0]
    weight = torch.arange(1.0, 1 + ids.numel()).view(ids.shape)
    for k in range(1, count + 1):
        live, found, tensor = torch.zeros_like(ids), torch.zeros_like(ids), torch.zeros_like(weight)
        for block in partition.active_blocks(k):
            live[block] += 1
        for strip in partition.strips(k):
            found[strip] += 1
        assert torch.equal(live, (ids <= k).byte()) and torch.equal(found, (ids == k).byte())
        entries = pk.gather_entries(weight, partition, k)
        assert torch.equal(entries, weight[ids == k])
        pk.scatter_entries(tensor, partition, k, entries)
        assert torch.equal(tensor, weight * (ids == k))
        spread = partition.row_channels.spread(partition.row_channels.take(weight, 0, k), 0, k)
        assert torch.equal(spread, weight * (torch.tensor(owners[0]) <= k).view(-1, *[1] * (weight.dim() - 1)))
    if len(ids) > 1:
        assert torch.equal(partition.rows(1, len(ids)).ids(), ids[1:])
    if ids.shape[1] > 1:
        assert torch.equal(partition.columns(1, ids.shape[1]).ids(), ids[:, 1:])


def test_copies_and_files():
    partition = nested((7, 9), (3, 5, 7), (2, 6, 9)).rows(2, 7)
    file = io.BytesIO()
    torch.save(partition, file)
    file.seek(0)
    copies = copy.deepcopy(partition), pickle.loads(pickle.dumps(partition)), torch.load(file, weights_only=True)
    for each in (*copies, partition.to("meta", torch.bfloat16)):
        assert repr(each) == repr(partition) and torch.equal(each.ids(), partition.ids())
    assert repr(partition) == "NestedPartition(shape=(5, 9), rows=(1, 3, 5), cols=(2, 6, 9), row=2, col=0)"


def test_explain_names_the_nested_implementation():
    partition = nested((7, 9), (3, 5, 7), (2, 6, 9))
    assert pk.explain(pk.linear, torch.ones(4, 9), torch.ones(7, 9), partition, 2).startswith("linear: nested")
