"""Fig. 5 to 8: the effect of the proportions of data and of weights, and the augmentations found with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from partbench.paper.experiment import Claim, Experiment, Record, Table, registered, rotation, select, text
from partbench.paper.methods import Learner
from partbench.paper.recipes import limited, recipe

# Ratios for 2, 3 and 4 chunks.
RATIOS = {
    2: ((1, 8), (1, 1), (8, 1)),
    3: ((1, 1, 8), (1, 1, 1), (8, 1, 1)),
    4: ((1, 1, 1, 8), (1, 1, 1, 1), (8, 1, 1, 1)),
}
QUICK_RATIOS, QUICK_STEPS = {2: ((1, 8), (8, 1))}, 60
# Share of Table 1's steps, because three seeds make 324 trainings.
SHORTER = 1 / 3
SHOWN = (("accuracy", "partitioned network"), ("retrained_accuracy", "standard network with the ψ that was found"))
# Largest spread, in points, over proportions that give the first chunk and the first partition no less than the others.
SPREAD = 5.0
CELL = ["rotated", "count", "data", "parameters"]


@registered
class Sensitivity(Experiment):
    """A grid of proportions of data and of weights; each ψ that is found also trains a standard network."""

    name = "sensitivity"
    paper = "Fig. 5 to 8"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen, found = recipe(dataset), []
        ratios = QUICK_RATIOS if quick else RATIOS
        grids = [(count, *cell) for count, grid in ratios.items() for cell in product(grid, grid)]
        for seed, rotated, (count, data, parameters) in product(seeds, (True,) if quick else (True, False), grids):
            steps = round(SHORTER * chosen.steps_for(chosen.sizes[-1], rotated))
            setting = {"dataset": dataset, "rotated": rotated, "count": count, "data": list(data)}
            setting |= {"parameters": list(parameters), "steps": steps, "seed": seed}
            found.append(limited(setting, quick, QUICK_STEPS))
        return found

    def train(self, setting: Record, checkpoint: Path) -> Record:
        learner = Learner.of(setting, checkpoint)
        augmentation = learner.recipe.augmentation()
        proportions = ([part / sum(setting[name]) for part in setting[name]] for name in ("data", "parameters"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the partitions have .* the chunks")  # such proportions are tried here
            result = learner.partitioned(*proportions, augmentation)
        return {**result, "retrained_accuracy": learner.retrained(augmentation)["accuracy"]}

    def table(self, found: pd.DataFrame) -> Table:
        rows = [
            [
                *("rotated" if rotated else "upright", named(data), named(parameters)),
                *(text(mine.accuracy), text(mine.retrained_accuracy), text(mine.psi.map(rotation))),
            ]
            for (rotated, _, data, parameters), mine in by_cell(found)
        ]
        return ["images", "data", "weights", "partitioned, %", "retrained, %", "rotation ±°"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot heat maps, with a row for each of the paper's four figures."""
        counts = sorted(found["count"].unique())
        rows = [(rotated, name, label) for name, label in SHOWN for rotated in sorted(found.rotated.unique())]
        figure = Figure(figsize=(4 * len(counts), 3.6 * len(rows)), layout="constrained")
        bands = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for band, (rotated, name, label) in zip(bands, rows, strict=True):
            band.suptitle(f"{'rotated' if rotated else 'upright'}: {label}, test accuracy [%]")
            mine = select(found, rotated=rotated)
            for axes, count in zip(band.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
                means = {key[2:]: cell[name].mean() for key, cell in by_cell(select(mine, count=count))}
                grid = sorted({data for data, _ in means}, key=lambda ratio: ratio[0] / sum(ratio))
                heights = [[means[data, parameters] for data in grid] for parameters in grid]
                axes.imshow(heights, vmin=mine[name].min(), vmax=mine[name].max())
                for row, line in enumerate(heights):
                    for column, height in enumerate(line):
                        box = {"fc": "white", "alpha": 0.6, "lw": 0}
                        axes.text(column, row, f"{height:.1f}", ha="center", va="center", bbox=box)
                axes.set_xticks(range(len(grid)), map(named, grid))
                axes.set_yticks(range(len(grid)), map(named, grid))
                axes.set(xlabel="data", ylabel="weights")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for rotated in sorted(found.rotated.unique()):
            kind = "rotated" if rotated else "upright"
            means = {key[2:]: mine.accuracy.mean() for key, mine in by_cell(select(found, rotated=rotated))}
            usual = [a for (data, weights), a in means.items() if data[0] >= data[-1] and weights[0] >= weights[-1]]
            what = f"{kind}: accuracies are alike where no later chunk or partition is larger"
            numbers = f"{min(usual):.1f} to {max(usual):.1f} %"
            claims.append(Claim(what, numbers, max(usual) - min(usual) <= SPREAD))
            data, weights = min(means, key=means.get)
            what = f"{kind}: the worst has more weights than data in later partitions"
            holds = weights[-1] / sum(weights) > data[-1] / sum(data)
            claims.append(Claim(what, f"data {named(data)}, weights {named(weights)}", holds))
        return claims


def by_cell(found: pd.DataFrame):
    """Group the results by cell: rotated, count, the data's ratio and the weights' ratio."""
    return found.assign(data=found.data.map(tuple), parameters=found.parameters.map(tuple)).groupby(CELL, sort=False)


def named(ratio: Sequence[int]) -> str:
    return ":".join(map(str, ratio))
