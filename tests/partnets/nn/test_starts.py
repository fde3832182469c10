"""Layers drawn from a seed keep the distribution of their initialisation."""

import functools

import pytest
import torch
from torch import nn

import partnets
from partkernels import Normal, Uniform, Zeros
from partnets.nn.initial_values import distribution_of

PROPORTIONS = (0.5, 0.5)


@pytest.mark.parametrize("shape", [(3, 4), (300, 200)])
def test_torchs_own_layers_start_as_torch_draws_them(shape):
    layer = partnets.partition(nn.Linear(*shape), PROPORTIONS)
    assert layer.partition.defaults == Uniform(1 / shape[0] ** 0.5, layer.partition.defaults.seed)
    assert layer.bias[0].abs().max() <= 1.01 / shape[0] ** 0.5
    table = partnets.partition(nn.Embedding(*shape), PROPORTIONS)
    assert table.partition.defaults == Normal(1.0, table.partition.defaults.seed)


def test_other_initialisations_are_recognised():
    layer = nn.Linear(400, 300)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    layer = partnets.partition(layer, PROPORTIONS, defaults="seed")
    assert isinstance(layer.partition.defaults, Normal)
    assert layer.partition.defaults.std == pytest.approx(0.02, rel=0.02)
    assert not layer.bias.any()

    convolution = nn.Conv2d(64, 32, 3)
    nn.init.kaiming_uniform_(convolution.weight, nonlinearity="relu")
    convolution = partnets.partition(convolution, PROPORTIONS, defaults="seed")
    assert isinstance(convolution.partition.defaults, Uniform)
    assert convolution.partition.defaults.scale == pytest.approx((6 / 576) ** 0.5, rel=0.02)


def test_a_weight_of_zeros_starts_at_zero():
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    layer = partnets.partition(layer, PROPORTIONS)
    assert layer.partition.defaults == Zeros() and not layer.weight.any()


def test_a_bias_of_ones_own_stays():
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.bias, 5.0)
    assert partnets.partition(layer, PROPORTIONS).bias.tolist() == [[5.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("usual", [functools.partial(Uniform, 0.1), functools.partial(Normal, 0.1), None])
def test_parameters_without_values_count_as_usual(usual):
    assert distribution_of(torch.empty(3, 3, device="meta"), usual) is usual
    assert distribution_of(torch.empty(0, 3), usual) is usual


def test_the_paddings_row_stays_and_is_live_everywhere():
    layer = partnets.partition(nn.Embedding(9, 8, padding_idx=2), PROPORTIONS)
    assert not layer.weight[2].any() and (layer.partition.ids()[2] == 1).all()
    with partnets.subnetwork(layer, 1, 1):
        rows = layer(torch.arange(9))
        assert not rows[2].any() and rows[3].all()
        rows.sum().backward()
    assert not layer.weight.grad[2].any()
