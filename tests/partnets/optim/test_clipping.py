"""The norm of a gradient is the norm in the updated partition, because it is exactly 0 everywhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partnets
from partbench import models
from partnets import optim
from partnets.subnetworks.parameters import partitioned_parameters

PROPORTIONS = (0.5, 0.3, 0.2)


def layers():
    norms = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7), nn.LayerNorm(7)
    return partnets.partition(nn.Sequential(*norms, nn.Linear(7, 3)), PROPORTIONS)


NETWORKS = {
    "layers and norms": layers,
    "FixUp's scalars": lambda: partnets.partition(models.FixupResNet(8, in_channels=1, classes=3), PROPORTIONS),
    "whole networks": lambda: partnets.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(36, 3)) for _ in PROPORTIONS]),
}


def examples():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 1, 6, 6, generator=generator), torch.randint(3, (60,), generator=generator)


def split(model, k):
    """Return the gradient in the entries of partition k, and in all other entries of weights."""
    own, other = [], []
    for one in partitioned_parameters(model):
        if (grad := one.parameter.grad) is None:
            continue
        is_owned = one.partition.mask(k) if one.partition is not None else torch.full(grad.shape, one.numel(k) > 0)
        own.append(grad[is_owned])
        other.append(grad[~is_owned])
    return torch.cat(own), torch.cat(other)


def stored(model):
    """Return everything that partitions own."""
    return torch.cat([one.stored.detach().flatten() for one in partitioned_parameters(model)])


def trainer(network, **arguments):
    torch.manual_seed(0)
    model = NETWORKS[network]()
    if "FixUp" in network:  # most of its initial gradients are 0
        for one in partitioned_parameters(model):
            nn.init.normal_(one.stored, std=0.3)
            one.combine()
    chunks = partnets.chunk(examples(), PROPORTIONS)
    return partnets.Trainer(model, chunks, optimizer=optim.SGD(model, lr=1.0), batch_size=8, **arguments)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_torch_clips_the_gradient_norm_of_the_updated_partition(network, k):
    model = trainer(network).model
    x, y = examples()
    with partnets.subnetwork(model, active=k, update=k):
        F.cross_entropy(model(x), y).backward()
    own, other = split(model, k)
    assert own.any() and not other.any()
    norm = nn.utils.clip_grad_norm_(optim.SGD(model).parameters(), 1e-3)
    torch.testing.assert_close(norm, own.norm())
    torch.testing.assert_close(split(model, k)[0], own * 1e-3 / own.norm())


@pytest.mark.cases(usual=1)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_trainer_clips_gradients_that_are_too_long(network):
    """Use SGD with lr=1, which changes the weights by the gradient."""

    def moved(clip):
        one = trainer(network, clip=clip)
        before = stored(one.model)
        one.fit(1)
        return stored(one.model) - before

    free = moved(None)
    torch.testing.assert_close(moved(free.norm().item() / 4), free / 4, rtol=1e-4, atol=1e-6)
    assert torch.equal(moved(2 * free.norm().item()), free)
