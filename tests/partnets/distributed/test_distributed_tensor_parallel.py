"""Ranks with torch's tensor parallelism, each with a part of every weight, compute and learn as one process does."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import whole

import partnets
from partnets import distributed, hyper, optim
from partnets.subnetworks.state import state_of

PROPORTIONS = (0.8, 0.1, 0.1)


def network(defaults="seed", seed=0):
    torch.manual_seed(0)
    layers = [hyper.InputMask(12), nn.Linear(12, 128), nn.Tanh(), nn.Linear(128, 5), nn.LayerNorm(5)]
    if defaults == "nested":  # the second layer's outputs are partitioned too
        layers[3:] = [nn.Linear(128, 16), nn.Tanh(), nn.Linear(16, 5)]
        nested = {"scheme": "nested", "example": torch.randn(2, 12)}
        return partnets.partition(nn.Sequential(*layers), PROPORTIONS, **nested).double().eval()
    return partnets.partition(nn.Sequential(*layers), PROPORTIONS, defaults=defaults, seed=seed).double().eval()


def parallel(model):
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def outputs_and_gradients(model):
    """Return outputs and gradients for combinations of `active` and `update`, including update=None."""
    found = []
    for active, update in [(1, 1), (2, 1), (2, 2), (3, 3), (2, None)]:
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
        optim.SGD(model).zero_grad()
        model.zero_grad()
        with partnets.subnetwork(model, active=active, update=update):
            y = model(x)
            y.square().sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
        found.append([y.detach(), *(None if grad is None else whole(grad) for grad in grads)])
    return found


def learn(model, steps, optimizer):
    for step in steps:
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        k = distributed.draw((1, 1, 1), seed=0, step=step)
        optimizer.zero_grad()
        with partnets.subnetwork(model, active=k, update=k):
            model(x).square().sum().backward()
        optimizer.step(update=k)
    return [whole(parameter) for parameter in model.parameters()]


def compute_in_parallel(defaults):
    return outputs_and_gradients(parallel(network(defaults)))


@pytest.mark.parametrize("defaults", ["seed", "zero", "stored", "nested"])
def test_two_ranks_compute_the_outputs_and_gradients_of_one_process(defaults, two_ranks):
    expected = outputs_and_gradients(network(defaults))
    for found in two_ranks(compute_in_parallel, defaults):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def learn_nested_in_parallel():
    model = parallel(network("nested"))
    return learn(model, range(10), optim.Adam(model, lr=0.01))


def test_two_ranks_learn_nested_weights_as_one_process(two_ranks):
    model = network("nested")
    assert all(state_of(model[i]).narrow is not None for i in (1, 3))
    expected = learn(model, range(10), optim.Adam(model, lr=0.01))
    for weights in two_ranks(learn_nested_in_parallel):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)


def learn_in_parallel(folder):
    model = parallel(network())
    optimizer = optim.Adam(model, lr=0.01)
    weights = learn(model, range(10), optimizer)
    dcp.save({"model": model, "optimizer": distributed.OptimizerState(model, optimizer)}, checkpoint_id=folder)
    return weights, [tuple(model[i].weight.to_local().shape) for i in (1, 3)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_two_ranks_learn_the_weights_of_one_process_which_goes_on_from_their_checkpoint(two_ranks, tmp_path):
    model = network()
    optimizer = optim.Adam(model, lr=0.01)
    expected = learn(model, range(10), optimizer)
    for weights, shapes in two_ranks(learn_in_parallel, tmp_path):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-11)
        assert shapes == [(64, 12), (5, 64)]
    loaded = network()
    resumed = optim.Adam(loaded, lr=0.01)
    dcp.load({"model": loaded, "optimizer": distributed.OptimizerState(loaded, resumed)}, checkpoint_id=tmp_path)
    found, expected = (learn(one, range(10, 20), step) for one, step in ((loaded, resumed), (model, optimizer)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def compute_before_and_after_loading():
    saved, model = parallel(network(seed=1)), parallel(network())
    before = outputs_and_gradients(model)
    model.load_state_dict(saved.state_dict())
    return before[0][0], outputs_and_gradients(model), outputs_and_gradients(saved)


def test_a_layer_computes_with_the_partition_that_it_has_loaded(two_ranks):
    for before, found, expected in two_ranks(compute_before_and_after_loading):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert not torch.equal(before, found[0][0])
