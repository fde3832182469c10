"""Layers on torch's module inputs equal torch's layer for C = 1 and the merged layer for C = 3."""

import copy
import inspect
import math

import pytest
import torch
from layers import CASES, PROPORTIONS, module_inputs, registered
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

import partnets

# torch warns about LSTMs with projections.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

LAYERS = registered()


def inputs(modes, most):
    """Return a parametrization over layers and at most `most` of their float64 inputs, evenly spread."""

    def cases():
        for cls in LAYERS:
            for training in modes:
                made = module_inputs(cls, training)
                for i in range(0, len(made), max(1, math.ceil(len(made) / most))):
                    mode = "training" if training else "evaluation"
                    yield pytest.param(cls, training, made[i], id=f"{cls.__name__}-{mode}-{i}")

    return pytest.mark.parametrize(("cls", "training", "one"), list(cases()))


def made(cls, training, one, **options):
    """Return a float64 layer with perturbed parameters, because norms start with scale 1 and bias 0."""
    torch.manual_seed(1)
    if "dtype" in inspect.signature(cls).parameters:
        options["dtype"] = torch.float64
    layer = cls(*one.constructor_input.args, **one.constructor_input.kwargs, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.rand_like(parameter) / 2)
    return layer.train(training)


def arguments(one, dtype=torch.float64):
    """Return new copies of the layer's arguments; arguments that share a tensor still share it."""
    copies = {}

    def differentiable(x):
        fresh = x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x
        return copies.setdefault(id(x), fresh)

    args, kwargs = tree_map_only(torch.Tensor, differentiable, (one.forward_input.args, one.forward_input.kwargs))
    return args, kwargs, [x for x in copies.values() if x.requires_grad]


def called(layer, one, dtype=torch.float64):
    """Return the outputs, and the gradients of their sum of squares by arguments and by parameters."""
    args, kwargs, leaves = arguments(one, dtype)
    torch.manual_seed(2)
    outputs = [x for x in tree_flatten(layer(*args, **kwargs))[0] if isinstance(x, torch.Tensor)]
    parameters = list(layer.parameters())
    loss, wanted = sum(x.square().sum() for x in outputs), [*leaves, *parameters]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    return outputs, grads[: len(leaves)], grads[len(leaves) :]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.cases(usual=60, full=170)
@inputs(modes=[True, False], most=99)
def test_with_one_partition_a_layer_is_torchs(cls, training, one):
    theirs, ours = (made(which, training, one) for which in (cls.ordinary, cls))
    before = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(before)
    lowered = [copy.deepcopy(layer).float() for layer in (ours, theirs)]
    exact = called(theirs, one)
    close(called(ours, one), exact)
    close(dict(ours.state_dict()), dict(theirs.state_dict()))
    if one.reference_fn is not None:
        ours.load_state_dict(before)
        args, kwargs, _ = arguments(one)
        expected = one.reference_fn(ours, *args, **kwargs)
        # torch's references differ by this much from its layers.
        torch.testing.assert_close(ours(*args, **kwargs), expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    # In float32, allow twice torch's error, plus the rounding of several consecutive operators.
    for mine, their, true in zip(*(tree_flatten(result)[0] for result in (
        called(lowered[0], one, torch.float32), called(lowered[1], one, torch.float32), exact
    )), strict=True):  # fmt: skip
        if true is not None and true.numel():
            error, bound = ((x - true).abs().nan_to_num().max() for x in (mine, their))
            assert error <= 2 * bound + 64 * torch.finfo(torch.float32).eps * true.abs().nan_to_num().max()


@pytest.mark.cases(usual=80, full=120)
@inputs(modes=[False], most=8)
@pytest.mark.parametrize(("active", "update"), [(1, 1), (2, 1), (3, None)])
def test_a_subnetwork_is_the_layer_that_merge_makes_of_it(cls, training, one, active, update):
    layer = made(cls, training, one, proportions=PROPORTIONS, seed=3)
    with partnets.subnetwork(layer, active, update):
        outputs, of_inputs, of_parameters = called(layer, one)
    expected, expected_of_inputs, of_merged = called(partnets.merge(layer, active), one)
    close(outputs, expected)
    close(of_inputs, expected_of_inputs)
    for (_, name, owner), mine, their in zip(named(layer), of_parameters, of_merged, strict=True):
        if update is None or their is None:
            assert mine is None or not mine.any()
        elif name in owner.partitions:
            close(owner.oriented(mine), torch.where(owner.partitions[name].mask(update), owner.oriented(their), 0))
        else:
            rest = mine.clone()
            rest[update - 1] = 0
            assert not rest.any() and mine[update - 1].shape == their.shape
            if name not in owner.scales:
                close(mine[update - 1], their)


def named(layer):
    for path, module in layer.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            yield path, name, module


@pytest.mark.cases(usual=25)
@inputs(modes=[True], most=6)
def test_gradients_of_a_subnetwork_are_those_of_its_values(cls, training, one):
    layer = made(cls, training, one, proportions=PROPORTIONS, seed=3)
    owned = {}
    for path, name, owner in named(layer):
        parameter = owner._parameters[name]
        rows = torch.arange(3).view(-1, *[1] * (parameter.dim() - 1)) == 1
        owned[f"{path}.{name}" if path else name] = owner.partitions[name].mask(2) if name in owner.partitions else rows
    args, kwargs, leaves = arguments(one)
    flat, spec = tree_flatten((args, kwargs))
    parameters = dict(layer.named_parameters())
    places = [i for i, x in enumerate(flat) if any(x is leaf for leaf in leaves)]

    def function(*tensors):
        given, values = list(flat), dict(zip(owned, tensors[len(places) :], strict=True))
        for i, tensor in zip(places, tensors, strict=False):
            given[i] = tensor
        # Entries of other partitions have no gradient, so they are constants.
        held = {name: torch.where(mask, values[name], parameters[name].detach()) for name, mask in owned.items()}
        args, kwargs = spec.unflatten(given)
        torch.manual_seed(2)
        outputs = tree_flatten(torch.func.functional_call(layer, held, args, kwargs))[0]
        return tuple(x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad)

    inputs = [*(flat[i] for i in places), *(p.detach().clone().requires_grad_() for p in layer.parameters())]
    with partnets.subnetwork(layer, active=3, update=2):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_every_registered_layer_has_a_case_and_inputs():
    made = {type(case.make()) for case in CASES.values()}
    lacking = [cls.__name__ for cls in registered(foreign=True) if cls.ordinary not in made]
    assert not lacking, f"{lacking} have no entry in tests/partnets/layers.py; add one"
    without = [cls.__name__ for cls in LAYERS if not module_inputs(cls, training=True)]
    assert not without, f"torch has no inputs for {without}; set `more` in their entries in tests/partnets/layers.py"


def test_every_layer_says_what_it_takes():
    for cls in registered(foreign=True):
        assert cls.__doc__ and "proportions" in str(cls.__signature__), cls
        assert issubclass(cls, cls.ordinary) and issubclass(cls, nn.Module)
