"""Wrong calls of public functions raise before anything changes; the message names the value and the cure."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from against_dense import INTERPRETED
from torch import Tensor

import partkernels as pk
from partkernels.arguments import bits_for, matrix_shape, row_bytes
from partkernels.operators.entries import combine_rows, exchange_entries

F64, INT = torch.float64, torch.int32
P = pk.Partition.random((4, 6), (0.5, 0.5), seed=0)
CONV = pk.Partition.random((4, 3, 3, 3), (0.5, 0.5), seed=0)
CONV1D = pk.Partition.random((6, 4, 3), (0.5, 0.5), seed=0)
NESTED = pk.Partition.nested((7, 9), (3, 5, 7), (2, 6, 9))
STORED = pk.Partition.random((4, 6), (0.5, 0.5), seed=0, defaults=pk.Stored(torch.zeros(4, 6)))
X, W, B = torch.randn(2, 6), torch.randn(4, 6), torch.zeros(4, 6)
XC, WC = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
X1, W1 = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
IDS = torch.tensor([1])
OVERLAPPING = torch.zeros(9).as_strided((4, 6), (1, 1))


def linear(x=X, weight=W, partition=P, active=1, **options):
    return pk.linear(x, weight, partition, active, **options)


def conv2d(x=XC, weight=WC, partition=CONV, **options):
    return pk.conv2d(x, weight, partition, 1, **options)


def conv1d(x=X1, **options):
    return pk.conv1d(x, W1, CONV1D, 1, **options)


def conv_transpose1d(x=X1, **options):
    return pk.conv_transpose1d(x, W1, CONV1D, 1, **options)


def embedding(ids=IDS, weight=W, partition=P, active=1, **options):
    return pk.embedding(ids, weight, partition, active, **options)


def sgd(parameter=W, grad=B, buffer=None, partition=P, update=1, lr=0.1, **options):
    pk.sgd_step(parameter, grad, buffer, partition, update, lr=lr, **options)


def adam(exp_avg=B, exp_avg_sq=None, update=1, **options):
    exp_avg_sq = B.clone() if exp_avg_sq is None else exp_avg_sq
    pk.adam_step(W, W.clone(), exp_avg, exp_avg_sq, P, update, **{"step": 1, "lr": 0.1} | options)


def scatter(values, tensor=B, partition=P, number=2):
    pk.scatter_entries(tensor, partition, number, values)


def exchange(places, dtype=torch.float32):
    values = torch.ones(2, dtype=dtype)
    try:
        exchange_entries([B[0]], [torch.tensor(places)], [values], [None])
    finally:
        assert values.eq(1).all()


def random(shape=(4, 6), proportions=(0.5, 0.5), seed=0, **options):
    return pk.Partition.random(shape, proportions, seed=seed, **options)


def from_ids(ids, **options):
    return pk.Partition.from_ids(torch.as_tensor(ids, dtype=torch.uint8), **options)


def partition(count, map=None, **options):
    return pk.Partition((4, 6), count, map_of((4, 6), count) if map is None else map, **options)


def map_of(shape, count) -> Tensor:
    rows, cols = matrix_shape(shape)
    return torch.zeros(rows, row_bytes(cols, bits_for(count)), dtype=torch.uint8)


def shared(array: bool = False):
    """Call a layer with a trainable weight that shares memory with its defaults."""
    memory = np.zeros((4, 6), np.float32)
    weight = torch.from_numpy(memory) if array else torch.zeros(4, 6)
    stored = pk.Stored(torch.from_numpy(memory) if array else weight)
    linear(weight=weight.requires_grad_(), partition=random(defaults=stored))


def without_a_tensor():
    map, _, *rest = STORED.flat()
    torch.ops.partkernels.subnetwork_weight(W, 1, map, None, *rest, "cpu")


def emptied(*shape, by: int | None = None) -> Tensor:
    """Return a tensor without its memory, or without that of its last entries."""
    tensor = torch.ones(shape)
    # PyTorch aligns memory to 64 bytes, so a missing entry cannot belong to another tensor.
    tensor.untyped_storage().resize_(0 if by is None else tensor.nbytes - by * tensor.itemsize)
    return tensor


def without_a_map(use):
    one = random()
    one.map.resize_(0)
    with pk.use_backend("cpu"):
        use(one)


PRODUCTS = [
    (lambda: linear(active=0), ValueError, r"active=0, but this partition has 2 parts; pass an int in 1\.\.2"),
    (lambda: linear(update=2), ValueError, r"update=2 with active=1; pass an int in 1\.\.1, or None"),
    (lambda: linear(weight=W.t()), ValueError, r"shape \(6, 4\) and its partition \(4, 6\)"),
    (lambda: linear(partition=P.to("meta")), ValueError, r"partition\.to\('cpu'\)"),
    (lambda: linear(X.double()), pk.InputError, "x is torch.float64 and the weight torch.float32"),
    (lambda: linear(weight=W.int()), TypeError, "the weight is torch.int32"),
    (lambda: linear(X.double(), W.double(), STORED), TypeError, r"partition\.to\(dtype=torch\.float64\)"),
    (lambda: linear(X.to("meta")), pk.InputError, "x is on meta and the weight on cpu"),
    (lambda: linear(X[:, :5]), pk.InputError, r"x has shape \(2, 5\); this weight takes \[\.\.\., 6\]"),
    (lambda: linear(torch.tensor(1.0)), pk.InputError, "x has shape"),
    (lambda: linear(X.numpy()), TypeError, r"x is a numpy ndarray; pass torch.from_numpy\(x\)"),
    (lambda: linear((1.0,)), TypeError, "x is a tuple; pass a tensor"),
    (lambda: linear(bias=np.zeros(4)), TypeError, r"bias is a numpy ndarray; pass torch.from_numpy\(bias\)"),
    (
        lambda: linear(bias=torch.zeros(5)),
        pk.InputError,
        r"bias has shape \(5,\); this weight takes \[4\]",
    ),
    (lambda: linear(bias=torch.zeros(3, 4)), pk.InputError, r"\[2, 4\] with a row for each partition"),
    (lambda: pk.linear(XC, WC, CONV, 1), ValueError, r"linear takes \[out_features, in_features\]"),
    (lambda: conv2d(X, W, P), ValueError, r"conv2d takes \[out, in / groups, height, width\]"),
    (lambda: conv2d(XC[:, :2]), pk.InputError, r"takes \[batch, 3, height, width\]"),
    (lambda: conv2d(groups=3), ValueError, "groups=3 does not divide"),
    (lambda: conv2d(stride=0), ValueError, "stride=0; pass an int or a pair of ints, each at"),
    (lambda: conv2d(padding=-1), ValueError, "padding=-1"),
    (lambda: conv2d(padding="full"), ValueError, "'valid' or 'same'"),
    (lambda: conv2d(padding="same", stride=2), ValueError, "'same' needs stride 1"),
    (lambda: conv2d(XC[..., :2]), pk.InputError, "smaller than the kernel"),
    (lambda: conv1d(X1[0, 0]), pk.InputError, r"takes \[batch, 4, length\] or \[4, length\]"),
    (lambda: conv1d(stride=(1, 1)), ValueError, r"stride=\(1, 1\); pass an int or one at"),
    (lambda: pk.conv_transpose2d(X1, W1, CONV1D, 1), ValueError, r"conv_transpose2d takes \[in, out / groups,"),
    (lambda: conv_transpose1d(groups=4), ValueError, "weight's 6 input channels"),
    (lambda: conv_transpose1d(), pk.InputError, r"takes \[batch, 6, length\]"),
    (
        lambda: conv_transpose1d(torch.randn(2, 6, 9), stride=2, output_padding=2),
        ValueError,
        r"output_padding=\(2,\) with stride=\(2,\).*smaller",
    ),
    (lambda: shared(), ValueError, r"share memory, so training would change both; pass Stored\(weight.clone\(\)\)"),
    (lambda: shared(array=True), ValueError, "share memory, so training would change both"),
    (without_a_tensor, RuntimeError, "stored defaults need a tensor"),
    (lambda: without_a_map(lambda one: linear(partition=one)), RuntimeError, "map does not fit a weight"),
    (lambda: without_a_map(lambda one: pk.subnetwork_weight(W, one, 1)), RuntimeError, "map does not fit a weight"),
    (lambda: linear(weight=emptied(4, 6)), RuntimeError, "has a storage of"),
    (lambda: linear(weight=emptied(4, 6, by=1)), RuntimeError, "has a storage of"),
    (lambda: linear(emptied(2, 6)), RuntimeError, "has a storage of"),
    (lambda: conv2d(weight=emptied(4, 3, 3, 3)), RuntimeError, "has a storage of"),
    (lambda: linear(partition=random(defaults=pk.Stored(emptied(4, 6)))), RuntimeError, "has a storage of"),
]
NARROW = [
    (lambda: linear(torch.ones(4, 5), torch.ones(7, 9), NESTED, 2), pk.InputError, "9] or"),
    (lambda: linear(torch.ones(4, 9), torch.ones(7, 9), NESTED.explicit(), narrow=True), ValueError, "not nested"),
    (lambda: conv2d(narrow=True), ValueError, "not nested"),
    (lambda: pk.Partition.nested((7,), (3, 7)).columns(0, 1), ValueError, "no columns"),
    (lambda: NESTED.flat(), TypeError, "no map"),
    *(
        (
            lambda rows=rows, cols=cols: pk.Partition.nested((7, 9), rows, cols),
            (ValueError, TypeError),
            "rows=|cols=|channels",
        )
        for rows, cols in [((3, 6), (2, 9)), ((5, 3, 7), (2, 6, 9)), ((3, 7), (9,)), ((3.0, 7), (9, 9)), ((), ())]
    ),
]
EMBEDDINGS = [
    (lambda: embedding(weight=WC, partition=CONV), ValueError, r"takes \[rows, features\]"),
    (lambda: embedding(weight=emptied(4, 6)), RuntimeError, "has a storage of"),
    (lambda: embedding(IDS.float()), pk.InputError, "ids are torch.float32; pass torch.int32 or"),
    (lambda: embedding(IDS.to("meta")), pk.InputError, "ids are on meta and the weight on cpu"),
    (
        lambda: embedding(padding_idx=4),
        ValueError,
        r"padding_idx=4, but .* 4 rows; pass an int in \[-4, 4\)",
    ),
]
MOMENTUM = {"momentum": 0.9}
STEPS = [
    (lambda: sgd(W.int(), partition=None), TypeError, "pass a floating-point parameter"),
    (lambda: sgd(grad=W.t()), ValueError, r"grad has shape \(6, 4\) and the parameter \(4"),
    (lambda: sgd(grad=W.to_sparse()), ValueError, r"such as grad\.to_dense\(\)"),
    (lambda: sgd(**MOMENTUM), ValueError, r"pass torch\.zeros_like\(parameter\)"),
    (lambda: adam(exp_avg=None), TypeError, "exp_avg is None"),
    (lambda: adam(exp_avg=torch.zeros(6).expand(4, 6)), ValueError, "exp_avg has entries that share"),
    (lambda: sgd(OVERLAPPING), ValueError, "parameter has entries that share m"),
    (lambda: sgd(emptied(4, 6)), RuntimeError, "has a storage of"),
    (lambda: sgd(lr=-0.1), ValueError, "lr=-0.1; pass a finite number that is not negative"),
    (lambda: sgd(momentum=torch.nan), ValueError, "momentum=nan"),
    (lambda: sgd(buffer=B, nesterov=True), ValueError, "pass a positive momentum"),
    (lambda: adam(step=0), ValueError, "step=0; pass the number of this partit"),
    (lambda: adam(betas=(0.9, 1.0)), ValueError, r"pass two numbers in \[0, 1\)"),
    (lambda: adam(eps=-1.0), ValueError, "eps=-1.0"),
    (lambda: adam(*torch.zeros(5, 6).unfold(0, 4, 1).movedim(-1, 1)), ValueError, "exp_avg and exp_avg_sq share"),
    (lambda: adam(*map(torch.from_numpy, overlapping())), ValueError, "exp_avg and exp_avg_sq share memory"),
    (lambda: sgd(grad=W, partition=None), ValueError, "parameter and grad share memory"),
    (lambda: sgd(W.detach(), partition=random(defaults=pk.Stored(W))), ValueError, "training would change both"),
]


def overlapping():
    array = np.zeros((5, 6), np.float32)
    return array[:4], array[1:]


LENGTH = P.sizes()[1]
ENTRIES = [
    *((lambda n=n: pk.gather_entries(B, P, n), ValueError, "number=") for n in (0, 3, True, 1.0)),
    (lambda: pk.gather_entries(torch.zeros(4, 5), P, 1), ValueError, "shape"),
    (lambda: pk.gather_entries(B.int(), P, 1), TypeError, "floating"),
    (lambda: pk.gather_entries(emptied(4, 6), P, 1), RuntimeError, "has a storage of"),
    (lambda: scatter(torch.ones(LENGTH, dtype=F64)), ValueError, "values are"),
    (lambda: scatter(torch.ones(LENGTH, 1)), ValueError, "values are"),
    (lambda: scatter(torch.ones(LENGTH, device="meta")), ValueError, "values are"),
    (lambda: scatter(B.view(-1)[:LENGTH]), ValueError, "share memory"),
    (lambda: scatter(torch.ones(1), partition=NESTED, tensor=torch.zeros(7, 9)), ValueError, "values|entries"),
    (lambda: scatter(torch.ones(LENGTH), torch.zeros(1, 6).expand(4, 6)), ValueError, "entries that share memory"),
    (lambda: scatter(torch.ones(LENGTH), OVERLAPPING), ValueError, "tensor has entries that share memory"),
    (lambda: scatter(torch.ones(LENGTH), emptied(4, 6)), RuntimeError, "has a storage of"),
    (lambda: exchange([0, 1, 2]), RuntimeError, "does not fit"),
    (lambda: exchange([0.0, 1.0]), RuntimeError, "does not fit"),
    (lambda: exchange([[0, 1]]), RuntimeError, "does not fit"),
    (lambda: exchange([0, 1], F64), RuntimeError, "does not fit"),
    (lambda: combine_rows([torch.zeros(3)], [torch.zeros(2, 4)], 1, [False]), RuntimeError, "does not fit"),
    (lambda: combine_rows([torch.zeros(3)], [torch.zeros(2, 3)], 3, [False]), RuntimeError, "does not fit"),
]
DRAWN = random(defaults=pk.Uniform(0.1, 3))
PARTITIONS = [
    (lambda: random(proportions=(0.5, 0.4)), ValueError, "sum to 0.9; pass numbers"),
    (lambda: random(proportions=(1.5, -0.5)), ValueError, "not negative"),
    (lambda: random(proportions=(float("nan"), 1)), ValueError, "pass numbers"),
    (lambda: random(proportions=()), ValueError, "pass 1 to 256"),
    (lambda: random(proportions=[1 / 257] * 257), ValueError, "257 proportions.*1 to 256"),
    (lambda: random(seed=-1), ValueError, r"seed=-1 .* \[0, 2\*\*63\)"),
    (lambda: random(seed=2**63), ValueError, "out of range"),
    (lambda: random(seed=0.5), TypeError, "pass an int"),
    (lambda: random((4, 0)), ValueError, r"\(4, 0\) is empty"),
    (lambda: random(()), ValueError, "is empty"),
    (lambda: random((4.5, 3)), TypeError, r"\(4.5, 3\) is not a sequence of ints"),
    (lambda: random(4), TypeError, "shape 4 is not a sequence of ints"),
    (lambda: random(defaults=0.5), TypeError, "pass Zeros"),
    (lambda: random(defaults=pk.Uniform), TypeError, "pass Zeros"),
    (lambda: random(defaults=pk.Stored(torch.zeros(4, 7))), ValueError, r"\(4, 7\); pass Stored.*\(4, 6\)"),
    (lambda: random(defaults=pk.Stored(B.to("meta"))), ValueError, "on meta and the map is on cpu"),
    (lambda: from_ids([[0, 0]]), ValueError, "numbered from 1"),
    (lambda: from_ids([[0, 0]], num_partitions=2), ValueError, "from 0 to 0"),
    (lambda: from_ids([[4, 4]], num_partitions=3), ValueError, r"from 4 to 4, but there are 3 .* 1\.\.3"),
    (lambda: from_ids([[1]], num_partitions=2.5), ValueError, "num_partitions=2.5; pass an int from 1 to 256"),
    (lambda: pk.Partition.from_ids(torch.ones(2, 2)), ValueError, "pass torch.uint8"),
    (lambda: partition(300, map_of((4, 6), 3)), ValueError, "num_partitions=300; pass an int from 1 to 256"),
    (lambda: partition(True), ValueError, "num_partitions=True; pass an int"),
    (lambda: partition(3, map_of((5, 6), 3)), ValueError, r"shape \(4, 16\).*from_ids"),
    (lambda: partition(3, map_of((4, 6), 3).int()), ValueError, "torch.int32"),
    (lambda: partition(3, map_of((4, 6), 3) | 3), ValueError, "an id above 3"),
    (lambda: partition(4, map_of((4, 6), 4) | 0x40), ValueError, "padding that is not 0"),
    (lambda: partition(3, row=-1), ValueError, r"row=-1, col=0; pass the position"),
    (lambda: partition(3, col=2**31), ValueError, r"in \[0, 2\*\*31\)"),
    (lambda: partition(3, row="1"), ValueError, "row='1'"),
    (lambda: P.rows(2, 2), ValueError, r"rows\(2, 2\) of 4; pass 0 <= start < stop <= 4"),
    (lambda: P.rows(-1, 2), ValueError, r"rows\(-1, 2\)"),
    (lambda: P.columns(0, 7), ValueError, r"columns\(0, 7\) of 6"),
    (lambda: P.columns(2, 6), ValueError, "inside a byte of the map; begin at a multiple of 8"),
    (lambda: random((4, 70), defaults=pk.Uniform(0.1, 3)).columns(8, 16), ValueError, "at a multiple of 64, or keep"),
    (lambda: random((4, 8, 3, 1)).columns(0, 4), ValueError, "a kernel of 1x1; cut it"),
    (lambda: random((4,)).columns(0, 1), ValueError, r"\(4,\) cannot be cut"),
    *((lambda n=n: P.mask(n), ValueError, f"partition={n}, but this partition has 2 parts") for n in (0, 3, None)),
    (lambda: pk.Stored(torch.zeros(2, dtype=INT)), TypeError, "floating-point"),
    (lambda: pk.Stored(torch.ones(2, 2).to_sparse()), TypeError, "torch.sparse_coo; pass a dense one"),
    (lambda: pk.Uniform(True, 0), TypeError, "scale=True is a bool; pass a number"),
    (lambda: pk.Normal("0.1", 0), TypeError, "std='0.1' is a str"),
    (lambda: pk.Uniform(float("nan"), 0), ValueError, "scale=nan"),
    (lambda: pk.Uniform(-1.0, 0), ValueError, r"scale=-1.0 .* or use Zeros\(\)"),
    (lambda: pk.Normal(float("inf"), 0), ValueError, "std=inf"),
    (lambda: pk.Normal(1.0, -2), ValueError, "seed=-2"),
    (lambda: pk.Uniform(1.0, 0, stream=-2), ValueError, "stream=-2"),
]


@pytest.mark.parametrize(("call", "error", "message"), PRODUCTS + NARROW + EMBEDDINGS + STEPS + ENTRIES + PARTITIONS)
def test_a_wrong_call_raises_and_names_the_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert not B.any()  # the moments, gradients and entries of all calls


@pytest.mark.parametrize("backend", ["auto", "reference", *INTERPRETED])
def test_one_entry_too_many_is_refused_by_every_backend(backend):
    with pk.use_backend(backend), pytest.raises((ValueError, RuntimeError), match=r"values|entries"):
        scatter(torch.ones(LENGTH + 1))
    assert not B.any()


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "auto", *INTERPRETED])
def test_ids_out_of_range_raise_on_a_cpu(backend, wrong, active):
    low, high = min(wrong, 3), max(wrong, 3)
    with pk.use_backend(backend), pytest.raises(IndexError, match=rf"from {low} to {high}, but .* ids in 0\.\.3"):
        embedding(torch.tensor([3, wrong]), active=active)


@pytest.mark.skipif(pk.backends()["cpu"] != "ready", reason="only the cpu backend calls torch's convolutions from C++")
def test_the_message_of_a_convolution_of_torchs_is_kept():
    with pk.use_backend("cpu"), pytest.raises(RuntimeError, match=r"calculation overflowed|why to stderr"):
        conv2d(padding=2**30)


def test_a_frozen_weight_may_be_its_own_default():
    linear(partition=dataclasses.replace(P, defaults=pk.Stored(W)))
