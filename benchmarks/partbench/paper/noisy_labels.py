"""Training on labels with 40 % drawn at random: weights of examples, learned without a clean example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import partnets
from partbench.paper.example_weights import ExampleWeights
from partbench.paper.experiment import Claim, Experiment, Record, Table, at_least, registered, select, text
from partbench.paper.recipes import DIGITS_SIZE, cosine, limited, recipe
from partbench.paper.runs import fit
from partnets import hyper, optim
from partnets.data import Data, Normalise, digits

WRONG = 0.4
STEPS, QUICK_STEPS, BATCH = 1600, 200, 64
# Learning rates of Adam: the weight of an example is in few batches, a network's weights are in all.
RATES = {"numbers": 0.3, "network": 1e-3}
METHODS = {
    "all": "one network, all labels",
    "clean": "one network, the labels that are right",
    "partitioned": "partitioned, all labels",
    "smoothing": "partitioned, label smoothing learned",
    "network": "partitioned, weights by a network of the loss",
    "numbers": "partitioned, a weight for each example",
}


@registered
class NoisyLabels(Experiment):
    """Example weights and label smoothing, learned on digits with 40 % random labels."""

    name = "noisy-labels"
    paper = "Ren et al. 2018, Shu et al. 2019"
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        common = limited({"dataset": dataset, "steps": STEPS}, quick, QUICK_STEPS)
        return [{**common, "method": method, "seed": seed} for seed in seeds for method in METHODS]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        data, labels, wrong = spoiled(setting["seed"])
        if setting["method"] in ("all", "clean"):
            kept = ~wrong if setting["method"] == "clean" else torch.ones_like(wrong)
            model = partnets.Ensemble([network(data)])
            chunks = partnets.chunk((data.train[0][kept], labels[kept]), (1.0,))
            return learned(model, chunks, data, setting, checkpoint)
        loss, psi, y = training_loss(setting["method"], labels)
        model = nn.Sequential(network(data), loss) if psi else network(data)
        proportions = recipe("digits").proportions
        partnets.partition(model, proportions, seed=setting["seed"])
        examples = list(zip(data.train[0], y, strict=True))
        chunks = partnets.chunk(examples, proportions, seed=setting["seed"])
        found = learned(model, chunks, data, setting, checkpoint, loss=loss, psi=psi)
        if setting["method"] == "numbers":  # no chunk judges the last partition, which the last chunk trains
            judged = torch.tensor([i for k in range(1, len(chunks)) for i in chunks.indices(k)])
            weights = loss.scores.detach().sigmoid()
            found["right"], found["wrong"] = (weights[judged[which[judged]]].mean().item() for which in (~wrong, wrong))
        return found

    def table(self, found: pd.DataFrame) -> Table:
        def psi(mine: pd.DataFrame) -> str:
            names = mine.psi.iloc[0]
            return ", ".join(f"{name} {text(mine.psi.map(lambda one, n=name: one[n]), 2)}" for name in names)

        rows = []
        for method, label in METHODS.items():
            mine = select(found, method=method)
            rows.append([label, text(mine.accuracy), psi(mine), text(mine.seconds / 60)])
        return ["", "test accuracy, %", "ψ", "minutes a training"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.subplots()
        for i, (method, label) in enumerate(METHODS.items()):
            axes.plot(select(found, method=method).accuracy, [i] * found.seed.nunique(), "o", label=label)
        axes.set(xlabel="test accuracy [%]", yticks=range(len(METHODS)), yticklabels=METHODS.values())
        axes.invert_yaxis()
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        def accuracy(method: str) -> pd.Series:
            return select(found, method=method).accuracy

        numbers = select(found, method="numbers")
        ratio = (numbers.wrong / numbers.right).mean()
        return [
            *(
                at_least(f"{METHODS[one]}: ten points above {METHODS['all']}", accuracy(one), accuracy("all"), 10.0)
                for one in ("network", "numbers")
            ),
            Claim("wrong labels weigh less than half as much as right ones", f"{ratio:.2f} of them", bool(ratio < 0.5)),
        ]


def spoiled(seed: int) -> tuple[Data, Tensor, Tensor]:
    """Return the digits, labels with a share of WRONG drawn from all classes, and the mask of wrong labels."""
    data, generator = digits(DIGITS_SIZE, seed=seed), torch.Generator().manual_seed(seed)
    right = data.train[1]
    drawn = torch.randint(10, right.shape, generator=generator)
    labels = torch.where(torch.rand(right.shape, generator=generator) < WRONG, drawn, right)
    return data, labels, labels != right


def network(data: Data) -> nn.Module:
    return nn.Sequential(Normalise(data.mean, data.std), recipe("digits").network())


def training_loss(method: str, labels: Tensor) -> tuple[Any, list[nn.Module], list]:
    """Return a method's training loss, its modules that learn as ψ, and y of each example.

    Args:
        method: a partitioned method of METHODS.
        labels: the labels with noise. They are y, for "numbers" together with the example's index.
    """
    if method == "partitioned":
        return F.cross_entropy, [], list(labels)
    if method == "numbers":
        weights = ExampleWeights(len(labels))
        return weights, [weights], list(zip(labels, torch.arange(len(labels)), strict=True))
    loss = hyper.LabelSmoothing(0.05) if method == "smoothing" else ExampleWeights()
    return loss, [loss], list(labels)


def error(output: Tensor, y: Any) -> Tensor:
    return hyper.expected_error(output, y if isinstance(y, Tensor) else y[0])


def learned(
    model: nn.Module,
    chunks: partnets.Chunks,
    data: Data,
    setting: Record,
    checkpoint: Path,
    loss: Any = F.cross_entropy,
    psi: Sequence[nn.Module] = (),
) -> Record:
    """Train, and evaluate by the test labels, which are right."""
    torch.manual_seed(setting["seed"])
    method, steps = setting["method"], setting["steps"]
    optimizer = optim.Adam(model, lr=recipe("digits").lr)
    parameters = [parameter for module in psi for parameter in module.parameters()]
    rates = torch.optim.Adam(parameters, lr=RATES.get(method, 0.05)) if psi else None
    trainer = partnets.Trainer(
        model, chunks, hyper=list(psi), loss=loss, hyper_loss=error if method in RATES else None, optimizer=optimizer,
        hyper_optimizer=rates, scheduler=cosine(optimizer, steps), batch_size=BATCH, seed=setting["seed"],
    )  # fmt: skip
    fit(trainer, steps, checkpoint)
    return {"accuracy": 100 * partnets.accuracy(model, data.test), "psi": trainer.values()}
