"""Architectures of timm, torchvision and transformers can be partitioned, trained and merged, and leak nothing."""

import pytest
import torch
from architectures import ARCHITECTURES, OTHERS, PROPORTIONS, Failed, attempt
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import partnets
from partnets.subnetworks.parameters import partitioned_parameters


def made(name):
    torch.manual_seed(0)
    make, given, *_ = (ARCHITECTURES | OTHERS)[name]
    return make(), given


@pytest.mark.cases(usual=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS])
def test_random_partitions_of_an_architecture(name):
    attempt(*made(name), defaults="seed")


@pytest.mark.cases(usual=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nested_subnetworks_of_an_architecture_are_narrow_networks(name):
    model, given = made(name)
    attempt(model, given, scheme="nested", example=given)
    weights = [one for one in partitioned_parameters(model) if one.partition is not None and one.parameter.dim() > 1]
    narrow = [one for one in weights if one.state.narrow is not None and one.name in one.state.narrow.owners]
    assert len(narrow) >= ARCHITECTURES[name][-1] * len(weights)
    sizes = [sum(parameter.numel() for parameter in partnets.merge(model, k).parameters()) for k in (1, 2, 3)]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "share"), [("ConvNeXt", 0.8), ("GPT-2", 0.6), ("Llama", 0.7)])
def test_a_nested_subnetwork_skips_inactive_channels(name, share):
    """Compare with the multiply-adds that are skipped if subnetwork 1 has half of the channels of every layer."""
    model, given = made(name)
    partnets.partition(model, PROPORTIONS, scheme="nested", example=given)

    def multiply_adds(active):
        with FlopCounterMode(display=False) as counter, partnets.subnetwork(model.eval(), active), torch.no_grad():
            model(**given)
        return counter.get_total_flops()

    most = 1 - PROPORTIONS[0] ** 2
    assert share <= (1 - multiply_adds(1) / multiply_adds(3)) / most <= 1 / most


class Reader(nn.Module):
    """A module that reads the vectors of all partitions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + dict(self.layer.named_buffers()).get("bias_rows", torch.zeros(1, 4)).sum(0)


class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean += x.mean(0)
        return self.layer(x) - self.mean


@pytest.mark.parametrize(
    ("make", "message"),
    [(Reader, "reads weights of later|merged subnetwork"), (Drifting, "changes mean, which partition")],
)
def test_an_attempt_notices_a_leak(make, message):
    with pytest.raises(Failed, match=message):
        attempt(make(), {"x": torch.randn(3, 4)}, defaults="seed")
