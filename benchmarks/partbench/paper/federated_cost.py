"""Slower learning of partitions in a federation, apart from ψ: rotated digits, with a known and fixed augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from partbench.paper.experiment import Claim, Experiment, Record, Table, curve, registered, select, text
from partbench.paper.federated import QUICK_ROUNDS, Federation
from partnets import federated, hyper

# The largest rotation of rotated digits, in degrees.
KNOWN = 180.0
# Few, because all methods end alike after many.
ROUNDS = 100
MEAN_OF = 3
WHOLE, FIRST, PARTITIONED, TWICE = (
    "FedAvg",
    "FedAvg, clients of chunk 1 alone",
    "partitioned",
    "partitioned, two epochs",
)


class Known(Federation):
    """A federation with a fixed augmentation that equals the data's."""

    def __init__(self, setting: Record) -> None:
        variant = setting["method"]
        partitioned = variant in (PARTITIONED, TWICE)
        super().__init__({**setting, "method": "partitioned" if partitioned else "augerino"})
        self.client, self.epochs = federated.Client, 2 if variant == TWICE else 1
        if variant == FIRST:
            chunks = federated.assign(self.of.clients, self.of.proportions, self.seed)
            self.parts = [part for part, chunk in zip(self.parts, chunks, strict=True) if chunk == 1]
            self.of = replace(self.of, clients=len(self.parts))

    def make_model(self) -> tuple[nn.Module, list[nn.Module]]:
        model, (augmentation, *_) = super().make_model()
        path = next(path for path, module in model.named_modules() if module is augmentation)
        hyper.assign(model, {f"{path}.rotation": KNOWN})
        augmentation.requires_grad_(False)
        return model, []


@registered
class FederatedCost(Experiment):
    """FedAvg and partitions with the same known augmentation, and FedAvg with the clients of chunk 1 alone."""

    name = "federated-cost"
    paper = "Table 4"
    partial_results = True
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        rounds = {"rounds": QUICK_ROUNDS, "quick": True} if quick else {"rounds": ROUNDS}
        return [
            {"dataset": dataset, "rotated": True, "method": variant, "examples": 1297, "seed": seed, **rounds}
            for seed in seeds
            for variant in (WHOLE, FIRST, PARTITIONED, TWICE)
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return Known(setting).run(setting["rounds"], checkpoint)

    def table(self, found: pd.DataFrame) -> Table:
        numbers = ROUNDS // 2, ROUNDS
        rows = [[each, *(text(_at(found, each, number)) for number in numbers)] for each in found.method.unique()]
        return ["known augmentation", *(f"accuracy, %, after {number} rounds" for number in numbers)], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for variant in found.method.unique():
            points = pd.concat([pd.DataFrame(one) for one in select(found, method=variant).curve], ignore_index=True)
            curve(axes, points["round"], points.accuracy, variant)
        axes.set(xlabel="round", ylabel="test accuracy [%]", title="rotated digits, augmentation known")
        axes.legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        """Return claims on two explanations of the gap: fewer examples for most weights, and fewer local steps."""
        whole, first, partitioned, twice = (
            _at(found, each, ROUNDS).mean() for each in (WHOLE, FIRST, PARTITIONED, TWICE)
        )
        gap = whole - partitioned
        return [
            Claim(
                f"{claim} at least half of FedAvg's lead", f"{part:.1f} of {gap:.1f} points", bool(part >= gap / 2 > 0)
            )
            for claim, part in (
                ("the examples that most weights do not see explain", whole - first),
                ("twice the local steps make up for", twice - partitioned),
            )
        ]


def _at(found: pd.DataFrame, variant: str, number: int) -> pd.Series:
    """Return each seed's mean accuracy over the last MEAN_OF evaluations up to a round."""
    curves = select(found, method=variant).curve
    seen = ([point["accuracy"] for point in points if point["round"] <= number][-MEAN_OF:] for points in curves)
    return pd.Series([sum(each) / len(each) for each in seen])
