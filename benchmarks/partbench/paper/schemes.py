"""Appendix C: weights partitioned at random, by outputs, or nested, at equal steps and at equal arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from partbench.paper.experiment import (
    Claim,
    Experiment,
    Record,
    Table,
    at_least,
    curve,
    registered,
    rotation,
    select,
    text,
)
from partbench.paper.methods import Learner
from partbench.paper.recipes import limited, recipe

SCHEMES = {
    "weight": "at random",
    "node": "by outputs",
    "nested": "nested",
    "longer": "nested, equal arithmetic",
    "weights": "nested, shares of weights",
}
# Multiply-adds of an iteration, a step of w and one of ψ: 5/3 of a dense step with random partitions, and 1.12 with
# nested ones of .8, .1 and .1 of the units, which shrink both dimensions of a weight.
LONGER = 1.5
QUICK_STEPS = 1000
# Largest difference that counts as level, in points: two standard errors of the difference of two means of three seeds.
LEVEL = 1.5


@registered
class Schemes(Experiment):
    """Augmentations learned with random, by-output and nested partitions."""

    name = "schemes"
    paper = "Appendix C"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen, found = recipe(dataset), []
        sizes = chosen.sizes[-1:] if quick else chosen.sizes
        for seed, rotated, examples, scheme in product(seeds, (True, False), sizes, SCHEMES):
            steps = chosen.steps_for(examples, rotated)
            setting = {"dataset": dataset, "rotated": rotated, "scheme": scheme, "examples": examples}
            setting |= {"steps": round(LONGER * steps) if scheme == "longer" else steps, "seed": seed}
            found.append(limited(setting, quick, QUICK_STEPS))
        return found

    def train(self, setting: Record, checkpoint: Path) -> Record:
        scheme = "nested" if setting["scheme"] == "longer" else setting["scheme"]
        return Learner.of(setting, checkpoint).partitioned(scheme=scheme)

    def table(self, found: pd.DataFrame) -> Table:
        sizes, rows = sorted(found.examples.unique()), []
        cells = [(rotated, size) for rotated in (True, False) for size in sizes]
        for scheme, label in SCHEMES.items():
            mine = [select(found, scheme=scheme, rotated=rotated, examples=size) for rotated, size in cells]
            widths = [select(found, scheme=scheme, rotated=rotated, examples=sizes[-1]) for rotated in (True, False)]
            row = [text(cell.accuracy) for cell in mine]
            rows.append([label, *row, *(text(cell.psi.map(rotation), 0) for cell in widths), _minutes(found, scheme)])
        kinds = [f"{'rotated' if rotated else 'upright'}, {size}" for rotated, size in cells]
        return ["test accuracy, %", *kinds, "rotation ±°, rotated", "upright", "minutes a training"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(10, 4), layout="constrained")
        for axes, rotated in zip(figure.subplots(1, 2), (True, False), strict=True):
            for scheme, label in SCHEMES.items():
                mine = select(found, scheme=scheme, rotated=rotated)
                curve(axes, mine.examples, mine.accuracy, label)
            axes.set(title="rotated" if rotated else "upright", xlabel="training images", xscale="log")
            axes.set(ylabel="test accuracy [%]")
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for scheme, rotated in product(tuple(SCHEMES)[1:], (True, False)):
            both = (select(found, scheme=one, rotated=rotated).accuracy for one in (scheme, "weight"))
            what = f"{'rotated' if rotated else 'upright'}, {SCHEMES[scheme]}: level with random partitions, all sizes"
            claims.append(at_least(what, *both, margin=-LEVEL))
        return claims


def _minutes(found: pd.DataFrame, scheme: str) -> str:
    return text(select(found, scheme=scheme).seconds / 60)
