"""Layers drawn from a seed keep the distribution of their initialisation, or the one that they declare."""

import copy
import functools
import pickle

import pytest
import torch
from layers import CASES
from torch import nn

import partnets
from partkernels import Normal, Uniform, Zeros

PROPORTIONS = (0.5, 0.5)


def partitioned(layer, **options):
    """Return the layer in two partitions, and the defaults of its weight."""
    partnets.partition(layer, PROPORTIONS, **options)
    return layer, partnets.partitions(layer)["weight"].defaults


@pytest.mark.parametrize("shape", [(3, 4), (300, 200)])
def test_torchs_own_layers_start_as_torch_draws_them(shape):
    layer, defaults = partitioned(nn.Linear(*shape))
    assert defaults == Uniform(1 / shape[0] ** 0.5, defaults.seed)
    assert layer.bias.abs().max() <= 1.01 / shape[0] ** 0.5
    _, defaults = partitioned(nn.Embedding(*shape))
    assert defaults == Normal(1.0, defaults.seed)


def test_other_initialisations_are_recognised():
    layer = nn.Linear(400, 300)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    layer, defaults = partitioned(layer, defaults="seed")
    assert isinstance(defaults, Normal) and defaults.std == pytest.approx(0.02, rel=0.02)
    assert not layer.bias.any() and not layer.bias_rows.any()

    convolution = nn.Conv2d(64, 32, 3)
    nn.init.kaiming_uniform_(convolution.weight, nonlinearity="relu")
    _, defaults = partitioned(convolution, defaults="seed")
    assert isinstance(defaults, Uniform) and defaults.scale == pytest.approx((6 / 576) ** 0.5, rel=0.02)


def test_a_weight_of_zeros_starts_at_zero():
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    layer, defaults = partitioned(layer)
    assert defaults == Zeros() and not layer.weight.any()


@pytest.mark.parametrize(
    "make", [lambda: nn.GroupNorm(2, 4), lambda: nn.LayerNorm((4, 3)), partnets.nn.Bias, partnets.nn.Scale]
)
@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
def test_every_subnetwork_of_a_norm_starts_as_it_is_whatever_the_defaults(make, defaults):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, 4, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    before = copy.deepcopy(layer.state_dict())
    expected = layer(x)
    partnets.partition(layer, PROPORTIONS, defaults=defaults)
    for name, value in before.items():
        rows = layer.get_buffer(f"{name}_rows")
        assert torch.equal(rows[0], value) and (rows[1:] == (0 if name == "bias" else 1)).all()
    for active in (1, 2):
        with partnets.subnetwork(layer, active, 1):
            assert torch.equal(layer(x), expected)


def test_the_paddings_row_stays_and_is_active_everywhere():
    layer = partnets.partition(nn.Embedding(9, 8, padding_idx=2), PROPORTIONS)
    assert not layer.weight[2].any() and (partnets.partitions(layer)["weight"].ids()[2] == 1).all()
    with partnets.subnetwork(layer, 1, 1):
        rows = layer(torch.arange(9))
        assert not rows[2].any() and rows[3].all()
        rows.sum().backward()
    assert not layer.weight.grad[2].any()


def test_weights_of_any_module_start_as_they_are_and_so_do_their_defaults():
    torch.manual_seed(0)
    before = CASES["own weights"].make().table.detach()
    model = CASES["own weights"].partitioned()
    mask = partnets.partitions(model)["table"].mask(1)
    with partnets.subnetwork(model, 1):
        assert torch.equal(model.table[~mask], before[~mask]) and not torch.equal(model.table, before)


DECLARED = [functools.partial(Normal, 0.3), functools.partial(Uniform, 0.7), Zeros()]
every_declaration = pytest.mark.parametrize("declared", DECLARED, ids=["normal", "uniform", "zeros"])


def declaring(declared):
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
    network = copied(declaring(declared))
    bias = network[0].bias.detach().clone()
    layer, other = partnets.partition(network, (0.5, 0.5), seed=3)
    assert torch.equal(layer.weight, expected(declared, layer))
    assert torch.equal(defaults_of(layer).values((4, 5)), layer.weight)
    assert torch.equal(layer.bias, bias) and not layer.bias_rows[1].any()
    assert isinstance(defaults_of(other), Uniform), "an undeclared layer should use torch's distribution"


def test_a_merged_layer_starts_in_the_same_way_again():
    declared = functools.partial(Normal, 0.3)
    merged = partnets.merge(partnets.partition(declaring(declared), (0.5, 0.5)))
    layer = partnets.partition(merged, (0.5, 0.5), seed=7)[0]
    assert torch.equal(layer.weight, expected(declared, layer))


@pytest.mark.parametrize("declared", [0.1, "normal", lambda seed: torch.zeros(4, 5)], ids=["float", "str", "tensor"])
def test_invalid_seed_defaults_raise_and_change_nothing(declared):
    network = declaring(declared)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match=r"seed_defaults of a Linear .* set it to partkernels\.Zeros"):
        partnets.partition(network, (0.5, 0.5))
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
