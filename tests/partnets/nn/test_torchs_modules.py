"""On torch's module inputs, drop-in layers equal torch's for C = 1, and subnetworks the dense layer for C = 3."""

import copy
import inspect
import math

import pytest
import torch
from layers import assert_learns, dense, module_inputs
from small_network import PROPORTIONS, perturbed
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

import partnets
from partnets.subnetworks.layers import __all__ as LAYERS
from partnets.subnetworks.state import partitioned_modules

# torch warns about LSTMs with projections.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def inputs(modes, most):
    """Return a parametrization over layers and at most `most` of their float64 inputs, evenly spread."""

    def cases():
        for name in LAYERS:
            for training in modes:
                made = module_inputs(name, training)
                for i in range(0, len(made), max(1, math.ceil(len(made) / most))):
                    mode = "training" if training else "evaluation"
                    yield pytest.param(name, training, made[i], id=f"{name}-{mode}-{i}")

    return pytest.mark.parametrize(("name", "training", "one"), list(cases()))


def made(cls, training, one, **options):
    """Return a float64 layer."""
    torch.manual_seed(1)
    if "dtype" in inspect.signature(cls).parameters:
        options["dtype"] = torch.float64
    layer = cls(*one.constructor_input.args, **one.constructor_input.kwargs, **options)
    return layer.double().train(training)


def called(layer, one):
    """Return the outputs, and the gradients of their sum of squares by arguments; leave those by parameters in them."""
    copies = {}

    def differentiable(x):
        fresh = x.detach().clone().requires_grad_() if x.is_floating_point() else x
        return copies.setdefault(id(x), fresh)

    args, kwargs = tree_map_only(torch.Tensor, differentiable, (one.forward_input.args, one.forward_input.kwargs))
    torch.manual_seed(2)
    outputs = [x for x in tree_flatten(layer(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
    if (loss := sum(x.square().sum() for x in outputs)).requires_grad:
        loss.backward()
    return [x.detach() for x in outputs], [x.grad for x in copies.values()]


@pytest.mark.cases(usual=20, full=170)
@inputs(modes=[True, False], most=99)
def test_with_one_partition_a_drop_in_layer_is_torchs(name, training, one):
    theirs, ours = (made(getattr(where, name), training, one) for where in (nn, partnets))
    assert isinstance(ours, type(theirs)) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    found, expected = called(ours, one), called(theirs, one)
    grads = [[parameter.grad for parameter in layer.parameters()] for layer in (ours, theirs)]
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close((found, grads[0]), (expected, grads[1]), **exact)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), **exact)


@pytest.mark.cases(usual=60, full=200)
@inputs(modes=[True, False], most=8)
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (3, None), (3, 2)])
def test_a_subnetwork_is_the_dense_layer(name, training, one, active, update):
    layer = perturbed(made(getattr(partnets, name), training, one, proportions=PROPORTIONS, seed=3), 0.25)
    if not partitioned_modules(layer):  # a norm without parameters
        return
    twin = dense(layer, active)
    with partnets.subnetwork(layer, active, update):
        found = called(layer, one)
    torch.testing.assert_close(found, called(twin, one), rtol=1e-10, atol=1e-10, equal_nan=True)
    assert_learns(layer, twin, active, update)


@pytest.mark.parametrize("name", LAYERS)
def test_every_drop_in_layer_has_torchs_signature_and_four_more_arguments(name):
    cls, theirs = getattr(partnets, name), inspect.signature(getattr(nn, name))
    taken = list(inspect.signature(cls).parameters.values())
    expected = [one for one in theirs.parameters.values() if one.kind is not one.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in taken[: len(expected)]] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    assert [p.name for p in taken[len(expected) :]] == ["proportions", "seed", "defaults", "scheme"]
    assert issubclass(cls, getattr(nn, name)) and all(p.name in cls.__doc__ for p in taken[len(expected) :])
