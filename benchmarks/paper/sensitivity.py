"""Fig. 5 to 8: how much the proportions of data and of weights matter, and the augmentations found with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.paper.experiment import Claim, Experiment, Record, markdown, mean, select, text, values
from benchmarks.paper.methods import Learner
from benchmarks.paper.recipes import limited, recipe

# Ratios, of 2, 3 and 4 chunks.
RATIOS = {
    2: ((1, 8), (1, 1), (8, 1)),
    3: ((1, 1, 8), (1, 1, 1), (8, 1, 1)),
    4: ((1, 1, 1, 8), (1, 1, 1, 1), (8, 1, 1, 1)),
}
QUICK_RATIOS, QUICK_STEPS = {2: ((1, 8), (8, 1))}, 60
# Of the steps that Table 1 has: with three seeds these are 324 trainings.
SHORTER = 1 / 3
SHOWN = (("accuracy", "partitioned network"), ("retrained_accuracy", "standard network with the ψ that was found"))
# Within what all proportions lie that give the first chunk and the first partition no less than the others.
SPREAD = 5.0


class Sensitivity(Experiment):
    """A grid of data's against weights' proportions; each ψ that is found also trains a standard network."""

    name = "sensitivity"
    paper = "Fig. 5 to 8"

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        chosen = recipe(dataset)
        ratios = QUICK_RATIOS if quick else RATIOS
        return [
            limited(
                {
                    "dataset": dataset,
                    "rotated": rotated,
                    "count": count,
                    "data": list(data),
                    "parameters": list(parameters),
                    "steps": round(SHORTER * chosen.steps_for(chosen.sizes[-1], rotated)),
                    "seed": seed,
                },
                quick,
                QUICK_STEPS,
            )
            for seed in seeds
            for rotated in ((True,) if quick else (True, False))
            for count, grid in ratios.items()
            for data in grid
            for parameters in grid
        ]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        learner = Learner.of(setting, checkpoint)
        augmentation = learner.recipe.augmentation()
        result = learner.partitioned(normalised(setting["data"]), normalised(setting["parameters"]), augmentation)
        retrained = learner.retrained(augmentation)
        return {**result, "retrained_accuracy": retrained["accuracy"]}

    def table(self, records: Sequence[Record]) -> str:
        header = ["images", "data", "weights", "partitioned, %", "retrained, %", "rotation ±°"]
        rows = []
        for rotated, count, data, parameters in cells(records):
            chosen = select(records, rotated=rotated, count=count, data=list(data), parameters=list(parameters))
            rows.append(
                [
                    "rotated" if rotated else "upright",
                    ":".join(map(str, data)),
                    ":".join(map(str, parameters)),
                    text(values(chosen, "accuracy")),
                    text(values(chosen, "retrained_accuracy")),
                    text([abs(record["psi"]["rotation"]) for record in chosen]),
                ]
            )
        return markdown(header, rows)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Heat maps, a row for each of the paper's four figures."""
        counts = sorted({record["count"] for record in records})
        rows = [(rotated, name, label) for name, label in SHOWN for rotated in sorted({r["rotated"] for r in records})]
        figure = Figure(figsize=(4 * len(counts), 3.6 * len(rows)), layout="constrained")
        for band, (rotated, name, label) in zip(
            figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True
        ):
            band.suptitle(f"{'rotated' if rotated else 'upright'}: {label}, test accuracy [%]")
            everything = select(records, rotated=rotated)
            limits = {"vmin": min(values(everything, name)), "vmax": max(values(everything, name))}
            for axes, count in zip(band.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
                grid = ratios(select(everything, count=count))
                heights = [
                    [mean(values(select(everything, data=list(d), parameters=list(p)), name)) for d in grid]
                    for p in grid
                ]
                axes.imshow(heights, **limits)
                for row, line in enumerate(heights):
                    for column, height in enumerate(line):
                        axes.text(
                            column,
                            row,
                            f"{height:.1f}",
                            ha="center",
                            va="center",
                            bbox={"fc": "white", "alpha": 0.6, "lw": 0},
                        )
                ticks = [":".join(map(str, ratio)) for ratio in grid]
                axes.set_xticks(range(len(grid)), ticks)
                axes.set_yticks(range(len(grid)), ticks)
                axes.set(xlabel="data", ylabel="weights")
        return figure

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        claims = []
        for rotated in sorted({record["rotated"] for record in records}):
            kind = "rotated" if rotated else "upright"
            found = {
                (count, data, parameters): mean(
                    values(
                        select(records, rotated=rotated, count=count, data=list(data), parameters=list(parameters)),
                        "accuracy",
                    )
                )
                for r, count, data, parameters in cells(records)
                if r == rotated
            }
            usual = [
                accuracy
                for (_, data, parameters), accuracy in found.items()
                if data[0] >= data[-1] and parameters[0] >= parameters[-1]
            ]
            claims.append(
                Claim(
                    f"{kind}: accuracies are alike where no later chunk or partition is larger",
                    f"{min(usual):.1f} to {max(usual):.1f} %",
                    max(usual) - min(usual) <= SPREAD,
                )
            )
            worst = min(found, key=found.get)
            claims.append(
                Claim(
                    f"{kind}: the worst has more weights than data in later partitions",
                    f"data {':'.join(map(str, worst[1]))}, weights {':'.join(map(str, worst[2]))}",
                    worst[2][-1] / sum(worst[2]) > worst[1][-1] / sum(worst[1]),
                )
            )
        return claims


def normalised(ratio: Sequence[int]) -> tuple[float, ...]:
    """Proportions that sum to 1."""
    return tuple(part / sum(ratio) for part in ratio)


def ratios(records: Sequence[Record]) -> list[tuple[int, ...]]:
    """The ratios of the data that the records have, the least first chunk first."""
    return sorted({tuple(record["data"]) for record in records}, key=lambda ratio: ratio[0] / sum(ratio))


def cells(records: Sequence[Record]) -> list[tuple[bool, int, tuple[int, ...], tuple[int, ...]]]:
    """Every cell of the grids once: rotated, count, data's ratio, weights' ratio."""
    keys = [(r["rotated"], r["count"], tuple(r["data"]), tuple(r["parameters"])) for r in records]
    return list(dict.fromkeys(keys))
