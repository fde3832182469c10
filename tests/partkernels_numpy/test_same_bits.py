"""Maps, defaults and results have the same bits as in the C++ backend of partkernels."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from pairwise import pairwise

import partkernels as pk
import partkernels_numpy as pkn

DTYPES = {np.float32: torch.float32, np.float64: torch.float64, ml_dtypes.bfloat16: torch.bfloat16}
PROPORTIONS = {1: (1.0,), 2: (0.7, 0.3), 3: (0.8, 0.1, 0.1), 5: (0.2,) * 5, 17: (1 / 17,) * 17}
EACH_DTYPE = {dtype.__name__: dtype for dtype in DTYPES}
LIES = ("contiguous", "transposed", "reversed", "sparse", "unaligned")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill unwritten memory with NaN, and use the C++ backend on the PyTorch side of each comparison."""
    empty = np.empty

    def full_of_nan(shape, dtype=float, **options):
        array = empty(shape, dtype, **options)
        array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", full_of_nan)
    with pk.use_backend("cpu"):
        yield


@pytest.fixture
def own_convolutions():
    """Convolve with this library's kernels, never with oneDNN, on the PyTorch side."""
    before = torch.ops.partkernels_cpu.limit_workspace(0)
    yield
    torch.ops.partkernels_cpu.limit_workspace(before)


def tensor(array: np.ndarray | None) -> torch.Tensor | None:
    """Return the same entries as a contiguous tensor."""
    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array, np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(array))


