"""Table 4 and Fig. 10: clients that share no data learn augmentations and dropout rates, at less upload than FedAvg."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

import partnets
from partbench import models, quiet
from partbench.baselines import AugerinoClient
from partbench.datasets import load, subset
from partbench.paper.dirichlet import dirichlet
from partbench.paper.experiment import (
    Claim,
    Experiment,
    Record,
    Table,
    at_least,
    curve,
    of_common_seeds,
    registered,
    rotation,
    select,
    text,
)
from partbench.paper.recipes import digits_network, files_of, first_affine
from partnets import federated, hyper, optim
from partnets.data import Data, Normalise, ToFloat
from partnets.utils.files import replacing

METHODS = {"fedavg": "FedAvg", "augerino": "FedAvg + Augerino", "partitioned": "FedAvg + partitioned"}
# Bins of the rotation angle, by which rotated images are split (Appendix J.2).
BINS = 10
# The most evaluations over which accuracies are averaged, in results and in Fig. 10, and the rounds between them.
LAST, EVERY = 10, 10
QUICK_ROUNDS = 10
GIGABYTE = 1e9


def mnist_network() -> nn.Sequential:
    """Build the network of Table 9, with concrete dropout between layers."""
    return with_dropout(models.MnistCNN(), nn.ReLU)


def cifar_network() -> nn.Sequential:
    """Build ResNet-9 with concrete dropout in the middle of each block as its only dropout."""
    return with_dropout(models.ResNet9(dropout=0.0), nn.MaxPool2d)


def with_dropout(network: nn.Sequential, after: type[nn.Module]) -> nn.Sequential:
    """Insert concrete dropout with a rate of 0.1 after each module of a type."""
    found = []
    for module in network:
        found += [module, hyper.ConcreteDropout(0.1)] if isinstance(module, after) else [module]
    return nn.Sequential(*found)


@dataclass(frozen=True)
class Setting:
    """The settings of a data set's clients and server (Appendix J.2).

    Attributes:
        network: makes a network for normalised images.
        augmentation: makes the part of ψ that transforms images.
        sizes: of the subsets of the training data, ascending.
        rounds: for each size.
        clients: the number of clients.
        proportions: of clients in each chunk and of weights in each partition.
        alpha, rotated_alpha: of the Dirichlet split by labels, and of that by angle for rotated images.
        batch: the batch size of the clients' steps.
        hyper_batch: the number of examples for the gradient of ψ; None for all.
        lr, server_lr, hyper_lr: learning rates of the clients' SGD, the server's Adam and ψ's Adam.
        eps: of both Adams.
        samples: the number of augmented copies of an image.
    """

    network: Callable[[], nn.Sequential]
    augmentation: Callable[[], hyper.Affine]
    sizes: tuple[int, ...]
    rounds: tuple[int, ...]
    clients: int
    proportions: tuple[float, ...]
    alpha: float
    rotated_alpha: float
    batch: int
    hyper_batch: int | None
    lr: float
    server_lr: float
    hyper_lr: float
    eps: float = 1e-8
    samples: int = 10


SETTINGS = {
    "digits": Setting(
        digits_network, first_affine, (1297,), rounds=(400,), clients=20, proportions=(0.7, 0.2, 0.1), alpha=1.0,
        rotated_alpha=0.1, batch=16, hyper_batch=None, lr=0.1, server_lr=4e-3, hyper_lr=6e-2, samples=4,
    ),
    "mnist": Setting(
        mnist_network, hyper.Affine, (1250, 5000, 50000), rounds=(2000,) * 3, clients=100, proportions=(0.7, 0.2, 0.1),
        alpha=0.1, rotated_alpha=0.1, batch=64, hyper_batch=None, lr=5e-2, server_lr=1e-3, hyper_lr=3e-3,
    ),
    "cifar10": Setting(
        cifar_network, hyper.Affine, (1250, 5000, 45000), rounds=(5000,) * 3, clients=100, proportions=(0.9, 0.1),
        alpha=1.0, rotated_alpha=0.1, batch=32, hyper_batch=32, lr=10**-0.5, server_lr=1e-2, hyper_lr=1e-3, eps=1e-7,
    ),
}  # fmt: skip
# For CPUs: a tenth of the rounds, with larger steps of the server and of ψ, and fewer copies.
SETTINGS["mnist-cpu"] = replace(
    SETTINGS["mnist"], sizes=(1250, 5000), rounds=(200, 100), server_lr=3e-3, hyper_lr=3e-2, samples=2
)


class Federation:
    """One training: the clients' app, the server, and evaluations every EVERY rounds."""

    def __init__(self, setting: Record) -> None:
        self.of, self.method, self.seed = SETTINGS[setting["dataset"]], setting["method"], setting["seed"]
        self.rotated = setting["rotated"]
        self.client = AugerinoClient if self.method == "augerino" else federated.Client
        self.epochs = 1
        if setting.get("quick"):
            self.of = replace(self.of, samples=min(self.of.samples, 4))
        whole = load(files_of(setting["dataset"]), rotated=self.rotated, seed=0)
        # The subset of the data and its split among clients are the same for all seeds and methods.
        self.data: Data = subset(whole, setting["examples"], seed=0)
        self.parts = self._split()

    def make_model(self) -> tuple[nn.Module, list[nn.Module]]:
        """Build the model and ψ, the same in each call."""
        torch.manual_seed(self.seed)
        network = nn.Sequential(Normalise(self.data.mean, self.data.std), *self.of.network())
        dropouts = [module for module in network.modules() if isinstance(module, hyper.ConcreteDropout)]
        augmentation = self.of.augmentation()
        averaged = nn.Sequential(ToFloat(), hyper.Averaged(augmentation, network, samples=self.of.samples))
        if self.method == "partitioned":
            return partnets.partition(averaged, self.of.proportions, seed=self.seed), [augmentation, *dropouts]
        for dropout in dropouts:  # the baselines keep its rate
            dropout.requires_grad_(False)
        if self.method == "augerino":
            return partnets.Ensemble([averaged]), [augmentation]
        return partnets.Ensemble([nn.Sequential(ToFloat(), network)]), []

    def load_data(self, number: int, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.data.train
        return x[self.parts[number]], y[self.parts[number]]

    def run(self, rounds: int, checkpoint: Path) -> Record:
        """Run this many rounds, from the checkpoint if it exists."""
        from partnets.federated.flower import LocalGrid, PartitionedFedAvg, client_app

        of = self.of
        app = client_app(
            self.make_model,
            self.load_data,
            client=self.client,
            proportions=of.proportions if self.method == "partitioned" else None,
            seed=self.seed,
            optimizer=partial(optim.SGD, lr=of.lr),
            batch_size=of.batch,
            epochs=self.epochs,
            hyper_batch_size=of.hyper_batch,
        )
        model, psi = self.make_model()
        learned = [one for module in psi for one in module.parameters() if one.requires_grad]
        server = federated.Server(
            model,
            hyper=psi or None,
            optimizer=optim.Adam(model, lr=of.server_lr, eps=of.eps),
            hyper_optimizer=torch.optim.Adam(learned, lr=of.hyper_lr, eps=of.eps) if learned else None,
        )
        grid = LocalGrid(app, of.clients)
        path = checkpoint.with_suffix(".curve")
        points: list[Record] = json.loads(path.read_text()) if path.exists() else []
        began: list[int] = []

        def evaluate(number: int, arrays) -> None:
            began.append(number)
            if (number % EVERY and number != rounds) or any(point["round"] == number for point in points):
                return
            here = number - began[0]  # rounds that the grid has counted; all have equally many bytes
            last = points[-1] if points else {}
            counted = {"sent": grid.sent, "uploaded": grid.received}
            point = {name: number * counted[name] // here if here else last.get(name, 0) for name in counted}
            torch.manual_seed(number)  # for the augmentations over which outputs are averaged
            point |= {"round": number, "accuracy": 100 * partnets.accuracy(model, self.data.test)}
            points.append(point)
            with replacing(path) as file:
                json.dump(points, file)

        with quiet("flwr", logging.WARNING):  # which logs each round
            PartitionedFedAvg(server, checkpoint=checkpoint).start(grid, num_rounds=rounds, evaluate_fn=evaluate)
        counted = [point["accuracy"] for point in points[-_averaged(points) :]]
        rates = [module.values()["rate"] for module in psi if isinstance(module, hyper.ConcreteDropout)]
        return {
            "accuracy": sum(counted) / len(counted),
            "psi": psi[0].values() if psi else {},
            "rates": rates,
            "curve": points,
            "sent": points[-1]["sent"],
            "uploaded": points[-1]["uploaded"],
        }

    def _split(self) -> list[torch.Tensor]:
        if not self.rotated:
            return dirichlet(self.data.train[1], self.of.clients, self.of.alpha)
        edges = torch.linspace(-math.pi, math.pi, BINS + 1)[1:-1]
        return dirichlet(torch.bucketize(self.data.angles, edges), self.of.clients, self.of.rotated_alpha)


@registered
class Federated(Experiment):
    """FedAvg, alone, with Augerino and partitioned, on clients with different labels or rotations."""

    name = "federated"
    paper = "Table 4, Fig. 10"
    partial_results = True
    datasets = tuple(SETTINGS)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        of = SETTINGS[dataset]
        found = []
        for seed, rotated, (examples, rounds), method in product(
            seeds, (True, False), zip(of.sizes, of.rounds, strict=True), METHODS
        ):
            setting = {"dataset": dataset, "rotated": rotated, "method": method, "examples": examples, "seed": seed}
            found.append({**setting, "rounds": rounds})
        if quick:
            return [{**one, "rounds": QUICK_ROUNDS, "quick": True} for one in found if one["examples"] == of.sizes[0]]
        return found

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return Federation(setting).run(setting["rounds"], checkpoint)

    def table(self, found: pd.DataFrame) -> Table:
        """Return the accuracies as in Table 4, the upload over FedAvg's, and the learned rotation."""
        sizes, rows = sorted(found.examples.unique()), []
        for method, label in METHODS.items():
            mine = select(found, method=method)
            if mine.empty:
                continue
            cells = [select(mine, rotated=r, examples=n).accuracy for r in (True, False) for n in sizes]
            upload = _upload(found, method)
            widths = [_rotations(select(mine, rotated=r)) if method != "fedavg" else () for r in (True, False)]
            row = [text(cell) if len(cell) else "" for cell in cells]
            row.append("" if upload is None else f"{100 * upload:.1f} %")
            row += [text(one, 0) if len(one) else "" for one in widths]
            rows.append([label, *row, f"{(mine.seconds / mine.rounds).mean():.2f}"])
        kinds = [f"{kind}, {size}" for kind in ("rotated", "upright") for size in sizes]
        return ["accuracy, %", *kinds, "upload", "rotation ±°, rotated", "upright", "seconds a round"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot moving averages of the accuracy over the bytes sent to and from clients, as in Fig. 10."""
        kinds = sorted({(not r, n) for r, n in zip(found.rotated, found.examples, strict=True)})
        figure = Figure(figsize=(5 * len(kinds), 4), layout="constrained")
        for axes, (upright, examples) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            for i, (method, label) in enumerate(METHODS.items()):
                mine = select(found, method=method, rotated=not upright, examples=examples)
                if mine.empty:
                    continue
                points = pd.concat([_smoothed(one) for one in mine.curve], ignore_index=True)
                curve(axes, (points.sent + points.uploaded) / GIGABYTE, points.accuracy, label, color=f"C{i}")
            kind = "upright" if upright else "rotated"
            axes.set(title=f"{kind}, {examples} images", xlabel="sent and received, all clients [GB]")
            axes.set(ylabel="test accuracy [%]")
            axes.legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        """Return the paper's claims: better than both baselines, most with few and rotated images, at less upload."""
        claims = []
        for rotated, examples in product((True, False), sorted(found.examples.unique())):
            mine = select(found, rotated=rotated, examples=examples)
            ours = select(mine, method="partitioned")
            kind = f"{examples} {'rotated' if rotated else 'upright'}, partitioned"
            for other in ("fedavg", "augerino"):
                both = of_common_seeds(ours, select(mine, method=other))
                if len(both[0]):
                    claims.append(at_least(f"{kind} ≥ {METHODS[other]}", *(one.accuracy for one in both)))
        upload = _upload(found, "partitioned")
        if upload is not None:
            claims.append(Claim("partitioned: at most 0.95 of FedAvg's upload", f"{upload:.3f}", upload <= 0.95))
        return claims


def _upload(found: pd.DataFrame, method: str) -> float | None:
    """Return the bytes that clients send in a round, as a fraction of FedAvg's; None if either has not been trained."""
    sent = (found.uploaded / found.rounds).groupby(found.method).mean()
    return float(sent[method] / sent["fedavg"]) if {method, "fedavg"} <= {*sent.index} else None


def _rotations(found: pd.DataFrame) -> pd.Series:
    return found.psi.map(rotation)


def _averaged(points: list[Record]) -> int:
    """Return over how many evaluations accuracies are averaged: LAST, or the last quarter of a short training."""
    return min(LAST, max(1, len(points) // 4))


def _smoothed(points: list[Record]) -> pd.DataFrame:
    found = pd.DataFrame(points)
    return found.assign(accuracy=found.accuracy.rolling(_averaged(points), min_periods=1).mean())
