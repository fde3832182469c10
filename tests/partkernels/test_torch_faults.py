"""Convolutions in which PyTorch is wrong or crashes, and which our kernels compute: see docs/torch-faults.md."""

import pytest
import torch
from against_dense import BACKENDS

import partkernels as pk

# x, weight, stride, padding, dilation, groups. In each case PyTorch 2.13 crashed or was wrong, in the forward pass or
# in the gradient of the weight.
BFLOAT16 = [
    ((1, 32, 17, 29), (13, 32, 1, 7), (7, 1), (0, 8), 2, 1),
    ((2, 33, 9, 30), (32, 33, 4, 5), (1, 7), 0, 1, 1),
    ((2, 16, 7, 20), (1, 16, 3, 7), (4, 7), (0, 3), (1, 2), 1),
    ((2, 64, 20, 1), (26, 32, 2, 1), (7, 6), (7, 5), (1, 2), 2),
    ((2, 64, 9, 4), (2, 32, 1, 1), 6, 7, 2, 2),
    ((2, 67, 24, 1), (1, 67, 1, 1), 3, 8, 3, 1),
    ((2, 32, 11, 5), (2, 32, 2, 1), 7, 8, (1, 2), 1),
    ((2, 2, 8, 6), (4, 1, 4, 4), 7, 2, 1, 2),
    ((2, 67, 24, 5), (16, 67, 7, 7), 6, 2, 1, 1),
    ((2, 64, 14, 2), (26, 32, 3, 7), (2, 4), (1, 4), 1, 2),
    ((2, 67, 6, 1), (2, 67, 2, 2), 7, 1, 1, 1),
    ((2, 17, 30, 29), (2, 17, 5, 5), 1, (3, 6), 3, 1),
    ((2, 66, 15, 12), (64, 33, 5, 5), 7, 3, 1, 2),
    ((3, 54, 2, 11), (27, 6, 1, 2), (1, 7), (0, 3), (1, 3), 9),
    ((3, 16, 9, 3), (4, 16, 2, 7), (1, 7), (0, 2), 1, 1),
    ((65, 65, 2, 5), (33, 65, 1, 4), (1, 7), (0, 2), (2, 1), 1),
    ((2, 67, 24, 29), (32, 67, 3, 3), 1, 3, 3, 1),
    ((2, 128, 24, 26), (32, 64, 7, 7), 7, 3, 3, 2),
    ((2, 64, 4, 30), (13, 64, 1, 1), 2, 0, 3, 1),
]
FLOAT32 = [((2, 67, 3, 2), (1, 67, 1, 1), (2, 3), (8, 1), 1, 1), ((2, 5, 4, 3), (6, 5, 2, 3), 2, (2, 3), 1, 1)]
CASES = [(torch.bfloat16, *case) for case in BFLOAT16] + [(torch.float32, *case) for case in FLOAT32]


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the other backends use PyTorch's convolutions or a GPU")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dtype", "of_x", "of_weight", "stride", "padding", "dilation", "groups"), CASES)
def test_convolutions_agree_with_float64(dtype, of_x, of_weight, stride, padding, dilation, groups, channels_last):
    partition = pk.Partition.random(of_weight, (0.6, 0.4), seed=0, defaults=pk.Uniform(0.1, seed=1))
    x, weight = torch.randn(of_x).to(dtype), torch.randn(of_weight).to(dtype)
    if channels_last:
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    with pk.use_backend("cpu"):
        y = pk.conv2d(x, weight, partition, 1, update=1, **geometry)
        grad = torch.randn(y.shape).to(dtype)
        found = y.detach(), *torch.autograd.grad(y, (x, weight), grad)
    live = pk.subnetwork_weight(weight.detach(), partition, 1).double()
    sizes = pair(stride), pair(padding), pair(dilation), False, (0, 0), groups
    exact = torch.ops.aten.convolution(x.detach().double(), live, None, *sizes)
    exact = (
        exact,
        *torch.ops.aten.convolution_backward(
            grad.double(), x.detach().double(), live, None, *sizes, (True, True, False)
        )[:2],
    )
    exact[2][~partition.mask(1)] = 0
    for ours, true in zip(found, exact, strict=True):
        # Sums are computed in float32 and rounded once, so they may fall on the other side of a tie.
        error, rounding = (each.double().sub(true).abs().max() for each in (ours, true.to(dtype)))
        assert error <= 2 * rounding + 1e-5 * true.abs().max()
