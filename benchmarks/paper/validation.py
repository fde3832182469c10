"""Table 2: the same chunks for partitioned networks and for validation-set optimisation, in five proportions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.paper.experiment import Claim, Experiment, Record, error_bars, markdown, mean, select, text, values
from benchmarks.paper.methods import Learner
from benchmarks.paper.recipes import limited, recipe

# The share of D_1; the rest is D_2, or the validation set.
TRAINING = (0.3, 0.5, 0.7, 0.8, 0.9)
QUICK_TRAINING, QUICK_STEPS = (0.5,), 100
ROWS = (
    ("partitioned", "accuracy", "partitioned"),
    ("validation", "accuracy", "validation-set optimisation"),
    ("validation", "finetuned_accuracy", "+ finetuning"),
)
# The steps, of those that Table 1 has for so many examples: the paper's are 80 000 and 20 000 (Appendix I.4).
LONGER = 4
# Table 2 has 20 000 of CIFAR-10's images, Fig. 6 all of MNIST's.
EXAMPLES = {"digits": 1297, "mnist": 60000, "cifar10": 20000, "tiny-imagenet": 100000}


class Validation(Experiment):
    """Augmentations on rotated images, learned on chunks of which one is unseen."""

    name = "validation"
    paper = "Table 2"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        examples = EXAMPLES[dataset]
        return [
            limited(
                {
                    "dataset": dataset,
                    "method": method,
                    "training": training,
                    "examples": examples,
                    "steps": LONGER * recipe(dataset).steps_for(examples, rotated=False),
                    "seed": seed,
                },
                quick,
                QUICK_STEPS,
            )
            for seed in seeds
            for training in (QUICK_TRAINING if quick else TRAINING)
            for method in ("partitioned", "validation")
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        learner, training = Learner.of(setting, checkpoint), setting["training"]
        if setting["method"] == "partitioned":
            return learner.partitioned((training, 1 - training))
        return learner.validation(1 - training)

    def table(self, records: Sequence[Record]) -> str:
        header = ["test accuracy, %", *(f"{t:.1f}, {1 - t:.1f}" for t in shares(records))]
        rows = [
            [label, *(text(values(select(records, method=method, training=t), name)) for t in shares(records))]
            for method, name, label in ROWS
        ]
        return markdown(header, rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for method, name, label in ROWS:
            points = [values(select(records, method=method, training=t), name) for t in shares(records)]
            errors = error_bars(points)
            axes.errorbar(shares(records), [mean(point) for point in points], errors, label=label, marker=".")
        axes.set(xlabel="share of the first chunk", ylabel="test accuracy [%]", xticks=shares(records))
        axes.legend()
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        claims = []
        for training in shares(records):
            ours = values(select(records, method="partitioned", training=training), "accuracy")
            theirs = values(select(records, method="validation", training=training), "accuracy")
            claims.append(
                Claim(
                    f"{training:.1f}, {1 - training:.1f}: partitioned ≥ validation-set optimisation without finetuning",
                    f"{text(ours)} and {text(theirs)} %",
                    mean(ours) >= mean(theirs),
                )
            )
        return claims


def shares(records: Sequence[Record]) -> list[float]:
    """The shares of D_1 that the records have."""
    return sorted({record["training"] for record in records})
