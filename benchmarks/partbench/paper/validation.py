"""Table 2: the same chunks for partitioned networks and for validation-set optimisation, in five proportions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from partbench.paper.experiment import Claim, Experiment, Record, Table, at_least, curve, registered, select, text
from partbench.paper.methods import Learner
from partbench.paper.recipes import limited, recipe
from partbench.paper.schemes import LEVEL, SCHEMES

# The share of D_1; the rest is D_2, or the validation set.
TRAINING = (0.3, 0.5, 0.7, 0.8, 0.9)
QUICK_TRAINING, QUICK_STEPS, QUICK_METHODS = (0.5,), 100, ("partitioned", "validation")
# The partitioned methods and their schemes; Appendix C has all but the first.
PARTITIONED = {"partitioned": "weight", "node": "node", "nested": "nested", "longer": "nested"}
OTHERS = tuple(PARTITIONED)[1:]
ROWS = (
    ("partitioned", "accuracy", "partitioned"),
    *((method, "accuracy", SCHEMES[method]) for method in OTHERS),
    ("validation", "accuracy", "validation-set optimisation"),
    ("validation", "finetuned_accuracy", "+ finetuning"),
)
# Factor of Table 1's steps for as many examples: the paper's steps are 80 000 and 20 000 (Appendix I.4).
LONGER = 4
# Table 2 has 20 000 of CIFAR-10's images, Fig. 6 all of MNIST's.
EXAMPLES = {"digits": 1297, "mnist": 60000, "cifar10": 20000, "tiny-imagenet": 100000}


@registered
class Validation(Experiment):
    """Augmentations on rotated images, learned on chunks of which one is unseen."""

    name = "validation"
    paper = "Table 2"
    partial_results = True

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        examples, found = EXAMPLES[dataset], []
        steps = LONGER * recipe(dataset).steps_for(examples, rotated=False)
        shares = QUICK_TRAINING if quick else TRAINING
        methods = QUICK_METHODS if quick else (*PARTITIONED, "validation")
        for seed, training, method in product(seeds, shares, methods):
            setting = {"dataset": dataset, "method": method, "training": training, "examples": examples}
            enough = round(steps * longer(training)) if method == "longer" else steps
            found.append(limited({**setting, "steps": enough, "seed": seed}, quick, QUICK_STEPS))
        return found

    def train(self, setting: Record, checkpoint: Path) -> Record:
        learner, training = Learner.of(setting, checkpoint), setting["training"]
        if setting["method"] == "validation":
            return learner.validation(1 - training)
        return learner.partitioned((training, 1 - training), scheme=PARTITIONED[setting["method"]])

    def table(self, found: pd.DataFrame) -> Table:
        shares = sorted(found.training.unique())
        rows = [
            [label, *(text(select(found, method=m, training=t)[y]) for t in shares)] for m, y, label in _rows(found)
        ]
        return ["test accuracy, %", *(f"{t:.1f}, {1 - t:.1f}" for t in shares)], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for method, name, label in _rows(found):
            mine = select(found, method=method)
            curve(axes, mine.training, mine[name], label, linewidth=1.5)
        axes.set(xlabel="share of the first chunk", ylabel="test accuracy [%]", xticks=found.training.unique())
        axes.legend()
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims, what = [], "partitioned ≥ validation-set optimisation without finetuning"
        for training in sorted(found.training.unique()):
            both = [
                select(found, method=method, training=training).accuracy for method in ("partitioned", "validation")
            ]
            claims.append(at_least(f"{training:.1f}, {1 - training:.1f}: {what}", *both))
        for method in OTHERS:
            if (found.method == method).any():
                both = (select(found, method=one).accuracy for one in (method, "partitioned"))
                claims.append(at_least(f"{SCHEMES[method]}: level with random partitions", *both, margin=-LEVEL))
        return claims


def _rows(found: pd.DataFrame) -> list[tuple[str, str, str]]:
    return [row for row in ROWS if (found.method == row[0]).any()]


def longer(first: float) -> float:
    """Return how many steps with nested partitions have the arithmetic of one with random partitions.

    `first` is the first partition's share of the units. An iteration is a step of w_k, with three products, and one of
    ψ, with two; with random partitions, each uses all weights. A nested layer shrinks in both dimensions; the last
    product of w_2 leaves out the part of w_1.
    """
    of_first = first**2
    weights = first * 3 * of_first + (1 - first) * (3 - of_first)
    return (3 + 2) / (weights + 2 * of_first)
