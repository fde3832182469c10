"""Activation checkpoints recompute the subnetwork that they are in; outside of it the backward pass raises."""

import functools

import pytest
import torch
from small_network import CASES, PROPORTIONS, images, partitioned
from torch import nn
from torch.utils.checkpoint import checkpoint

import partnets


def gradients(y, model, x):
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return torch.autograd.grad(y.square().sum(), wanted, allow_unused=True, retain_graph=True)


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("active", "update"), CASES)
def test_a_checkpoint_recomputes_its_subnetwork(active, update, reentrant):
    model, x = partitioned(), images().requires_grad_()
    with partnets.subnetwork(model, active, update):
        model(x).square().sum().backward()
        expected = [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        x.grad = None
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert_equal([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], expected)


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, functools.partial(nn.GroupNorm, 2), nn.Identity])
def test_checkpoints_allow_in_place_changes_of_layer_outputs(norm):
    first = nn.Sequential(nn.Conv2d(2, 8, 3), norm(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.SiLU(inplace=True))
    model, x = nn.Sequential(first, nn.Flatten(), nn.Linear(8, 3)), images().requires_grad_()
    partnets.partition(model, PROPORTIONS)
    first, last = model[0], model[1:]
    with partnets.subnetwork(model, 2, 2):
        expected = gradients(last(first(x)), model, x)
        assert_equal(gradients(last(checkpoint(first, x, use_reentrant=False)), model, x), expected)


@pytest.mark.parametrize(("inside", "reentrant"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 2), (3, None), (3, 2)])
def test_a_backward_pass_outside_raises_and_leaves_gradients_as_they_were(active, update, inside, reentrant):
    """Check checkpoints around the model, and reentrant ones of its layers."""
    model, x = partitioned(), images().requires_grad_()
    if inside:
        model.forward = lambda x: model[4:](checkpoint(model[:4], x, use_reentrant=True))
    with partnets.subnetwork(model, active, update):
        y = model(x) if inside else checkpoint(model, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=f"computed by subnetwork active={active}, update={update}, "):
        y.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters()) and x.grad is None
    with partnets.subnetwork(model, active, update):
        model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("update", [None, 1, 2])
def test_no_copy_of_a_weight_is_saved(update):
    model, x = partitioned(), images().requires_grad_()
    weights = {parameter.numel() for parameter in (model[0].weight, model[4].weight, model[6].weight)}
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, partnets.subnetwork(model, 2, update):
        y = model(x)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert y.requires_grad and all(tensor.data_ptr() in own for tensor in saved if tensor.numel() in weights)
    assert any(tensor.data_ptr() in own for tensor in saved)


@pytest.mark.full
def test_checkpoints_compile():
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    model, x = partitioned(), images().requires_grad_()

    def run(x):
        return checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with partnets.subnetwork(model, 2, 1):
        expected, y = gradients(model(x), model, x), compiled(x)
        assert_equal(gradients(y, model, x), expected)


@pytest.mark.parametrize("depth", [2, 70])
def test_reentrant_checkpoints_within_each_other_recompute_the_subnetwork(depth):
    """Nest more than 60 backward passes, so that they run in separate threads as on a GPU."""
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (0.5, 0.5))
    x = torch.randn(3, 4, requires_grad=True)
    compute = model
    for _ in range(depth):
        compute = functools.partial(checkpoint, compute, use_reentrant=True)
    with partnets.subnetwork(model, 1, 1):
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        compute(x).square().sum().backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), expected, strict=True))
    compute(x).square().sum().backward()  # forward and backward outside: the whole network
