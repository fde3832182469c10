"""The task that server and clients share: the model, and the images of each client."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import partnets
from partnets import hyper
from partnets.data import Data, Normalise, digits

SIZE, SAMPLES = 16, 4
# Proportions of the clients' chunks and the weights' partitions.
PROPORTIONS = (0.7, 0.2, 0.1)
# Learning rates of the clients' SGD, the server's Adam, and Adam for the hyperparameters.
LR, SERVER_LR, HYPER_LR = 0.1, 4e-3, 6e-2
BATCH = 16
# Images are sorted by their rotation and cut into this many shards for each client (McMahan et al. 2017).
SHARDS = 2
# Initial half-widths, in the unit of each transformation; rotation in degrees.
INITIAL = {"translate_x": 0.06, "translate_y": 0.06, "rotation": 7.0, "scale": 0.12, "stretch": 0.12, "shear": 0.12}


@cache
def data() -> Data:
    """Return scikit-learn's digits, each rotated by a different random angle."""
    return digits(SIZE).rotated()


@cache
def parts(clients: int) -> list[Tensor]:
    """Return the indices of each client's images, of two narrow ranges of rotations."""
    angles = data().angles
    assert angles is not None  # the images are rotated
    shards = angles.argsort().tensor_split(SHARDS * clients)
    dealt = torch.randperm(len(shards), generator=torch.Generator().manual_seed(0)).tolist()
    return [torch.cat([shards[i] for i in dealt[client::clients]]) for client in range(clients)]


def make_network() -> nn.Module:
    """Return a network with the same initial weights in each call."""
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
    """Return the model and its augmentation, the same in the server and in every client."""
    augmentation = hyper.Affine(**INITIAL)
    model = hyper.Averaged(augmentation, make_network(), samples=SAMPLES)
    return partnets.partition(model, PROPORTIONS, seed=0), augmentation


def load_data(number: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return a client's images and labels. A real client would read its files here."""
    x, y = data().train
    own = parts(clients)[number]
    return x[own], y[own]
