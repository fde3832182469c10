"""Small networks and data, and a short call of partnets.tune."""

import functools

import torch
from torch import nn
from torch.utils.data import Dataset

import partnets

FAST = functools.partial(torch.optim.Adam, lr=0.03)  # better than guessing after 6 steps
WITHOUT_RATES = functools.partial(torch.optim.SGD, lr=0.0)
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)


def classifier(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, classes))


def labelled(n=60):
    torch.manual_seed(1)
    x = torch.randn(n, 4)
    return x, x[:, :3].argmax(1)


X, Y = labelled()


def pictures():
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(36, 2))
    torch.manual_seed(2)
    return network, (torch.rand(40, 1, 6, 6), torch.randint(2, (40,)))


class Rows(Dataset):
    """A data set of pairs; `noise()` is added to x."""

    def __init__(self, x, y, noise=lambda: 0.0):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + self.noise(), self.y[i]


def tuned(network=None, data=None, names=("dropout", "weight_decay"), **options):
    options = {"steps": 6, "batch_size": 16, "seed": 3, "optimizer": FAST} | options
    return partnets.tune(network or classifier(), (X, Y) if data is None else data, names, **options)


def seen(look, *arguments, **options):
    """Return the results of look(training) at each tenth of each training."""
    found = []
    tuned(*arguments, callbacks=[lambda training: found.append(look(training))], **options)
    return found


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
