"""Code as users write it, whose types `make lint` checks. Nothing runs it.

An error that a user must get is marked `pyrefly: ignore`; a mark without an error fails.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import assert_type

import partkernels as pk
import partnets
from partnets import federated, hyper, optim, stn
from partnets.data import Data
from partnets.training import callbacks

PROPORTIONS = (0.8, 0.1, 0.1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = hyper.ConcreteDropout(0.1)
        self.head = partnets.Linear(8, 3, proportions=PROPORTIONS, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(x))


class Noise(hyper.Hyperparameter):
    per_example = True

    def __init__(self) -> None:
        super().__init__()
        self.std = hyper.Learned(0.5, hyper.interval(0.0, 2.0), unit=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.std(x) * torch.randn_like(x)


class Focal(hyper.TrainingLoss):
    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__(F.cross_entropy)
        self.gamma = hyper.Learned(gamma, hyper.positive)

    def trained(self, output: Tensor, y: Tensor) -> Tensor:
        losses = self.losses(output, y)
        return (1 - (-losses).exp()) ** self.gamma() * losses


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


def refuses(module: Gain) -> str | None:
    return None if module.gain.requires_grad else "is frozen"


partnets.register(Gain, partnets.Rule(scales=("gain",), refuses=refuses))


def train(x: Tensor, y: Tensor, folder: Path) -> nn.Module:
    augmentation = hyper.Affine(rotation=10.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model = partnets.partition(hyper.Averaged(augmentation, network, samples=4), PROPORTIONS, defaults="seed")
    assert_type(model, hyper.Averaged)
    partnets.partition(network, 0.8)  # pyrefly: ignore[bad-argument-type]
    chunks = partnets.chunk((x, y), PROPORTIONS, seed=0, stratify=y)
    assert_type(chunks.sizes, list[int])
    trainer = partnets.Trainer(
        model,
        chunks,
        hyper=[augmentation],
        hyper_gradient={augmentation: "direct"},
        optimizer=optim.SGD(model, lr=0.1, groups=[{"params": network.parameters(), "weight_decay": 0.0}]),
        loss=F.cross_entropy,
        callbacks=[callbacks.every(10, lambda trainer: {"lml": partnets.lml(model, chunks)})],
    )
    history = trainer.fit(100)
    assert_type(history, partnets.History)
    print(max(history.lml["lml"]))
    trainer.save(folder / "training.pt")
    assert_type(trainer.values(), dict[str, float])
    assert_type(partnets.accuracy(model, (x, y)), float)
    assert_type(partnets.loss_matrix(model, chunks), Tensor)
    assert_type(partnets.merge(model), hyper.Averaged)
    return partnets.finalize(model, "deploy")


def train_by_steps(model: Network, chunks: partnets.Chunks, loader: partnets.Loader) -> None:
    optimizer = optim.PerPartition(torch.optim.RMSprop, model, lr=1e-3)
    hyper_optimizer = torch.optim.Adam(model.dropout.parameters())

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for k, batch, hyper_k, hyper_batch in loader:
        assert_type(k, int)
        partnets.step_weights(model, optimizer, k, batch, loss, clip=1.0)
        if hyper_k is not None:
            partnets.step_hyper(model, hyper_optimizer, {hyper_k: hyper_batch}, loss)
    with partnets.subnetwork(model, active=2, update=2):
        loss(chunks.sample(2, 16)).backward()
    optimizer.step(update=2)
    assert_type(partnets.partitions(model), dict[str, pk.Partition])


def tune(network: nn.Module, data: Data, examples: TensorDataset) -> partnets.Tuned:
    adam = partial(torch.optim.Adam, lr=1e-3)
    partnets.tune(network, examples, "dropout", steps=10)
    tuned = partnets.tune(network, data, [hyper.Affine(), "weight_decay"], steps=10, optimizer=adam, device="cpu")
    assert_type(tuned.values, dict[str, float])
    assert_type(tuned.lml, float)
    return tuned


def respond(network: Network, x: Tensor, y: Tensor) -> Network:
    stn.convert(network, hyper=network.dropout)
    model, chunks = partnets.held_out(network, (x, y), validation=0.2)
    stn.Trainer(model, chunks, hyper=[network.dropout], sampling=(1, 0)).fit(10)
    return stn.freeze(network)


def average(network: Network, clients: list[federated.Client]) -> federated.Round:
    server = federated.Server(network, hyper=network.dropout)
    values = server.values()
    return server.step(client.train(values, server.rounds + 1) for client in clients)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    partition = pk.Partition.random(weight.shape, PROPORTIONS, seed=0, defaults=pk.Uniform(0.04, seed=0))
    pk.linear(x, weight, partition, active="2")  # pyrefly: ignore[bad-argument-type]
    nested = pk.Partition.nested((256, 512), rows=(205, 256), cols=((200, 256), (210, 256)))
    assert_type(nested, pk.NestedPartition)
    with pk.use_backend("reference"):
        return pk.linear(x, weight, nested, 1) + pk.linear(x, weight, partition, active=2, update=2)
