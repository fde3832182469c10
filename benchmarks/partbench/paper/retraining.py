"""Fig. 9, Appendix G: the augmentation that one run finds, against many random ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from partbench.paper.experiment import Claim, Experiment, Record, Table, registered, rotation, select, text
from partbench.paper.methods import SPACE, Learner
from partbench.paper.recipes import limited, recipe
from partnets import hyper

# The paper has 200.
TRIALS, QUICK_TRIALS, QUICK_STEPS = 50, 2, 100


@registered
class Retraining(Experiment):
    """Standard networks on rotated images, with fixed augmentations and with those that one run found."""

    name = "retraining"
    paper = "Fig. 9, Appendix G"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen = recipe(dataset)
        # On digits, half of Table 1's steps for rotated images, because there are many trainings.
        common = {"dataset": dataset, "steps": chosen.steps_for(chosen.sizes[-1], rotated=False)}
        common = limited(common, quick, QUICK_STEPS)
        trials = QUICK_TRIALS if quick else TRIALS
        return [{**common, "method": "found", "trial": 0, "seed": seed} for seed in seeds] + [
            {**common, "method": "random", "trial": trial, "seed": seeds[trial % len(seeds)]} for trial in range(trials)
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        learner = Learner.of(setting, checkpoint)
        if setting["method"] == "random":
            generator = torch.Generator().manual_seed(setting["trial"])
            draws = torch.rand(len(SPACE), generator=generator).tolist()
            ranges = zip(draws, SPACE.items(), strict=True)
            psi = {name: low + draw * (high - low) for draw, (name, (low, high)) in ranges}
            return {**learner.retrained(hyper.Affine(**psi)), "psi": psi}
        augmentation = learner.recipe.augmentation()
        found = learner.partitioned(augmentation=augmentation)
        retrained = learner.retrained(augmentation)
        return {**retrained, "psi": found["psi"], "partitioned_accuracy": found["accuracy"]}

    def table(self, found: pd.DataFrame) -> Table:
        ours, random = select(found, method="found"), ranked(found)

        def row(label: str, runs: str, accuracy: str, of: pd.DataFrame) -> list[str]:
            return [label, runs, accuracy, text(of.psi.map(rotation), 0) if len(of) else ""]

        best, median, worst = (f"{random.accuracy.iloc[i]:.1f}" for i in (0, len(random) // 2, -1))
        rows = [
            row("partitioned network", "1", text(ours.partitioned_accuracy), ours),
            row("standard, with the ψ that it found", "1", text(ours.accuracy), ours),
            row("standard, best random ψ", str(len(random)), best, random[:1]),
            row("standard, median random ψ", "", median, random[:0]),
            row("standard, worst random ψ", "", worst, random[-1:]),
        ]
        return ["", "runs", "test accuracy, %", "rotation ±°"], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot test accuracy over each half-width, like the paper's projections."""
        ours, random = select(found, method="found"), select(found, method="random")
        figure = Figure(figsize=(3 * len(SPACE), 3), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(SPACE), sharey=True), SPACE, strict=True):
            for mine, key, style, label in (
                (random, "accuracy", "k+", "standard, random ψ"),
                (ours, "partitioned_accuracy", "C0o", "partitioned"),
                (ours, "accuracy", "C1o", "standard, its ψ"),
            ):
                axes.plot([psi[name] for psi in mine.psi], mine[key], style, label=label)
            axes.set(xlabel=name)
        figure.axes[0].set(ylabel="test accuracy [%]")
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        ours, random = select(found, method="found").accuracy, ranked(found).accuracy
        error, best = ours.sem() if len(ours) > 1 else 0.0, random.iloc[0]
        what = "the ψ that one run found trains within a standard error of the best random one"
        numbers = f"{text(ours)} and {best:.1f} %; {(random > ours.mean()).sum()} of {len(random)} are better"
        return [Claim(what, numbers, bool(ours.mean() + error >= best))]


def ranked(found: pd.DataFrame) -> pd.DataFrame:
    """Return the random trials, best first."""
    return select(found, method="random").sort_values("accuracy", ascending=False, kind="stable")
