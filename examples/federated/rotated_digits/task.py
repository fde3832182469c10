"""What server and clients have in common: the model, and who has which images."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

import partnets
from partnets import federated, hyper
from partnets.data import Data, Normalise, digits

SIZE, SAMPLES = 16, 4
# Of the clients' chunks and of the weights' partitions.
PROPORTIONS = (0.7, 0.2, 0.1)
# What the clients' SGD, the server's Adam and that of the hyperparameters learn at.
LR, SERVER_LR, HYPER_LR = 0.1, 4e-3, 6e-2
BATCH = 16
# Images are told apart by their rotation, in ten bins; each client has its own mixture of bins, mostly of one or two.
BINS, ALPHA = 10, 0.1
# The first half-widths, in each generator's own units; degrees of rotation.
INITIAL = {"translate_x": 0.06, "translate_y": 0.06, "rotation": 7.0, "scale": 0.12, "stretch": 0.12, "shear": 0.12}


@cache
def data() -> Data:
    """scikit-learn's digits, each rotated by an angle of its own."""
    return digits(SIZE).rotated()


@cache
def parts(clients: int) -> list[Tensor]:
    edges = torch.linspace(-math.pi, math.pi, BINS + 1)[1:-1]
    return federated.dirichlet(torch.bucketize(data().angles, edges), clients, ALPHA)


def make_network() -> nn.Module:
    """The same in each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        Normalise(data().mean, data().std),
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_model() -> tuple[nn.Module, hyper.Affine]:
    """The same in every process: the server and each client call it."""
    augmentation = hyper.Affine(**INITIAL)
    model = hyper.Averaged(augmentation, make_network(), samples=SAMPLES)
    return partnets.partition(model, PROPORTIONS, seed=0), augmentation


def load_data(number: int, clients: int) -> tuple[Tensor, Tensor]:
    """What a client has. A real one would read its own files here."""
    x, y = data().train
    own = parts(clients)[number]
    return x[own], y[own]
