"""Table 1 and Fig. 3: augmentations learned from few images, upright and rotated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.paper.experiment import Claim, Experiment, Record, markdown, mean, select, standard_error, text, values
from benchmarks.paper.methods import Learner
from benchmarks.paper.recipes import limited, recipe
from partnets.data import load

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
        methods = QUICK if quick else [method for method in METHODS if method != "finetuned"]
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
        data = load(setting["dataset"], rotated=setting["rotated"], seed=setting["seed"])
        data = data.subset(setting["examples"], seed=setting["seed"])
        chosen = recipe(setting["dataset"], setting.get("quick", False))
        learner = Learner(chosen, data, setting["seed"], setting["steps"], checkpoint)
        return getattr(learner, setting["method"])()

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
                    errors = [standard_error(point) if len(point) > 1 else 0 for point in points]
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
        claims = []
        for size in sorted({record["examples"] for record in records}):
            found = rotations(records, "partitioned", rotated=True, examples=size)
            claims.append(Claim(f"{size} rotated: rotation ≥ {FULL:.0f}°", text(found, 0, "°"), mean(found) >= FULL))
            ours = accuracies(records, "partitioned", rotated=True, examples=size)
            for method in METHODS:
                theirs = accuracies(records, method, rotated=True, examples=size)
                if theirs and method not in NOT_BASELINES:
                    claims.append(
                        Claim(
                            f"{size} rotated: partitioned ≥ {METHODS[method]}",
                            f"{text(ours)} and {text(theirs)} %",
                            mean(ours) >= mean(theirs),
                        )
                    )
            found = rotations(records, "partitioned", rotated=False, examples=size)
            claims.append(Claim(f"{size} upright: rotation ≤ {SMALL:.0f}°", text(found, 1, "°"), mean(found) <= SMALL))
            ours = accuracies(records, "partitioned", rotated=False, examples=size)
            theirs = accuracies(records, "standard", rotated=False, examples=size)
            claims.append(
                Claim(
                    f"{size} upright: partitioned no worse than standard training",
                    f"{text(ours)} and {text(theirs)} %",
                    mean(ours) >= mean(theirs),
                )
            )
        return claims


def accuracies(records: Sequence[Record], method: str, **wanted) -> list[float]:
    """Of a method's trainings; "finetuned" are those of "validation", later."""
    if method == "finetuned":
        return values(select(records, method="validation", **wanted), "finetuned_accuracy")
    return values(select(records, method=method, **wanted), "accuracy")


def rotations(records: Sequence[Record], method: str, **wanted) -> list[float]:
    """The half-widths that a method learned, in degrees; none for one without."""
    found = select(records, method="validation" if method == "finetuned" else method, **wanted)
    return [rotation(record["psi"]) for record in found if record["psi"]]


def rotation(psi: dict[str, float]) -> float:
    """The half-width of the rotation in any parametrisation, in degrees."""
    if "rotation" in psi:
        return abs(psi["rotation"])
    return (psi["rotation_max"] - psi["rotation_min"]) / 2
