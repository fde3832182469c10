"""A layer that declares its initial distribution is drawn from it with its seed, also after copies and pickling."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import partnets
from partkernels import Normal, Uniform, Zeros

DECLARED = [functools.partial(Normal, 0.3), functools.partial(Uniform, 0.7), Zeros()]
every_declaration = pytest.mark.parametrize("declared", DECLARED, ids=["normal", "uniform", "zeros"])


def model(declared):
    network = nn.Sequential(nn.Linear(5, 4), nn.Conv2d(2, 3, 3))
    network[0].seed_defaults = declared
    return network


def defaults_of(layer):
    return partnets.partitions(layer)["weight"].defaults


def expected(declared, layer):
    """Return the declared distribution's values for the layer's seed."""
    if isinstance(declared, Zeros):
        return torch.zeros(4, 5)
    return declared.func(*declared.args, seed=defaults_of(layer).seed).values((4, 5))


@every_declaration
@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_the_weight_starts_at_its_declared_defaults(declared, copied):
    network = copied(model(declared))
    bias = network[0].bias.detach().clone()
    layer, other = partnets.partition(network, (0.5, 0.5), seed=3)
    assert torch.equal(layer.weight, expected(declared, layer))
    assert torch.equal(defaults_of(layer).values((4, 5)), layer.weight)
    assert torch.equal(layer.bias, bias) and not layer.bias_rows[1].any()
    assert isinstance(defaults_of(other), Uniform), "an undeclared layer should use torch's distribution"


def test_a_merged_layer_starts_in_the_same_way_again():
    declared = functools.partial(Normal, 0.3)
    merged = partnets.merge(partnets.partition(model(declared), (0.5, 0.5)))
    layer = partnets.partition(merged, (0.5, 0.5), seed=7)[0]
    assert torch.equal(layer.weight, expected(declared, layer))


@pytest.mark.parametrize("declared", [0.1, "normal", lambda seed: torch.zeros(4, 5)], ids=["float", "str", "tensor"])
def test_invalid_seed_defaults_raise_and_change_nothing(declared):
    network = model(declared)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match=r"seed_defaults of a Linear .* set it to partkernels\.Zeros"):
        partnets.partition(network, (0.5, 0.5))
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
