"""torch.func transforms of the operators: the result of dense PyTorch or an error, never a silent 0."""

import pytest
import torch
import torch.nn.functional as F
from against_dense import BACKENDS

import partkernels as pk

PARTITION = pk.Partition.random((4, 3), (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, 0))
CONV = pk.Partition.random((4, 3, 2, 2), (0.5, 0.5), seed=0, defaults=pk.Uniform(0.5, 0))
LAYERS = {
    "linear": (pk.linear, F.linear, PARTITION, (5, 3)),
    "conv2d": (pk.conv2d, F.conv2d, CONV, (5, 3, 4, 3)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    """Return our layer and torch's as functions of (x, weight, bias with two rows), and such tensors."""
    layer, dense, partition, shape = LAYERS[request.param]

    def ours(x, weight, rows):
        return layer(x, weight, partition, 2, update=2, bias=rows)

    def theirs(x, weight, rows):
        weight = torch.where(partition.mask(2), weight, weight.detach())
        return dense(x, weight, rows[0].detach() + rows[1])

    torch.manual_seed(0)
    return ours, theirs, [torch.randn(s, dtype=torch.float64) for s in (shape, partition.shape, (2, 4))]


def squares(layer):
    return lambda *args: layer(*args).square().sum()


def assert_alike(ours, theirs, transform, *args):
    ours, theirs = transform(ours)(*args), transform(theirs)(*args)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_grad_is_torchs(case, backend):
    ours, theirs, tensors = case
    with pk.use_backend(backend):
        assert_alike(ours, theirs, lambda f: torch.func.grad(squares(f), argnums=(0, 1, 2)), *tensors)


def test_gradients_of_each_example_are_torchs(case):
    ours, theirs, (x, weight, rows) = case
    assert_alike(
        ours, theirs, lambda f: torch.vmap(torch.func.grad(squares(f), (1, 2)), (0, None, None)), x, weight, rows
    )


def test_a_stack_of_weights_is_mapped_over(case):
    ours, theirs, (x, weight, rows) = case
    weights = torch.stack([weight, 2 * weight], -1)
    assert_alike(ours, theirs, lambda f: torch.vmap(f, (None, -1, None)), x, weights, rows)


@pytest.mark.full
def test_vmap_compiles(case):
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    ours, theirs, (x, *others) = case
    mapped = torch.vmap(lambda x: ours(x, *others))
    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs(x, *others))


def test_jacobians_and_gradients_of_gradients_are_torchs(case):
    ours, theirs, tensors = case
    assert_alike(ours, theirs, torch.func.jacrev, *tensors)
    assert_alike(ours, theirs, lambda f: torch.func.jacrev(torch.func.grad(squares(f))), *tensors)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # raised by modules that torch imports
def test_forward_mode_raises(case):
    ours, _, (x, *others) = case
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: ours(x, *others), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        ours(torch.autograd.forward_ad.make_dual(x, x), *others)
