"""Table 1 and Fig. 3: augmentations learned from few images, upright and rotated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from partbench.paper.experiment import (
    Claim,
    Experiment,
    Record,
    Table,
    curve,
    registered,
    rotation,
    select,
    text,
)
from partbench.paper.methods import Learner
from partbench.paper.recipes import FOR_PROCESSORS, limited, recipe

METHODS = {
    "standard": "standard training",
    "validation": "validation set",
    "finetuned": "validation set, finetuned",
    "random_search": "random search",
    "tpe": "TPE",
    "augerino": "Augerino, safe",
    "last_layer": "last-layer marginal likelihood",
    "longer": "standard training, twice the steps",
    "known": "the true rotation, known",
    "validation_retraining": "validation set, then retrained",
    "ensemble": "partitioned (ens.)",
    "partitioned": "partitioned",
    "partitioned_longer": "partitioned, twice the steps",
    "scalars_first": "partitioned, FixUp's scalars in partition 1",
    "nested": "partitioned, nested",
    "one_pass": "partitioned, one pass",
    "retraining": "partitioned, then retrained",
    "tune": "partnets.tune",
    "tune_averaged": "partnets.tune, averaged over 8 copies",
}
BASELINES = ("standard", "validation", "finetuned", "random_search", "tpe", "augerino", "last_layer", "longer")
# Each of these is compared with all BASELINES.
OURS = ("partitioned", "partitioned_longer", "retraining", "tune_averaged")
# Results that are part of another method's trainings: that method, and their prefix in its records.
PARTS = {"finetuned": ("validation", "finetuned"), "tune_averaged": ("tune", "averaged")}
QUICK = ("standard", "partitioned")
# For data sets with trainings of minutes; the paper has the last layer's likelihood and the ensemble on MNIST only.
LONG = ("standard", "validation", "tpe", "augerino", "partitioned", "tune", "known")
NOT_OF_DIGITS = {*PARTS, "partitioned_longer", "scalars_first", "nested", "one_pass", "tune", "known"}
OF_DATASET = {
    "digits": [name for name in METHODS if name not in NOT_OF_DIGITS],
    "mnist-cpu": [*LONG, "last_layer", "ensemble", "nested", "one_pass"],
    "cifar10-cpu": [*LONG, "longer", "partitioned_longer", "scalars_first"],
}
# Enough steps to learn a rotation.
QUICK_STEPS = 1000
# Half-widths above and below which a rotation counts as learned, in degrees.
FULL, SMALL = 90.0, 20.0


@registered
class Augmentation(Experiment):
    """Augmentations that each method learns on upright and on rotated images."""

    name = "augmentation"
    paper = "Table 1, Fig. 3"
    partial_results = True
    datasets = (*Experiment.datasets, *FOR_PROCESSORS)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        methods = QUICK if quick else OF_DATASET.get(dataset, [each for each in METHODS if each not in PARTS])
        settings = in_all_sizes(dataset, methods, seeds, quick, QUICK_STEPS)
        return [one for one in settings if one["rotated"] or one["method"] != "known"]

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return getattr(Learner.of(setting, checkpoint), setting["method"])()

    def table(self, found: pd.DataFrame) -> Table:
        """Return test accuracies, learned rotations and test losses."""
        return tabled(with_parts(found), METHODS, "rotation, loss in nats", _shown)

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot accuracy over the number of examples, as in Fig. 3."""
        return draw_sizes(with_parts(found), METHODS, "partitioned")

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        """Return claims about the learned rotation, and about the accuracy compared with each other method."""
        found, claims = with_parts(found), []
        present = [method for method in METHODS if not select(found, method=method).empty]
        if "partitioned" in present:
            kinds = sorted(select(found, method="partitioned").rotated.unique(), reverse=True)
            claims += [_rotation_claim(found, "partitioned", rotated) for rotated in kinds]
        others = [method for method in BASELINES if method in present]
        return claims + [
            in_most_cells(found, ours, other, METHODS) for ours in OURS if ours in present for other in others
        ]


def in_all_sizes(
    dataset: str, methods: Sequence[str], seeds: Sequence[int], quick: bool, steps: int, sizes: Sequence[int] = ()
) -> list[Record]:
    """Return settings of methods on upright and rotated images of all sizes; if quick, of one, with at most `steps`."""
    chosen, found = recipe(dataset), []
    sizes = sizes or (chosen.sizes[-1:] if quick else chosen.sizes)
    for seed, rotated, examples, method in product(seeds, (True, False), sizes, methods):
        setting = {"dataset": dataset, "rotated": rotated, "method": method, "examples": examples}
        setting |= {"steps": chosen.steps_for(examples, rotated), "seed": seed}
        found.append(limited(setting, quick, steps))
    return found


