"""A bias with one row per partition: the forward adds the active rows, and one row has a gradient."""

import pytest
import torch
import torch.nn.functional as F
from against_dense import BY_ONE_PLAN, DTYPES, LAYOUTS, Target, in_layout
from pairwise import pairwise

import partkernels as pk
from partkernels.operators.registration import calls
from partkernels.testing import Yardstick, poisoned_memory

PROPORTIONS = (0.5, 0.3, 0.2)
LAYERS = {
    "linear": (pk.linear, (5, 7), (6, 7)),
    "linear, three dimensions": (pk.linear, (2, 5, 7), (6, 7)),
    "conv2d": (pk.conv2d, (2, 3, 5, 5), (6, 3, 3, 3)),
    "conv2d, a crop that the kernels of csrc/cpu serve": (pk.conv2d, (2, 2, 2, 9), (6, 2, 1, 3)),
}
TARGETS = [Target("reference", "cpu"), *BY_ONE_PLAN]


@pairwise(name=list(LAYERS), dtype=DTYPES, target=TARGETS)
def test_the_live_rows_are_added_up_and_one_of_them_learns(name, dtype, target):
    layer, x_shape, shape = LAYERS[name]
    partition = pk.Partition.random(shape, PROPORTIONS, seed=0).to(target.device)
    x, weight = target.randn(x_shape).to(dtype), target.randn(shape).to(dtype)
    rows = target.randn((6, 3)).to(dtype).t().requires_grad_()
    for active, update in [(1, 1), (2, 1), (3, 2), (3, None)]:
        alone = rows.detach()[:active].double().sum(0).to(dtype).requires_grad_()
        with target.use(), poisoned_memory():
            ours = layer(x, weight, partition, active, update=update, bias=rows)
            expected = layer(x, weight, partition, active, update=update, bias=alone)
        # Backends add the rows in float32 or a higher precision.
        torch.testing.assert_close(ours, expected)
        grads = torch.autograd.grad(ours.square().sum(), rows, allow_unused=True)[0]
        if update is None:
            assert grads is None
            continue
        torch.testing.assert_close(grads[update - 1], torch.autograd.grad(expected.square().sum(), alone)[0])
        grads[update - 1] = 0
        assert not grads.any()


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_many_rows_are_added_up_as_exactly_as_by_torch(target):
    partition = pk.Partition.random((6, 7), [1 / 200] * 200, seed=0).to(target.device)
    x, weight, rows = target.randn((4, 7)), target.randn((6, 7)), target.randn((200, 6))
    with target.use():
        ours = pk.linear(x, weight, partition, 200, bias=rows)
    Yardstick(lambda dtype: F.linear(x.to(dtype), weight.to(dtype), rows.to(dtype).sum(0)), torch.float32).check(ours)


@pairwise(
    shape=[(0, 5), (3, 0, 5), (1, 1), (7,), (40000,), (3, 4, 5), (2, 3, 4, 5), (300, 70), (3000, 50), (4, 3, 60, 70)],
    dim=[0, 1, -1],
    layout=LAYOUTS,
    dtype=DTYPES,
    target=BY_ONE_PLAN,
)
def test_the_gradient_of_rows_is_as_exact_as_torchs(shape, dim, layout, dtype, target):
    grad = in_layout(target.randn(shape).to(dtype), layout)
    dim = min(dim, grad.dim() - 1)
    with target.use(), poisoned_memory():
        ours = calls["grad_bias"](grad, dim, 2, 4, target.backend)
    others = [d for d in range(grad.dim()) if d != dim % grad.dim()]
    Yardstick(lambda dtype: grad.to(dtype).sum(others) if others else grad, dtype).check(ours[1])
    assert ours.shape == (4, shape[dim]) and not ours[[0, 2, 3]].any()


@pytest.mark.full
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_operators_with_rows_are_well_registered_and_twice_differentiable(name):
    _, x_shape, shape = LAYERS[name]
    partition = pk.Partition.random(shape, PROPORTIONS, seed=0)
    x, weight, rows = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (x_shape, shape, (3, 6)))
    geometry = [] if name == "linear" else [[1, 1], [0, 0], [1, 1], 1]
    args = (x, weight, rows, *geometry, 1, 1, *partition.flat(), "reference")
    assert set(torch.library.opcheck(getattr(torch.ops.partkernels, name).default, args).values()) == {"SUCCESS"}

    def call(x, row):  # the rows of other partitions are constants
        rows = torch.cat([row[None], torch.ones(2, 6, dtype=torch.float64)])
        return calls[name](x, weight.detach(), rows, *args[3:])

    row = rows[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(call, (x, row)) and torch.autograd.gradgradcheck(call, (x, row))


def test_a_bias_of_another_shape_raises():
    partition = pk.Partition.random((6, 7), PROPORTIONS, seed=0)
    for shape in [(5,), (2, 6), (3, 5), (1, 3, 6)]:
        with pytest.raises(pk.InputError, match=r"this weight takes \[6\], or \[3, 6\] with a row for each partition"):
            pk.linear(torch.ones(1, 7), torch.ones(6, 7), partition, 1, bias=torch.ones(shape))