def bits(value) -> np.ndarray:
    """Return the bits as integers, so that NaN and -0 can be compared."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous()
        words = value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        return words.numpy()
    return np.ascontiguousarray(value).view(f"i{value.itemsize}")


def same(found: np.ndarray, expected: torch.Tensor) -> None:
    assert DTYPES[found.dtype.type] == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected))


def numbers(seed: int, shape, dtype) -> np.ndarray:
    return np.array(np.random.default_rng(seed).standard_normal(shape), dtype)


def both(shape, count: int, kind: str, dtype) -> tuple[pkn.Partition, pk.Partition]:
    """Return the same partition in both packages."""
    ours, theirs = {
        "zeros": lambda: (pkn.Zeros(), pk.Zeros()),
        "uniform": lambda: (pkn.Uniform(0.3, 5, 2), pk.Uniform(0.3, 5, 2)),
        "normal": lambda: (pkn.Normal(0.7, 6), pk.Normal(0.7, 6)),
        "stored": lambda: (pkn.Stored(stored := numbers(9, shape, dtype)), pk.Stored(tensor(stored))),
    }[kind]()
    proportions = PROPORTIONS[count]
    one = pkn.Partition.random(shape, proportions, seed=3, defaults=ours)
    other = pk.Partition.random(shape, proportions, seed=3, defaults=theirs)
    return one, other


def strided(array: np.ndarray, how: str) -> np.ndarray:
    """Return the same entries in another memory layout."""
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if how == "sparse":
        wide = np.full((*array.shape[:-1], 3 * array.shape[-1]), np.nan, array.dtype)
        wide[..., ::3] = array
        return wide[..., ::3]
    if how == "unaligned":
        packed = np.zeros(array.shape, [("byte", "u1"), ("entry", array.dtype)])
        packed["entry"] = array
        return packed["entry"]
    return array


@pairwise(shape=[(1,), (7,), (3, 5), (33, 130), (4, 3, 5), (6, 5, 3, 2)], count=[*PROPORTIONS], strength=1)
def test_maps(shape, count):
    ours, theirs = both(shape, count, "zeros", np.float32)
    np.testing.assert_array_equal(ours.map, theirs.map.numpy())
    np.testing.assert_array_equal(ours.ids(), theirs.ids().numpy())
    assert (ours.num_partitions, ours.bits, ours.sizes()) == (theirs.num_partitions, theirs.bits, theirs.sizes())
    np.testing.assert_array_equal(ours.mask(count), theirs.mask(count).numpy())
    again = pkn.Partition.from_ids(ours.ids(), num_partitions=count)
    np.testing.assert_array_equal(again.map, ours.map)
    from_torch = pkn.Partition(tuple(theirs.shape), theirs.num_partitions, theirs.map.numpy())
    np.testing.assert_array_equal(from_torch.ids(), ours.ids())


def test_a_map_of_256_partitions():
    ours = pkn.Partition.random((40, 50), (1 / 256,) * 256, seed=1)
    theirs = pk.Partition.random((40, 50), (1 / 256,) * 256, seed=1)
    np.testing.assert_array_equal(ours.map, theirs.map.numpy())
    np.testing.assert_array_equal(ours.ids(), theirs.ids().numpy())


@pairwise(dtype=EACH_DTYPE, shape=[(5,), (3, 200), (2, 5, 3, 3)])
def test_defaults(dtype, shape):
    for ours, theirs in (
        (pkn.Uniform(0.3, 5, 2), pk.Uniform(0.3, 5, 2)),
        (pkn.Normal(1e-3, 7), pk.Normal(1e-3, 7)),
        (pkn.Zeros(), pk.Zeros()),
    ):
        same(ours.values(shape, dtype), theirs.values(shape, DTYPES[dtype]))


KINDS = ("zeros", "uniform", "normal", "stored")
SIZES = [((), (1, 1)), ((3,), (5, 7)), ((2, 9), (70, 130)), ((0,), (4, 3)), ((100,), (33, 65))]


@pairwise(dtype=EACH_DTYPE, size=SIZES, kind=KINDS, count=[*PROPORTIONS], how=LIES)
def test_linear(dtype, size, kind, count, how):
    rows, features = size
    shape = features[::-1]
    ours, theirs = both(shape, count, kind, dtype)
    active = update = (count + 1) // 2
    weight, x = numbers(1, shape, dtype), numbers(2, (*rows, features[0]), dtype)
    grad_y, bias = numbers(3, (*rows, shape[0]), dtype), numbers(4, (count, shape[0]), dtype)
    own = [strided(array, how) for array in (x, weight, bias, grad_y)]
    leaves = [tensor(array).requires_grad_() for array in (x, weight, bias)]
    y = pk.linear(leaves[0], leaves[1], theirs, active, update=update, bias=leaves[2])
    grads = torch.autograd.grad(y, leaves, tensor(grad_y))
    same(pkn.linear(own[0], own[1], ours, active, bias=own[2]), y)
    same(
        pkn.linear(own[0], own[1], ours, active, bias=own[2][0]),
        pk.linear(leaves[0], leaves[1], theirs, active, bias=leaves[2][0]),
    )
    same(pkn.linear_grad_input(own[3], own[1], ours, active), grads[0])
    same(pkn.linear_grad_weight(own[3], own[0], ours, update), grads[1])


GEOMETRIES = [
    {},
    {"stride": 2, "padding": (1, 2)},
    {"padding": "same", "dilation": (1, 2)},
    {"groups": 2, "padding": 1, "stride": (1, 2)},
]


@pairwise(
    dtype=EACH_DTYPE, options=GEOMETRIES, kernel=[(1, 1), (3, 3), (2, 3)], kind=KINDS, count=[*PROPORTIONS], how=LIES
)
def test_conv2d(dtype, options, kernel, kind, count, how, own_convolutions):
    shape, groups = (6, 4, *kernel), options.get("groups", 1)
    ours, theirs = both(shape, count, kind, dtype)
    weight, x, bias = numbers(1, shape, dtype), numbers(2, (3, 4 * groups, 9, 8), dtype), numbers(4, 6, dtype)
    leaves = [tensor(array).requires_grad_() for array in (x, weight, bias)]
    y = pk.conv2d(leaves[0], leaves[1], theirs, count, update=1, bias=leaves[2], **options)
    grad_y = numbers(3, y.shape, dtype)
    grads = torch.autograd.grad(y, leaves, tensor(grad_y))
    x, weight, grad_y = (strided(array, how) for array in (x, weight, grad_y))
    same(pkn.conv2d(x, weight, ours, count, bias=bias, **options), y)
    same(pkn.conv2d_grad_input(grad_y, weight, ours, count, x.shape, **options), grads[0])
    # Computed by PyTorch and masked, unless it might fail: the same terms in a different order of summation.
    found = pkn.conv2d_grad_weight(grad_y, x, ours, 1, **options)
    assert not found[~ours.mask(1)].any()
    eps = {2: 2**-8, 4: 2**-23, 8: 2**-52}[found.itemsize]
    terms = 3 * 9 * 8  # at most, each about 1
    np.testing.assert_allclose(found.astype(float), grads[1].double().numpy(), rtol=0, atol=eps * terms)


@pytest.mark.parametrize("dtype", EACH_DTYPE.values(), ids=EACH_DTYPE)
def test_conv2d_where_the_operator_is_ours_in_all_passes(dtype):
    # Some outputs read only padding, so PyTorch's convolutions are avoided, except in float64.
    ours, theirs = both((6, 4, 3, 3), 3, "uniform", dtype)
    x, weight, options = numbers(2, (3, 4, 5, 8), dtype), numbers(1, (6, 4, 3, 3), dtype), {"padding": 4}
    leaves = [tensor(array).requires_grad_() for array in (x, weight)]
    y = pk.conv2d(*leaves, theirs, 2, update=2, **options)
    grad_y = numbers(3, y.shape, dtype)
    grads = torch.autograd.grad(y, leaves, tensor(grad_y))
    if dtype is not np.float64:
        same(pkn.conv2d(x, weight, ours, 2, **options), y)
        same(pkn.conv2d_grad_input(grad_y, weight, ours, 2, x.shape, **options), grads[0])
        same(pkn.conv2d_grad_weight(grad_y, x, ours, 2, **options), grads[1])


@pairwise(
    dtype=EACH_DTYPE, shape=[(5,), (33, 130), (4, 3, 5), (6, 5, 3, 2)], kind=KINDS, count=[*PROPORTIONS], how=LIES
)
def test_subnetwork_weight(dtype, shape, kind, count, how):
    ours, theirs = both(shape, count, kind, dtype)
    weight, active = numbers(1, shape, dtype), (count + 1) // 2
    leaf = tensor(weight).requires_grad_()
    dense = pk.subnetwork_weight(leaf, theirs, active, update=active)
    grad = numbers(2, shape, dtype)
    (expected,) = torch.autograd.grad(dense, leaf, tensor(grad))
    same(pkn.subnetwork_weight(strided(weight, how), ours, active), dense)
    same(pkn.subnetwork_weight_grad(strided(grad, how), ours, active), expected)


def can_step(dtype, shape, how, count):
    return (count is None or 0 < len(shape) <= 4) and (how == "contiguous" or 0 < len(shape) <= 4)


STEPPED = [(), (5,), (33, 130), (2, 3, 4, 3), (2, 2, 2, 2, 3)]


@pairwise(can_step, dtype=EACH_DTYPE, shape=STEPPED, how=("contiguous", "transposed", "reversed"), count=[None, 2, 5])
def test_steps(dtype, shape, how, count):
    ours, theirs = (None, None) if count is None else both(shape, count, "zeros", dtype)
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    adam = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    arrays = [strided(numbers(seed, shape, dtype), how).copy(order="K") for seed in range(4)]
    arrays[3] = np.array(np.abs(arrays[3]))
    tensors = [tensor(array).clone() for array in arrays]
    pkn.sgd_step(arrays[0], arrays[1], arrays[2], ours, 2, **sgd)
    pk.sgd_step(tensors[0], tensors[1], tensors[2], theirs, 2, **sgd)
    pkn.sgd_step(arrays[0], arrays[1], None, ours, 1, lr=0.5)
    pk.sgd_step(tensors[0], tensors[1], None, theirs, 1, lr=0.5)
    for step, decoupled in ((1, True), (2, False)):
        pkn.adam_step(arrays[0], arrays[1], arrays[2], arrays[3], ours, 1, step=step, decoupled=decoupled, **adam)
        pk.adam_step(tensors[0], tensors[1], tensors[2], tensors[3], theirs, 1, step=step, decoupled=decoupled, **adam)
    for found, expected in zip(arrays, tensors, strict=True):
        same(found, expected)


def test_a_partition_is_pickled():
    partition = pkn.Partition.random((5, 9), (0.5, 0.5), seed=0, defaults=pkn.Uniform(0.5, 1))
    weight = numbers(0, (5, 9), np.float32)
    before = pkn.subnetwork_weight(weight, partition, 1)
    again = pickle.loads(pickle.dumps(partition))
    np.testing.assert_array_equal(pkn.subnetwork_weight(weight, again, 1), before)