def tabled(
    found: pd.DataFrame, labels: Mapping[str, str], what: str, shown: Callable[[pd.DataFrame], list[str]]
) -> Table:
    """Return a table with a row for each method and a column for each kind and number of images: accuracy, `shown`."""

    def cell_text(cell: pd.DataFrame) -> str:
        parts = ", ".join(shown(cell))
        return f"{text(cell.accuracy)} ({parts})" if parts else text(cell.accuracy)

    columns, rows = list(product((True, False), sorted(found.examples.unique()))), []
    for method, label in labels.items():
        cells = [select(found, method=method, rotated=rotated, examples=size) for rotated, size in columns]
        if all(cell.empty for cell in cells):
            continue
        rows.append([label, *(cell_text(cell) if len(cell) else "" for cell in cells)])
    kinds = [f"{'rotated' if rotated else 'upright'}, {size}" for rotated, size in columns]
    return [f"test accuracy, % ({what})", *kinds], rows


def draw_sizes(found: pd.DataFrame, labels: Mapping[str, str], bold: str) -> Figure:
    """Plot accuracies over the number of training images, with one method in bold."""
    sizes, figure = sorted(found.examples.unique()), Figure(figsize=(12, 4), layout="constrained")
    present = [method for method in labels if not select(found, method=method).empty]
    styles = {method: {"color": colour} for method, colour in zip(present, colormaps["tab20"].colors, strict=False)}
    styles[bold] = {"linewidth": 2.5, "color": "black"}
    for axes, rotated in zip(figure.subplots(1, 2), (True, False), strict=True):
        for method in present:
            mine = select(found, method=method, rotated=rotated)
            if not mine.empty:
                curve(axes, mine.examples, mine.accuracy, labels[method], **styles[method])
        axes.set(title="rotated" if rotated else "upright", xlabel="training images", xscale="log")
        axes.set(ylabel="test accuracy [%]")
        axes.set_xticks(sizes, sizes, minor=False)
        axes.minorticks_off()
    shown = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize="small")
    return figure


def _shown(cell: pd.DataFrame) -> list[str]:
    """Return the half-width of the rotation, if the method learns one, and the test loss."""
    widths, losses = rotations(cell), cell.loss.dropna()
    shown = [text(widths.abs(), 0, "°")] if len(widths) else []
    return shown + [f"{losses.mean():.2f}"] * (len(losses) > 0)


def in_most_cells(found: pd.DataFrame, ours: str, other: str, labels: Mapping[str, str]) -> Claim:
    """Compare the mean accuracies of two methods in each cell (kind and number of images), over the seeds of both.

    The claim holds if the first method is at least as accurate as the other in most cells.
    """
    seeds = found.pivot_table("accuracy", ["rotated", "examples", "seed"], "method")[[ours, other]].dropna()
    cells = seeds.groupby(["rotated", "examples"]).mean()
    lost = cells[cells[ours] < cells[other]]
    names = [
        f"{'rotated' if rotated else 'upright'} {size} ({a:.1f}, {b:.1f})"
        for (rotated, size), a, b in lost.itertuples()
    ]
    found_text = f"{len(cells) - len(lost)} of {len(cells)} cells" + (f"; not {', '.join(names)}" if names else "")
    return Claim(f"{labels[ours]} ≥ {labels[other]} in most cells", found_text, 2 * len(lost) < len(cells))


def _rotation_claim(found: pd.DataFrame, method: str, rotated: bool) -> Claim:
    """Check that all trainings of a method learn a large rotation on rotated images, or a small one on upright ones."""
    mine = select(found, method=method, rotated=rotated)
    widths = rotations(mine)
    by_size = ", ".join(f"{size}: {text(cell, 0, '°')}" for size, cell in widths.groupby(mine.examples))
    least, most = (FULL, math.inf) if rotated else (0.0, SMALL)
    bound = f"rotated: rotations of {FULL:.0f}° and more" if rotated else f"upright: rotations of at most {SMALL:.0f}°"
    return Claim(f"{METHODS[method]}, {bound}", by_size, bool(widths.between(least, most).all()))


def with_parts(found: pd.DataFrame) -> pd.DataFrame:
    """Add results that are part of another method's trainings, as separate methods."""
    parts = [found]
    for name, (method, part) in PARTS.items():
        mine = select(found, method=method)
        if not mine.empty:
            of_part = {what: mine.get(f"{part}_{what}") for what in ("accuracy", "loss")}
            parts.append(mine.assign(method=name, **of_part))
    return pd.concat(parts)


def rotations(found: pd.DataFrame) -> pd.Series:
    """Return the learned half-widths in degrees, without methods that learn none."""
    return found.psi[found.psi.astype(bool)].map(rotation)
