"""Table 1 and Fig. 3: augmentations learned from few images, upright and rotated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.paper.experiment import Claim, Experiment, Record, error_bars, markdown, mean, select, text, values
from benchmarks.paper.methods import Learner
from benchmarks.paper.recipes import limited, recipe

METHODS = {
    "standard": "standard training",
    "validation": "validation set",
    "finetuned": "validation set, finetuned",
    "random_search": "random search",
    "tpe": "TPE",
    "augerino": "Augerino, safe",
    "ensemble": "partitioned (ens.)",
    "partitioned": "partitioned",
}
# Part of the trainings of "validation".
FINETUNED = "finetuned"
# The ensemble is what the method approximates, not what it should beat.
NOT_BASELINES = ("ensemble", "partitioned")
QUICK = ("standard", "partitioned")
# Enough to learn a rotation.
QUICK_STEPS = 1000
# Half-widths above and below which a rotation counts as learned, in degrees.
FULL, SMALL = 90.0, 20.0


class Augmentation(Experiment):
    """Every method on upright and on rotated images."""

    name = "augmentation"
    paper = "Table 1, Fig. 3"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen = recipe(dataset)
        methods = QUICK if quick else [method for method in METHODS if method != FINETUNED]
        return [
            limited(
                {
                    "dataset": dataset,
                    "rotated": rotated,
                    "method": method,
                    "examples": examples,
                    "steps": chosen.steps_for(examples, rotated),
                    "seed": seed,
                },
                quick,
                QUICK_STEPS,
            )
            for seed in seeds
            for rotated in (True, False)
            for examples in (chosen.sizes[-1:] if quick else chosen.sizes)
            for method in methods
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return getattr(Learner.of(setting, checkpoint), setting["method"])()

    def table(self, records: Sequence[Record]) -> str:
        """Test accuracies, and the rotation that was learned."""
        sizes = sorted({record["examples"] for record in records})
        header = [
            "test accuracy, %",
            *(f"{kind}, {size}" for kind in ("rotated", "upright") for size in sizes),
            "rotation ±°, rotated",
            "upright",
        ]
        rows = []
        for method, label in METHODS.items():
            if not accuracies(records, method):
                continue
            cells = [
                text(accuracies(records, method, rotated=rotated, examples=size))
                for rotated in (True, False)
                for size in sizes
            ]
            for rotated in (True, False):
                found = rotations(records, method, rotated=rotated, examples=sizes[-1])
                cells.append(text(found, 0 if rotated else 1) if found else "")
            rows.append([label, *cells])
        return markdown(header, rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Accuracy over the number of examples, as Fig. 3."""
        sizes = sorted({record["examples"] for record in records})
        figure = Figure(figsize=(10, 4), layout="constrained")
        for axes, rotated in zip(figure.subplots(1, 2), (True, False), strict=True):
            for method, label in METHODS.items():
                points = [accuracies(records, method, rotated=rotated, examples=size) for size in sizes]
                if all(points):
                    bold = {"linewidth": 2.5, "color": "black"} if method == "partitioned" else {"linewidth": 1}
                    errors = error_bars(points)
                    axes.errorbar(sizes, [mean(point) for point in points], errors, label=label, marker=".", **bold)
            axes.set(
                title="rotated" if rotated else "upright",
                xlabel="training images",
                ylabel="test accuracy [%]",
                xscale="log",
            )
            axes.set_xticks(sizes, sizes, minor=False)
            axes.minorticks_off()
        figure.axes[0].legend(fontsize="small")
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        sizes = sorted({record["examples"] for record in records})
        return [claim for size in sizes for claim in (*_rotated(records, size), *_upright(records, size))]


def _rotated(records: Sequence[Record], size: int) -> list[Claim]:
    """What learned augmentations must do for rotated images."""
    wanted = {"rotated": True, "examples": size}
    found, ours = rotations(records, "partitioned", **wanted), accuracies(records, "partitioned", **wanted)
    claims = [Claim(f"{size} rotated, partitioned: rotation ≥ {FULL:.0f}°", text(found, 0, "°"), mean(found) >= FULL)]
    for method, label in METHODS.items():
        theirs = accuracies(records, method, **wanted)
        if theirs and method not in NOT_BASELINES:
            both = f"{text(ours)} and {text(theirs)} %"
            claims.append(Claim(f"{size} rotated, partitioned ≥ {label}", both, mean(ours) >= mean(theirs)))
    return claims


def _upright(records: Sequence[Record], size: int) -> list[Claim]:
    """What they must not do to upright ones."""
    wanted = {"rotated": False, "examples": size}
    found, ours = rotations(records, "partitioned", **wanted), accuracies(records, "partitioned", **wanted)
    theirs = accuracies(records, "standard", **wanted)
    both = f"{text(ours)} and {text(theirs)} %"
    return [
        Claim(f"{size} upright, partitioned: rotation ≤ {SMALL:.0f}°", text(found, 1, "°"), mean(found) <= SMALL),
        Claim(f"{size} upright, partitioned ≥ standard training", both, mean(ours) >= mean(theirs)),
    ]


def trainings(records: Sequence[Record], method: str, **wanted) -> list[Record]:
    """The records of a method."""
    if method != FINETUNED:
        return select(records, method=method, **wanted)
    found = select(records, method="validation", **wanted)
    return [{**record, "accuracy": record["finetuned_accuracy"]} for record in found]


def accuracies(records: Sequence[Record], method: str, **wanted) -> list[float]:
    """Of a method's trainings, in percent."""
    return values(trainings(records, method, **wanted), "accuracy")


def rotations(records: Sequence[Record], method: str, **wanted) -> list[float]:
    """The half-widths that a method learned, in degrees; none for one without."""
    return [rotation(record["psi"]) for record in trainings(records, method, **wanted) if record["psi"]]


def rotation(psi: dict[str, float]) -> float:
    """The half-width of the rotation in any parametrisation, in degrees."""
    if "rotation" in psi:
        return abs(psi["rotation"])
    return (psi["rotation_max"] - psi["rotation_min"]) / 2
