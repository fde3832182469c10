"""The layers behave like torch's except in their results: strides, arguments, errors, names, initialisation."""

import copy
import inspect

import pytest
import torch
from torch import nn

import partnets


def test_conv2d_keeps_channels_last():
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    assert partnets.Conv2d(4, 8, 3)(x).is_contiguous(memory_format=torch.channels_last)


def test_a_chain_of_convolutions_and_norms_has_torchs_strides_throughout():
    theirs = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.GroupNorm(3, 6))
    ours = partnets.partition(copy.deepcopy(theirs), (0.5, 0.5))
    for channels_last in (False, True):
        x = torch.randn(2, 4, 9, 8)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        y, z = a, b
        for mine, its in zip(ours, theirs, strict=True):
            y, z = mine(y), its(z)
            assert y.stride() == z.stride()
            assert y.is_contiguous(memory_format=torch.channels_last) == channels_last
        y.sum().backward()
        assert a.grad.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "GroupNorm", "LayerNorm"])
def test_the_constructors_take_torchs_arguments_in_torchs_order(name):
    ours, theirs = getattr(partnets, name), getattr(nn, name)
    taken = list(inspect.signature(ours).parameters.values())
    expected = list(inspect.signature(theirs).parameters.values())
    assert [(p.name, p.kind, p.default) for p in taken[: len(expected)]] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    assert issubclass(ours, theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        {"groups": 0},
        {"groups": 3},
        {"padding": "all"},
        {"padding": "same", "stride": 2},
        {"padding_mode": "mirror"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_wrong_constructor_arguments_raise_torchs_errors(arguments):
    with pytest.raises((TypeError, ValueError)) as theirs:
        nn.Conv2d(4, 8, 3, **arguments)
    with pytest.raises(theirs.type) as ours:
        partnets.Conv2d(4, 8, 3, **arguments)
    assert str(ours.value).split(".")[-1] == str(theirs.value).split(".")[-1]


@pytest.mark.parametrize(
    ("ours", "theirs", "x"),
    [
        (partnets.Linear(7, 3), nn.Linear(7, 3), torch.zeros(2, 6)),
        (partnets.Linear(7, 3), nn.Linear(7, 3), torch.zeros(2, 7).double()),
        (partnets.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3), torch.zeros(2, 3, 8, 8)),
        (partnets.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3), torch.zeros(2, 2, 4, 8, 8)),
        (partnets.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3), torch.zeros(2, 4, 2, 8)),
        (partnets.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3), torch.zeros(2, 4, 8, 8).double()),
    ],
)
def test_inputs_that_do_not_fit_raise_what_torch_raises(ours, theirs, x):
    with pytest.raises(RuntimeError):
        theirs(x)
    with pytest.raises(RuntimeError, match=r"x (has shape|is)|padded input") as caught:
        ours(x)
    assert isinstance(caught.value, ValueError)


def test_attributes_and_keys_are_torchs():
    ours, theirs = partnets.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(ours, name) == getattr(theirs, name)
    shapes = {name: value.shape for name, value in ours.state_dict().items()}
    assert shapes == {name: value.shape for name, value in theirs.state_dict().items()}


def test_the_initial_distribution_is_torchs():
    ours, theirs = partnets.Linear(100, 300, seed=0), nn.Linear(100, 300)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert abs(a.abs().max() - 0.1) < 1e-3
        assert abs(a.std() / b.std() - 1) < 0.1
    assert (ours.weight[0, 0] != ours.bias[0]).all()


def test_seeds_come_from_torchs_generator():
    def layers():
        torch.manual_seed(0)
        return [partnets.Linear(5, 5, proportions=(0.5, 0.5)) for _ in range(2)]

    first, second = layers(), layers()
    assert torch.equal(first[0].partition.map, second[0].partition.map)
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[0].partition.map, first[1].partition.map)
    assert not torch.equal(first[0].weight, first[1].weight)
