"""Why partitions learn more slowly in a federation, ψ aside: rotated digits, the augmentation known to all and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from partbench.paper.experiment import Claim, Experiment, Record, Table, curve, registered, select, text
from partbench.paper.federated import LAST, QUICK_ROUNDS, Federation, smoothed
from partnets import federated, hyper

# By which rotated digits are turned at most, in degrees.
KNOWN = 180.0
# Few: with many, all methods end alike.
ROUNDS = 100
WHOLE, FIRST, DIVIDED, TWICE = "FedAvg", "FedAvg, clients of chunk 1 alone", "partitioned", "partitioned, two epochs"


class Known(Federation):
    """A federation whose augmentation is the data's own, and stays."""

    def __init__(self, setting: Record) -> None:
        variant = setting["method"]
        divided = variant in (DIVIDED, TWICE)
        super().__init__({**setting, "method": "partitioned" if divided else "augerino"})
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
    """FedAvg and partitions with the same known augmentation; FedAvg with the examples of chunk 1 alone."""

    name = "federated-cost"
    paper = "Table 4"
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        rounds = {"rounds": QUICK_ROUNDS, "quick": True} if quick else {"rounds": ROUNDS}
        return [
            {"dataset": dataset, "rotated": True, "method": variant, "examples": 1297, "seed": seed, **rounds}
            for seed in seeds
            for variant in (WHOLE, FIRST, DIVIDED, TWICE)
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return Known(setting).run(setting["rounds"], checkpoint)

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for variant in found.method.unique():
            mine = select(found, method=variant)
            half = [_at(points, ROUNDS // 2) for points in mine.curve]
            rows.append([variant, text(pd.Series(half)), text(mine.accuracy)])
        return ["known augmentation", f"accuracy, %, after {ROUNDS // 2} rounds", "at the end"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for variant in found.method.unique():
            points = pd.concat([smoothed(one) for one in select(found, method=variant).curve], ignore_index=True)
            curve(axes, points["round"], points.accuracy, variant)
        axes.set(xlabel="round", ylabel="test accuracy [%]", title="rotated digits, augmentation known")
        axes.legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        """Which of the two explanations of the gap holds: fewer examples for most weights, or fewer local steps."""
        whole, first, divided, twice = (
            select(found, method=variant).accuracy for variant in (WHOLE, FIRST, DIVIDED, TWICE)
        )
        gap = whole.mean() - divided.mean()
        return [
            Claim(
                "at least half of the gap is that of fewer examples: FedAvg's, to clients of chunk 1 alone",
                f"{whole.mean() - first.mean():.1f} of {gap:.1f} points",
                bool(whole.mean() - first.mean() >= gap / 2),
            ),
            Claim(
                "at least half of it is that of local steps: two epochs close it",
                f"{twice.mean() - divided.mean():.1f} of {gap:.1f} points",
                bool(twice.mean() - divided.mean() >= gap / 2),
            ),
        ]


def _at(points: list[Record], number: int) -> float:
    """The accuracy that counts after so many rounds."""
    counted = [point["accuracy"] for point in points if point["round"] <= number][-LAST:]
    return sum(counted) / len(counted)
