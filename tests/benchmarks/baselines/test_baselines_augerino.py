"""Augerino trains w and ψ on the training loss minus a bonus for wide augmentations, limited in the safe variant."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partbench.baselines import Augerino
from partnets import held_out, hyper, optim, single_chunk

# The safe variant's limit is 10 radians: 2 x 300 degrees are above it, 2 x 280 below.
WIDE, NARROW = 300.0, 280.0
SIZE = 5


class Still(nn.Module):
    """An augmentation without effect: the loss has zero gradients in the widths, so only the bonus acts."""

    def __init__(self, augmentation):
        super().__init__()
        self.augmentation = augmentation

    def forward(self, x):
        return x + 0 * self.augmentation.half_widths().sum()


def augerino(rotation=15.0, still=False, **arguments):
    """Return an Augerino trainer in float64 with SGD for w and ψ."""
    augmentation = hyper.Affine(rotation=rotation, scale=0.3)
    moves = Still(augmentation) if still else augmentation
    network = nn.Sequential(moves, nn.Flatten(), nn.Linear(SIZE * SIZE, 3)).double()
    model, chunks = single_chunk(network, (torch.rand(30, 1, SIZE, SIZE).double(), torch.randint(3, (30,))))
    options = {
        "optimizer": optim.SGD(model, lr=0.1),
        "hyper_optimizer": torch.optim.SGD(augmentation.parameters(), lr=0.2),
        "batch_size": 8,
    }
    return Augerino(model, chunks, hyper=augmentation, **options | arguments)


def raw(one):
    return next(iter(one.hyper.values())).widths.raw


def bonus_gradient(raw, regularisation):
    """Return the gradient of -regularisation * ||width||, where width_i = softplus(raw_i)."""
    widths = [math.log1p(math.exp(value)) for value in raw.tolist()]
    norm = math.sqrt(sum(width**2 for width in widths))
    slopes = [1 / (1 + math.exp(-value)) for value in raw.tolist()]
    gradient = [-regularisation * width / norm * slope for width, slope in zip(widths, slopes, strict=True)]
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("regularisation", [0.0, 0.01, 0.5])
@pytest.mark.parametrize(
    ("rotation", "safe", "given"),
    [(15.0, True, True), (15.0, False, True), (NARROW, True, True), (WIDE, True, False), (WIDE, False, True)],
)
def test_the_bonus_has_the_derived_gradient_and_the_safe_bonus_stops_at_10(rotation, safe, given, regularisation):
    one = augerino(rotation, still=True, safe=safe, regularisation=regularisation)
    before = raw(one).detach().clone()
    one.step()
    expected = bonus_gradient(before, regularisation) if given else torch.zeros(6, dtype=torch.float64)
    torch.testing.assert_close(raw(one).grad, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(raw(one), before - 0.2 * expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("safe", [True, False])
def test_a_step_updates_weights_and_widths_and_records_the_plain_loss(safe):
    one = augerino(safe=safe, regularisation=0.3, seed=2)
    network, generator = copy.deepcopy(one.model.networks[0]), torch.Generator().manual_seed(2)
    x, y = one.chunks.dataset.tensors
    losses = []
    torch.manual_seed(7)
    for _ in range(4):
        batch = one.chunks.order[torch.randint(30, (8,), generator=generator)]
        widths = network[0].widths.raw
        loss = F.cross_entropy(network(x[batch]), y[batch])
        bonus = bonus_gradient(widths.detach(), 0.3)
        network.zero_grad()
        loss.backward()
        with torch.no_grad():
            widths -= 0.2 * (widths.grad + bonus)
            for weight in network[2].parameters():
                weight -= 0.1 * weight.grad
        losses.append(loss.item())
    torch.manual_seed(7)
    history = one.fit(4)
    assert history.steps["loss"] == pytest.approx(losses, rel=1e-9)
    assert history.steps["k"] == [1] * 4 and history.steps["hyper_k"] == history.steps["hyper_loss"] == [None] * 4
    torch.testing.assert_close(list(one.model.networks[0].parameters()), list(network.parameters()))


def images():
    return torch.rand(20, 1, SIZE, SIZE), torch.randint(3, (20,))


def construct(hyperparameters, data=single_chunk):
    network = nn.Sequential(*hyperparameters, nn.Flatten(), nn.Linear(SIZE * SIZE, 3))
    return Augerino(*data(network, images()), hyper=hyperparameters or None)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: construct([hyper.InputMask(SIZE)]), r"pass one hyper\.Affine"),
        (lambda: construct([hyper.Affine(), hyper.Affine()]), r"pass one hyper\.Affine"),
        (lambda: construct([]), r"hyper is None; pass one hyper\.Affine"),
        (lambda: construct([hyper.Affine()], held_out), "2 chunks; Augerino learns from one"),
        (lambda: augerino(lml_every=5), "L_ML needs at least 2"),
        (lambda: augerino(batch_size=0), "batch_size=0"),
    ],
)
def test_arguments_that_augerino_does_not_support_raise(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
