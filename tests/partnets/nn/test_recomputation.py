"""Activation checkpoints: the backward pass recomputes the subnetwork of the forward pass, or raises."""

import functools

import pytest
import torch
from small_network import CASES, PROPORTIONS
from torch import nn
from torch.utils.checkpoint import checkpoint

import partnets
from partnets import models


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3), models.Bias(), nn.GroupNorm(2, 4), nn.GELU(), models.Scale(), nn.Flatten(),
        nn.Linear(36, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.GELU(),
    )  # fmt: skip
    model = partnets.partition(layers, PROPORTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 2, 5, 5, requires_grad=True)


def gradients(y, model, x):
    return torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True, retain_graph=True)


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize(("active", "update"), CASES)
def test_a_checkpoint_recomputes_the_subnetwork_of_its_forward_pass(active, update):
    model, x = network(), inputs()
    contexts = partnets.checkpoint_contexts(model)
    with partnets.subnetwork(model, active, update):
        expected = gradients(model(x), model, x)
        plain = checkpoint(model, x, use_reentrant=False)
        assert_equal(gradients(plain, model, x), expected)
        remembered = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    with partnets.subnetwork(model, 3, 3):
        for _ in range(2):  # each backward pass recomputes
            assert_equal(gradients(remembered, model, x), expected)
        assert all((layer.active, layer.update) == (3, 3) for layer in model if hasattr(layer, "active"))


@pytest.mark.cases(usual=2)
@pytest.mark.parametrize("scheme", ["weight", "nested"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, functools.partial(nn.GroupNorm, 2), nn.Identity])
def test_what_a_layer_gives_is_changed_in_place_inside_of_a_checkpoint(norm, scheme):
    first = nn.Sequential(nn.Conv2d(2, 8, 3), norm(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.SiLU(inplace=True))
    model, x = nn.Sequential(first, nn.Flatten(), nn.Linear(8, 3)), inputs()
    partnets.partition(model, PROPORTIONS, scheme=scheme, **({"example": x} if scheme == "nested" else {}))
    first, last = model[0], model[1:]
    with partnets.subnetwork(model, 2, 2):
        expected = gradients(last(first(x)), model, x)
        assert_equal(gradients(last(checkpoint(first, x, use_reentrant=False)), model, x), expected)


def test_each_of_several_checkpoints_recomputes_its_own_subnetwork():
    model, x = network(), inputs()
    contexts = partnets.checkpoint_contexts(model)
    outputs, expected = [], []
    for active, update in CASES:
        with partnets.subnetwork(model, active, update):
            outputs.append(checkpoint(model, x, use_reentrant=False, context_fn=contexts))
            expected.append(gradients(model(x), model, x))
    for y, each in zip(reversed(outputs), reversed(expected), strict=True):
        assert_equal(gradients(y, model, x), each)


@pytest.mark.parametrize("index", [0, 1, 2, 4, 6, 7])
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 2), (3, None), (3, 2)])
def test_another_subnetwork_in_the_backward_pass_raises(index, active, update):
    layer = network()[index]
    x = torch.randn({0: (2, 2, 5, 5), 6: (2, 36), 7: (2, 5)}.get(index, (2, 4, 3, 3)), requires_grad=True)
    with partnets.subnetwork(layer, active, update):
        y = checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False)
    ours = f"recomputed subnetwork active=3, update=3 of a layer that had active={active}, update={update}"
    torchs = "different metadata|different number of tensors"  # torch's check of saved tensors may fail first
    with pytest.raises(RuntimeError, match=f"{ours}|{torchs}"):
        y.sum().backward()


def test_the_error_names_the_cures():
    model, x = network(), inputs()
    with partnets.subnetwork(model, 2, 2):
        y = checkpoint(model[0], x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"backward inside partnets\.subnetwork, or pass context_fn=partnets\.check"):
        y.sum().backward()


def test_an_exception_in_the_recomputation_leaves_the_layers_as_they_were():
    model, x = network(), inputs()
    calls = []

    def once(x):
        calls.append(None)
        if len(calls) > 1:
            raise KeyError
        return model(x)

    with partnets.subnetwork(model, 1, 1):
        y = checkpoint(once, x, use_reentrant=False, context_fn=partnets.checkpoint_contexts(model))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert model[0].active == model[0].update == 3


@pytest.mark.parametrize("update", [None, 1, 2])
def test_no_copy_of_a_weight_is_saved(update):
    model, x = network(), inputs()
    weights = {parameter.numel() for parameter in (model[0].weight, model[6].weight, model[8].weight)}
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, partnets.subnetwork(model, 2, update):
        y = model(x)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert y.requires_grad and all(tensor.data_ptr() in own for tensor in saved if tensor.numel() in weights)
    assert any(tensor.data_ptr() in own for tensor in saved)


def test_a_checkpoint_saves_its_input_alone():
    model, x = network(), inputs()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), partnets.subnetwork(model, 2, 1):
        checkpoint(model, x, use_reentrant=False)
    assert {tensor.data_ptr() for tensor in saved if tensor.numel()} == {x.data_ptr()}


@pytest.mark.full
def test_checkpoints_compile():
    torch.compiler.reset()  # graphs of other tests would count towards the recompilation limit
    model, x = network(), inputs()

    def run(x):
        return checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with partnets.subnetwork(model, 2, 1):
        expected, y = gradients(model(x), model, x), compiled(x)
    assert_equal(gradients(y, model, x), expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reentrant_checkpoint_outside_raises_and_inside_is_right(depth):
    torch.manual_seed(0)
    model = partnets.partition(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (0.5, 0.5))
    x = torch.randn(3, 4, requires_grad=True)

    def again(x):
        compute = model
        for _ in range(depth):
            compute = functools.partial(checkpoint, compute, use_reentrant=True)
        return compute(x).square().sum()

    with partnets.subnetwork(model, 1, 1):
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        again(x).backward()
        assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), expected, strict=True))
        outside = again(x)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"recomputed subnetwork active=2.* had active=1.*use_reentrant=False"):
        outside.backward()
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), before, strict=True))
    again(x).backward()  # forward and backward outside: the full network
