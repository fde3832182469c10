"""A small network with three hyperparameters, its conversions and their trainer."""

import torch
from torch import nn

import partnets
from partnets import hyper, optim, stn

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()
DATA = X, Y
PROPORTIONS = (0.5, 0.3, 0.2)


def network():
    dropout, noise = hyper.Dropout(0.3), hyper.InputNoise(0.1)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), dropout, nn.Linear(8, 2)
    penalty = hyper.ActivationPenalty(0.01, range=hyper.logarithmic(1e-4, 1.0))
    return nn.Sequential(noise, *layers[:3], penalty, *layers[3:])


def hypers(model):
    return [module for module in model.modules() if isinstance(module, hyper.Hyperparameter)]


def converted(**options):
    torch.manual_seed(0)
    model = network()
    return stn.convert(model, hypers(model), **options)


def shifted(**options):
    """Return a converted network with responses other than 0."""
    model = converted(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def held_out(**options):
    return partnets.held_out(converted(**options), DATA, validation=0.25)


def partitioned(**options):
    model = partnets.partition(converted(**options), PROPORTIONS, defaults="stored")
    return model, partnets.chunk(DATA, PROPORTIONS)


def trainer(model, chunks, **options):
    torch.manual_seed(1)
    options = {"batch_size": 8, "hyper_every": 2, "lml_every": 3, "clip": 1.0} | options
    return stn.Trainer(model, chunks, optimizer=optim.Adam(model, lr=1e-2), **options)
