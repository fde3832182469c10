"""torch.compile: two graphs for any number of subnetworks, and the results of eager mode."""

import copy

import pytest
import torch
from small_network import CASES, images, partitioned
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import partnets
from partnets import optim

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, unless warnings are errors


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
        grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    if update is not None:
        optimizer.step(update=update)
    return [y.detach(), x.grad, *grads]


@pytest.mark.full
@pytest.mark.parametrize("given", ["the model", "the compiled model"])
def test_training_compiles_two_graphs_and_gives_the_bits_of_eager_mode(given):
    eager = partitioned()
    model = copy.deepcopy(eager)
    compiled, graphs = counted(model)
    optimizers = [optim.SGD(each, lr=1e-3, momentum=0.9) for each in (eager, model)]
    x = images()
    for _ in range(2):
        for active, update in CASES:
            theirs = step(eager, eager, optimizers[0], x, active, update)
            entered = compiled if given == "the compiled model" else model
            ours = step(compiled, entered, optimizers[1], x, active, update)
            for a, b in zip(theirs, ours, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
        assert graphs.frame_count == 2
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


@pytest.mark.full
def test_steps_of_weights_and_hyperparameters_share_two_graphs():
    torch.manual_seed(0)
    mask = partnets.hyper.InputMask(50)
    model = nn.Sequential(nn.Flatten(), mask, nn.Linear(50, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    partnets.partition(model, (0.25,) * 4)
    compiled, graphs = counted(model)
    optimizer, of_psi = optim.SGD(model, lr=0.1), torch.optim.SGD(mask.parameters(), lr=0.1)
    batch = images(), torch.tensor([0, 1, 2, 1])

    def loss(batch):
        return nn.functional.cross_entropy(compiled(batch[0]), batch[1])

    for _ in range(2):
        for k in (1, 2, 3, 4):
            partnets.step_weights(model, optimizer, k, batch, loss)
            if k > 1:
                partnets.step_hyper(model, of_psi, {k: batch}, loss)
    assert graphs.frame_count <= 2


@pytest.mark.full
def test_the_backward_pass_of_another_subnetwork_raises():
    model = partitioned()
    compiled, _ = counted(model)
    for entered in (compiled, model):
        with partnets.subnetwork(entered, 2, 1):
            y = compiled(images())
        with pytest.raises(RuntimeError, match=r"computed by subnetwork active=2|modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.full
def test_layers_that_were_compiled_before_are_partitioned_and_those_wrapped_afterwards_merge():
    torch.manual_seed(0)
    x, model = torch.randn(5, 6), nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].compile(backend="aot_eager")
    partnets.partition(model, (0.5, 0.25, 0.25), defaults="seed")
    with partnets.subnetwork(model, 1, 1):
        model(x).sum().backward()
    mask = partnets.partitions(model)["0.weight"].mask(1)
    assert not model[0].weight.grad[~mask].any() and model[0].weight.grad.any()
    with torch.no_grad():
        model[0].weight.add_(0.1)
    model[0] = torch.compile(model[0], backend="aot_eager")
    for k in (1, 2, 3):
        with partnets.subnetwork(model, k):
            expected = model(x)
        torch.testing.assert_close(partnets.merge(model, active=k)(x), expected)
