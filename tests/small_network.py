"""A small network with one layer of each kind for images [batch, 2, 5, 5], shared by tests of complete models."""

import torch
from torch import nn

import partnets
from partnets import hyper
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.5, 0.3, 0.2)
CASES = [(active, update) for active in (1, 2, 3) for update in (None, *range(1, active + 1))]


def dense():
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(36, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def partitioned(defaults="seed"):
    """Return the network in three partitions, with weights that differ from their initial values."""
    return perturbed(partnets.partition(dense(), PROPORTIONS, defaults=defaults), 0.1)


@torch.no_grad()
def perturbed(model, std):
    """Return a partitioned model after adding noise to each partition's entries."""
    for one in partitioned_parameters(model):
        one.stored.add_(torch.randn_like(one.stored), alpha=std)
        one.combine()
    return model


def images():
    return torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(1))


class MeanMask(hyper.InputMask):
    """A mask without noise."""

    def forward(self, x):
        return x * torch.sigmoid(self.logits)


class Drift(nn.Module):
    """A module that subtracts a running mean of the data that it has seen in training, if it follows them."""

    def __init__(self, features, follows=True):
        super().__init__()
        self.follows = follows
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x):
        if self.training and self.follows:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean
