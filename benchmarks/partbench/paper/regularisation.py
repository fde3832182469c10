"""Augmentation, weight decay and label smoothing, tuned together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from partbench.paper.augmentation import draw_sizes, in_all_sizes, in_most_cells, tabled
from partbench.paper.experiment import Claim, Experiment, Record, Table, registered, rotation, select
from partbench.paper.methods import LEAST, SPACE, VALIDATION, Learner
from partbench.paper.recipes import small_affine
from partnets import hyper

# Start values, which are common choices without tuning.
DECAY, SMOOTHING = 1e-4, 0.1
# Ranges for searches; decays are on a logarithmic scale.
REGULARISERS = {"log_decay": (math.log(1e-6), math.log(1e-2)), "smoothing": (LEAST, 0.4)}
# A grid of all would be far too large. With 2 values of each, this is for users who know that images may be rotated.
GRID, GRID_TRIALS = {"rotation": (LEAST, 180.0), **REGULARISERS}, 8
METHODS = {
    "standard": "standard training",
    "grid": f"grid of {GRID_TRIALS}: rotation, decay, smoothing",
    "random_search": "random search",
    "tpe": "TPE",
    "validation_retraining": "validation set, then retrained",
    "augmentation": "partitioned, then retrained: augmentation only",
    "retraining": "partitioned, then retrained",
}
OURS = ("retraining", "augmentation")
QUICK, QUICK_STEPS = ("grid", "retraining"), 100


class Regularised(Learner):
    """A Learner that adds weight decay and label smoothing to its networks."""

    space = SPACE | REGULARISERS

    def model(self, augmentation: nn.Module) -> nn.Module:
        network = super().model(augmentation)
        return nn.Sequential(network, hyper.WeightDecay(network, DECAY), hyper.LabelSmoothing(SMOOTHING))

    def loss(self, model: nn.Module) -> Callable:
        return regularisers(model)[1]

    def sought(self, model, chunks, psi: Sequence[hyper.Hyperparameter], **options) -> Record:
        result = super().sought(model, chunks, [*psi, *regularisers(model)], **options)
        values = {name: value for one in regularisers(model) for name, value in one.values().items()}
        return {**result, "regularisers": values}

    def fixed(self, values: dict[str, float]):
        widths = {name: value for name, value in values.items() if name not in REGULARISERS}
        model, chunks = self.held_out(hyper.Affine(**(small_affine().values() | widths)), VALIDATION)
        decay, smoothing = regularisers(model)
        hyper.assign(decay, {"decay": math.exp(values["log_decay"])})
        hyper.assign(smoothing, {"smoothing": values["smoothing"]})
        return model, chunks

    def grid(self) -> Record:
        return self.search("grid", GRID_TRIALS, GRID)


def regularisers(model: nn.Module) -> tuple[hyper.WeightDecay, hyper.LabelSmoothing]:
    """Return the model's only weight decay and its only label smoothing."""
    kinds = (hyper.WeightDecay, hyper.LabelSmoothing)
    decay, smoothing = (one for kind in kinds for one in model.modules() if isinstance(one, kind))
    return decay, smoothing


@registered
class Regularisation(Experiment):
    """Augmentation, weight decay and label smoothing, tuned together on upright and rotated digits."""

    name = "regularisation"
    paper = "beyond the paper"
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        return in_all_sizes(dataset, QUICK if quick else list(METHODS), seeds, quick, QUICK_STEPS)

    def train(self, setting: Record, checkpoint: Path) -> Record:
        method = setting["method"]
        if method in ("standard", "augmentation"):
            return getattr(Learner.of(setting, checkpoint), {"augmentation": "retraining"}.get(method, method))()
        result = getattr(Regularised.of(setting, checkpoint), method)()
        if "regularisers" not in result:
            psi = result["psi"]
            result["regularisers"] = {"decay": math.exp(psi.pop("log_decay")), "smoothing": psi.pop("smoothing")}
        return result

    def table(self, found: pd.DataFrame) -> Table:
        """Return test accuracies and the hyperparameters that were found."""
        return tabled(found, METHODS, "found", _found)

    def draw(self, found: pd.DataFrame) -> Figure:
        return draw_sizes(found, METHODS, "retraining")

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        others = [method for method in METHODS if method not in OURS and not select(found, method=method).empty]
        return [in_most_cells(found, "retraining", other, METHODS) for other in others]


def _found(mine: pd.DataFrame) -> list[str]:
    """Return the means of the rotation, of the decay (geometric) and of the smoothing."""
    if not mine.psi.all():
        return []
    parts = [f"{mine.psi.map(rotation).mean():.0f}°"]
    values = mine.regularisers.dropna() if "regularisers" in mine else ()
    if len(values):
        decay = math.exp(sum(math.log(one["decay"]) for one in values) / len(values))
        parts += [f"decay {decay:.0e}", f"smoothing {sum(one['smoothing'] for one in values) / len(values):.2f}"]
    return parts
