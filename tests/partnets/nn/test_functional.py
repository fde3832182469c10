"""torch.func on complete models: replaced parameters, gradients, and per-example gradients."""

import copy

import pytest
import torch
from small_network import CASES, images, partitioned
from torch.func import functional_call, grad, vmap

import partnets


@pytest.fixture
def model():
    return partitioned().double()


def inputs():
    return images().double()


def detached(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_replaced_parameters_are_those_that_compute(model):
    doubled = {name: 2 * parameter for name, parameter in detached(model).items()}
    other, x = copy.deepcopy(model), inputs()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    for active in (1, 2, 3):
        with partnets.subnetwork(model, active), partnets.subnetwork(other, active):
            assert torch.equal(functional_call(model, doubled, x), other(x))


@pytest.mark.parametrize(("active", "update"), [case for case in CASES if case[1]])
def test_gradients_are_those_of_the_backward_pass_and_sums_over_examples(model, active, update):
    x = inputs()

    def loss(parameters, x):
        return functional_call(model, parameters, x).square().sum()

    with partnets.subnetwork(model, active, update):
        model(x).square().sum().backward()
        ours = grad(loss)(detached(model), x)
        each = vmap(grad(lambda parameters, x: loss(parameters, x[None])), (None, 0))(detached(model), x)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad)
        assert each[name].shape == (4, *parameter.shape)
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


def test_without_an_update_no_parameter_has_a_gradient(model):
    with partnets.subnetwork(model, 2):
        ours = grad(lambda parameters: functional_call(model, parameters, inputs()).square().sum())(detached(model))
    assert not any(gradient.any() for gradient in ours.values())
