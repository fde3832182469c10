"""Shared tools of the federated tests: a reproducible small model with ψ, and clients with different examples."""

from functools import partial

import torch
from torch import nn

import partnets
from partnets import federated, hyper, optim

PROPORTIONS = (0.5, 0.3, 0.2)
# The chunk of each of four clients.
CHUNKS = (1, 2, 3, 1)


class Gains(hyper.Hyperparameter):
    """A hyperparameter without noise."""

    def __init__(self):
        super().__init__()
        self.gains = hyper.Learned([0.5, 0.75, 1.0, 1.25, 1.5, 2.0], hyper.positive)

    def forward(self, x):
        return x * self.gains()


class Count(nn.Module):
    """A module that counts its examples in a buffer and in an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.seen = 0

    def forward(self, x):
        self.batches += 1
        self.seen += len(x)
        return x / (1 + self.batches / 10 + self.seen / 1000)


def make_network(rate=0.0):
    torch.manual_seed(0)
    return nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(rate), nn.Linear(8, 3)


def make_model(rate=0.0):
    """Return a reproducible model and its ψ, with noise if the dropout rate is not 0."""
    model = nn.Sequential(psi := Gains(), *make_network(rate))
    return partnets.partition(model, PROPORTIONS, seed=0), psi


def make_noisy():
    return make_model(0.5)


def make_undivided():
    return partnets.Ensemble([nn.Sequential(*make_network())]), None


def load_data(number, clients=4):
    """Return a client's examples, reproducibly; later clients have more."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(20 + 5 * number, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def client(number=0, chunk=None, data=None, make=make_model, **options):
    model, psi = make()
    chunk = CHUNKS[number] if chunk is None else chunk
    data = load_data(number) if data is None else data
    return federated.Client(model, data, chunk, number, hyper=psi, batch_size=8, **options)


def server(make=make_model, optimizer=None, hyper_optimizer=None, **options):
    """Return a server, with optimisers made by these functions of the model and of the parameters of ψ."""
    model, psi = make()
    options["optimizer"] = optimizer and optimizer(model)
    options["hyper_optimizer"] = hyper_optimizer and hyper_optimizer(psi.parameters())
    return federated.Server(model, hyper=psi, **options)


# Options of a server that subtracts the mean change and the mean gradient of ψ.
PLAIN = {"optimizer": partial(optim.SGD, lr=1.0), "hyper_optimizer": partial(torch.optim.SGD, lr=1.0)}


def run(server, clients, rounds):
    """Run `rounds` rounds and return the last one's outcome."""
    for _ in range(rounds):
        values, number = server.values(), server.rounds + 1
        found = server.step([one.train(values, number) for one in clients])
    return found


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def state(server):
    """Return all tensors that determine further rounds."""
    optimizers = [each.state_dict()["state"] for each in (server.optimizer, server.hyper_optimizer) if each is not None]
    moments = {
        f"{which}.{i}.{name}": torch.as_tensor(value)
        for which, found in enumerate(optimizers)
        for i, each in found.items()
        for name, value in each.items()
    }
    return {**server.values(), **moments}
