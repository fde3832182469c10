"""torch.compile: one graph per (active, update), no recompilation afterwards, and the results of eager mode."""

import copy

import pytest
import torch
from small_network import CASES, images, partitioned
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend

import partnets
from partnets import optim

# The limit documented in partnets.subnetwork, for C = 3.
LIMIT = 3 * (3 + 3) // 2


@pytest.fixture(autouse=True)
def alone():
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    yield
    torch.compiler.reset()


def counted(model, **options):
    """Return the compiled model and a counter of its graphs."""
    graphs = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=graphs, fullgraph=True, **options), graphs


def step(network, model, optimizer, x, active, update):
    """Return the output and all gradients of one step; with update=None, only x has a gradient."""
    x = x.clone().requires_grad_()
    optimizer.zero_grad()
    with partnets.subnetwork(model, active, update):
        y = network(x)
        y.square().sum().backward()
    if update is not None:
        optimizer.step(update=update)
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.full
def test_training_compiles_each_subnetwork_once_and_gives_the_bits_of_eager_mode():
    eager = partitioned()
    model = copy.deepcopy(eager)
    compiled, graphs = counted(model)
    optimizers = [optim.SGD(each, lr=1e-3, momentum=0.9) for each in (eager, model)]
    x = images()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        for expected in (len(CASES), len(CASES)):
            for active, update in CASES:
                theirs = step(eager, eager, optimizers[0], x, active, update)
                ours = step(compiled, model, optimizers[1], x, active, update)
                for a, b in zip(theirs, ours, strict=True):
                    assert (a is None) == (b is None)
                    assert a is None or torch.equal(a, b)
            assert graphs.frame_count == expected
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


@pytest.mark.full
def test_a_compiled_model_is_partitioned_as_the_one_inside():
    model = partitioned()
    compiled, graphs = counted(model)
    x = images()
    for _ in range(2):
        with partnets.subnetwork(compiled, 2, 1), torch.no_grad():
            y = compiled(x)
        with partnets.subnetwork(model, 2, 1), torch.no_grad():
            assert torch.equal(model(x), y)
    assert graphs.frame_count == 1


@pytest.mark.full
def test_outside_the_subnetwork_the_backward_pass_is_that_of_the_forward():
    model = partitioned()
    compiled, _ = counted(model)
    x, grads = images(), []
    for each in (model, compiled):
        with partnets.subnetwork(model, 2, 1):
            y = each(x)
        grads.append(torch.autograd.grad(y.sum(), list(model.parameters())))
    assert all(map(torch.equal, *grads))


@pytest.mark.full
def test_torch_stops_compiling_past_its_limit_and_says_so():
    model = partitioned()
    compiled, graphs = counted(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        for update in (1, 2):
            with partnets.subnetwork(model, 2, update):
                compiled(images())
        with pytest.raises(FailOnRecompileLimitHit, match="fullgraph=True"), partnets.subnetwork(model, 2, None):
            compiled(images())
    assert graphs.frame_count == 2


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["weight", "nested"])
def test_layers_that_were_compiled_before_are_partitioned_and_those_wrapped_afterwards_merge(scheme):
    torch.manual_seed(0)
    x, model = torch.randn(5, 6), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].compile(backend="aot_eager")
    options = {"example": x} if scheme == "nested" else {"defaults": "seed"}
    partnets.partition(model, (0.5, 0.25, 0.25), scheme=scheme, **options)
    with partnets.subnetwork(model, 1, 1):
        model(x).sum().backward()
    assert not model[0].weight.grad[~model[0].partition.mask(1)].any() and model[0].weight.grad.any()
    with torch.no_grad():
        model[0].weight.add_(0.1)
    model[0] = torch.compile(model[0], backend="aot_eager")
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k):
            expected = model(x)
        torch.testing.assert_close(partnets.merge(model, active=k)(x), expected)
