"""Fig. 9, Appendix G: the augmentation that one run finds, against many that are drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.paper.experiment import Claim, Experiment, Record, markdown, mean, select, standard_error, text, values
from benchmarks.paper.methods import SPACE, Learner
from benchmarks.paper.recipes import limited, recipe
from partnets import hyper

# The paper has 200.
TRIALS, QUICK_TRIALS, QUICK_STEPS = 50, 2, 100


class Retraining(Experiment):
    """Standard networks on rotated images, with augmentations that stay as they are."""

    name = "retraining"
    paper = "Fig. 9, Appendix G"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen = recipe(dataset)
        # On digits, half of what Table 1 has for rotated images: there are many trainings.
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
            psi = {
                name: low + draw * (high - low) for draw, (name, (low, high)) in zip(draws, SPACE.items(), strict=True)
            }
            return {**learner.retrained(hyper.Affine(**psi)), "psi": psi}
        augmentation = learner.recipe.augmentation()
        found = learner.partitioned(augmentation=augmentation)
        retrained = learner.retrained(augmentation)
        return {**retrained, "psi": found["psi"], "partitioned_accuracy": found["accuracy"]}

    def table(self, records: Sequence[Record]) -> str:
        found, random = select(records, method="found"), ranked(records)
        rows = [
            ["partitioned network", "1", text(values(found, "partitioned_accuracy")), rotations(found)],
            ["standard, with the ψ that it found", "1", text(values(found, "accuracy")), rotations(found)],
            ["standard, best random ψ", str(len(random)), f"{random[0]['accuracy']:.1f}", rotations(random[:1])],
            ["standard, median random ψ", "", f"{random[len(random) // 2]['accuracy']:.1f}", ""],
            ["standard, worst random ψ", "", f"{random[-1]['accuracy']:.1f}", rotations(random[-1:])],
        ]
        return markdown(["", "runs", "test accuracy, %", "rotation ±°"], rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Test accuracy over each half-width, as the paper's projections."""
        names = list(SPACE)
        figure = Figure(figsize=(3 * len(names), 3), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
            for chosen, key, style, label in (
                (select(records, method="random"), "accuracy", "k+", "standard, random ψ"),
                (select(records, method="found"), "partitioned_accuracy", "C0o", "partitioned"),
                (select(records, method="found"), "accuracy", "C1o", "standard, its ψ"),
            ):
                axes.plot([record["psi"][name] for record in chosen], values(chosen, key), style, label=label)
            axes.set(xlabel=name)
        figure.axes[0].set(ylabel="test accuracy [%]")
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        found, random = values(select(records, method="found"), "accuracy"), values(ranked(records), "accuracy")
        error = standard_error(found) if len(found) > 1 else 0.0
        better = sum(accuracy > mean(found) for accuracy in random)
        return [
            Claim(
                "the ψ that one run found trains within a standard error of the best random one",
                f"{text(found)} and {random[0]:.1f} %; {better} of {len(random)} are better",
                mean(found) + error >= random[0],
            )
        ]


def ranked(records: Sequence[Record]) -> list[Record]:
    """The random trials, best first."""
    return sorted(select(records, method="random"), key=lambda record: record["accuracy"], reverse=True)


def rotations(records: Sequence[Record]) -> str:
    """Their half-widths of rotation."""
    return text([abs(record["psi"]["rotation"]) for record in records], 0)
