"""conv1d and the transposed convolutions, which reuse conv2d's kernels, against dense PyTorch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from against_dense import BY_ONE_PLAN, DTYPES, assert_within_twice_dense_error
from pairwise import pairwise

import partkernels as pk

# The shapes of weight and x, and the geometry. Transposed convolutions have weights [in, out / groups, ...].
CASES = {
    "conv1d": [
        ((6, 4, 3), (2, 4, 9), {}),
        ((6, 2, 3), (2, 4, 9), {"groups": 2, "stride": 2, "padding": 1}),
        ((6, 4, 4), (4, 9), {"padding": "same", "dilation": 2}),
        ((6, 4, 1), (0, 4, 9), {"padding": "valid"}),
    ],
    "conv_transpose1d": [
        ((4, 6, 3), (2, 4, 9), {}),
        ((4, 3, 3), (2, 4, 9), {"groups": 2, "stride": 3, "padding": 1, "output_padding": 2}),
        ((4, 6, 2), (4, 9), {"dilation": 2}),
        ((4, 6, 2), (2, 4, 9), {"stride": 2, "dilation": 4, "output_padding": 3}),
    ],
    "conv_transpose2d": [
        ((4, 6, 3, 3), (2, 4, 7, 5), {}),
        ((4, 3, 3, 2), (2, 4, 7, 5), {"groups": 2, "stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)}),
        ((4, 6, 2, 3), (4, 7, 5), {"dilation": (1, 2)}),
        ((4, 6, 3, 3), (0, 4, 7, 5), {}),
        ((4, 3, 2, 3), (2, 4, 7, 5), {"groups": 2, "dilation": (3, 1), "output_padding": (2, 0), "padding": (1, 0)}),
    ],
}
PROPORTIONS = (0.5, 0.3, 0.2)
EACH = {f"{name}-{i}": (name, *case) for name, cases in CASES.items() for i, case in enumerate(cases)}
each = pytest.mark.parametrize(("name", "shape", "x_shape", "geometry"), EACH.values(), ids=EACH)


@pairwise(case=EACH, dtype=DTYPES, target=BY_ONE_PLAN)
def test_they_compute_what_dense_pytorch_computes(case, dtype, target):
    name, shape, x_shape, geometry = case
    partition = pk.Partition.random(shape, PROPORTIONS, seed=0, defaults=pk.Normal(0.3, seed=1)).to(target.device)
    x, weight = (target.randn(s).to(dtype).requires_grad_() for s in (x_shape, shape))
    made = shape[1] * geometry.get("groups", 1) if "transpose" in name else shape[0]
    rows = target.randn((3, made)).to(dtype).requires_grad_()
    subnetwork = pk.subnetwork_weight(weight.detach(), partition, 2)
    with target.use():
        y = getattr(pk, name)(x, weight, partition, 2, update=1, bias=rows, **geometry)
        grad = torch.randn_like(y)
        ours = torch.autograd.grad(y, (x, weight, rows), grad)

    def dense(which):
        def compute(dtype):
            leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, subnetwork, rows[:2].sum(0))]
            y = getattr(F, name)(*leaves, **geometry)
            return (y, *torch.autograd.grad(y, leaves, grad.to(dtype)))[which].detach()

        return compute

    assert_within_twice_dense_error(y.detach(), dense(0))
    assert_within_twice_dense_error(ours[0], dense(1))
    mask = partition.mask(1)
    assert (ours[1][~mask] == 0).all()
    exact = dense(2)(torch.float64)
    assert_within_twice_dense_error(torch.where(mask, ours[1], exact.to(dtype)), dense(2))
    assert not ours[2][1:].any()


@pytest.mark.parametrize("target", BY_ONE_PLAN, ids=str)
@each
def test_they_take_stored_defaults(name, shape, x_shape, geometry, target):
    stored = pk.Stored(torch.randn(shape))
    partition = pk.Partition.random(shape, PROPORTIONS, seed=0, defaults=stored).to(target.device)
    x, weight = target.randn(x_shape), target.randn(shape)
    subnetwork = torch.where(partition.ids() <= 1, weight, partition.defaults.stored)
    with target.use():
        y = getattr(pk, name)(x, weight, partition, 1, **geometry)
    assert_within_twice_dense_error(y, lambda dtype: getattr(F, name)(x.to(dtype), subnetwork.to(dtype), **geometry))


@each
def test_gradients_of_gradients(name, shape, x_shape, geometry):
    partition = pk.Partition.random(shape, PROPORTIONS, seed=0)
    x, weight = torch.randn(x_shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)

    def bent(x):
        return getattr(pk, name)(x, weight, partition, 2, **geometry).sin()

    assert torch.autograd.gradgradcheck(bent, (x,), fast_mode=True)


@pytest.mark.parametrize("update", [1, 2, None])
def test_a_rebuilt_weight_gives_its_gradient_to_one_partition(update):
    partition = pk.Partition.random((6, 5), PROPORTIONS, seed=0, defaults=pk.Uniform(0.3, seed=1))
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    rebuilt = pk.subnetwork_weight(weight, partition, 2, update=update)
    assert torch.equal(rebuilt, pk.subnetwork_weight(weight.detach(), partition, 2))
    if update is None:
        assert not rebuilt.requires_grad
        return
    grad = torch.randn_like(rebuilt)
    (ours,) = torch.autograd.grad(rebuilt, weight, grad)
    assert torch.equal(ours, torch.where(partition.ids() == update, grad, 0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w, p: pk.conv1d(x[0, 0], w, p, 1), pk.InputError, r"takes \[batch, 4, length\] or \[4, length\]"),
        (lambda x, w, p: pk.conv1d(x[..., :2], w, p, 1), pk.InputError, "smaller than the kernel"),
        (lambda x, w, p: pk.conv1d(x, w, p, 1, stride=(1, 1)), ValueError, r"stride=\(1, 1\); pass an int or one at"),
        (lambda x, w, p: pk.conv2d(x, w, p, 1), ValueError, r"conv2d takes \[out, in / groups, height, width\]"),
        (lambda x, w, p: pk.conv_transpose2d(x, w, p, 1), ValueError, r"conv_transpose2d takes \[in, out / groups,"),
        (lambda x, w, p: pk.conv_transpose1d(x, w, p, 1, groups=4), ValueError, "weight's 6 input channels"),
        (lambda x, w, p: pk.conv_transpose1d(x, w, p, 1), pk.InputError, r"takes \[batch, 6, length\]"),
    ],
)
def test_bad_input_raises_and_names_the_cure(call, error, message):
    x, weight = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
    with pytest.raises(error, match=message):
        call(x, weight, pk.Partition.random((6, 4, 3), PROPORTIONS, seed=0))


def test_an_output_padding_that_no_stride_leaves_raises():
    partition = pk.Partition.random((4, 6, 3), PROPORTIONS, seed=0)
    with pytest.raises(ValueError, match=r"output_padding=\(2,\) with stride=\(2,\).*smaller"):
        pk.conv_transpose1d(torch.randn(2, 4, 9), torch.randn(4, 6, 3), partition, 1, stride=2, output_padding=2)


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["conv_transpose1d", "conv_transpose2d"])
def test_transposed_ones_of_every_geometry(name):
    spatial = (5,) if name == "conv_transpose1d" else (5, 6)
    tried = 0
    for stride, dilation, added, padding, kernel, groups in itertools.product(
        (1, 2, 3), (1, 2, 3, 4), range(4), range(3), (1, 2, 3), (1, 2)
    ):
        geometry = {"stride": stride, "dilation": dilation, "output_padding": added, "padding": padding}
        leaves = [
            torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for shape in ((2, 4, *spatial), (4, 3, *[kernel] * len(spatial)))
        ]
        try:
            expected = getattr(F, name)(*leaves, **geometry, groups=groups)
        except RuntimeError:  # PyTorch does not support this geometry
            continue
        y = getattr(pk, name)(
            *leaves, pk.Partition.random(leaves[1].shape, (1.0,), seed=0), 1, update=1, **geometry, groups=groups
        )
        torch.testing.assert_close(y, expected)
        grad = torch.randn_like(y)
        ours, theirs = torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad)
        torch.testing.assert_close(ours, theirs)
        tried += 1
    assert tried > 500


@pytest.mark.skipif(pk.backends()["cpu"] != "ready", reason="only the cpu backend calls torch's convolutions from C++")
def test_what_torch_says_of_a_convolution_is_told():
    partition = pk.Partition.random((6, 4, 3, 3), PROPORTIONS, seed=0)
    with pk.use_backend("cpu"), pytest.raises(RuntimeError, match=r"calculation overflowed|why to stderr"):
        pk.conv2d(torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), partition, 1, padding=2**30)
