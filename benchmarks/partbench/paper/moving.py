"""Appendix C's future work: partitions that move during a training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import partnets
from partbench.paper.augmentation import in_all_sizes
from partbench.paper.experiment import Claim, Experiment, Record, Table, at_least, registered, rotation, select, text
from partbench.paper.methods import Learner, partition
from partbench.paper.reassigning import reassign

# Partitions' shares of the weights from each part of the steps on. Chunks stay .8, .1 and .1.
FIXED = {0.0: (0.8, 0.1, 0.1)}
TO_THE_FIRST = {0.0: (0.4, 0.3, 0.3), 0.25: (0.6, 0.2, 0.2), 0.5: (0.8, 0.1, 0.1)}
TO_THE_LAST = FIXED | {0.5: (0.5, 0.25, 0.25), 0.75: (0.2, 0.2, 0.6)}
METHODS = {
    "fixed": ("partitions that stay", FIXED, "random"),
    "first": ("the first grows, from .4 to .8", TO_THE_FIRST, "random"),
    "last": ("the last grows, from .1 to .6", TO_THE_LAST, "random"),
    "smallest": ("the last grows by the smallest weights", TO_THE_LAST, "magnitude"),
}
EXAMPLES, QUICK_STEPS, QUICK = 500, 100, ("fixed", "smallest")


class Mover(Learner):
    def moving(self, method: str) -> Record:
        """Train as in `partitioned`, with partitions that move, and steps drawn by their current shares."""
        _, shares, by = METHODS[method]
        plan = {round(part * self.steps): share for part, share in shares.items()}
        augmentation = self.recipe.augmentation()
        model = self.model(augmentation)
        partition(model, plan[0], self.data, "weight", self.seed)

        def move(trainer: partnets.Trainer) -> None:
            if trainer.steps in plan:
                share = plan[trainer.steps]
                reassign(model, share, trainer.optimizer, by=by, seed=trainer.steps)
                trainer.settings.sampling = share

        chunks = partnets.chunk(self.data.train, self.recipe.proportions, seed=self.seed)
        options = {"hyper": augmentation, "sampling": plan[0], "callbacks": [move]}
        trainer = self.trainer(model, chunks, partnets.Trainer, self.steps, **options)
        trainer.fit(self.steps)  # without a checkpoint, because a trainer with other shares rejects it
        return self.result(trainer)


@registered
class Moving(Experiment):
    """Augmentations of few digits: partitions of fixed size, and ones that grow during training."""

    name = "moving"
    paper = "Appendix C, future work"
    partial_results = True
    datasets = ("digits",)

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        return in_all_sizes(dataset, QUICK if quick else list(METHODS), seeds, quick, QUICK_STEPS, (EXAMPLES,))

    def train(self, setting: Record, checkpoint: Path) -> Record:
        return Mover.of(setting, checkpoint).moving(setting["method"])

    def table(self, found: pd.DataFrame) -> Table:
        rows = []
        for method, (label, *_) in METHODS.items():
            row = [label]
            for rotated in (True, False):
                mine = select(found, method=method, rotated=rotated)
                row += [text(mine.accuracy), text(mine.lml, 0), text(mine.psi.map(rotation), 0)]
            if len(mine):
                rows.append(row)
        kinds = [
            f"{kind}: {what}" for kind in ("rotated", "upright") for what in ("accuracy, %", "L_ML", "rotation ±°")
        ]
        return ["", *kinds], rows

    def draw(self, found: pd.DataFrame) -> Figure:
        figure = Figure(figsize=(8, 3), layout="constrained")
        for axes, rotated in zip(figure.subplots(1, 2, sharey=True), (True, False), strict=True):
            for i, (method, (label, *_)) in enumerate(METHODS.items()):
                accuracies = select(found, method=method, rotated=rotated).accuracy
                axes.plot(accuracies, [i] * len(accuracies), "o", label=label)
            axes.set(title="rotated" if rotated else "upright", xlabel="test accuracy [%]")
        axes.set_yticks(range(len(METHODS)), [label for label, *_ in METHODS.values()])
        axes.invert_yaxis()
        return figure

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        claims = []
        for rotated, method in product((True, False), ("first", "last", "smallest")):
            cell = select(found, rotated=rotated)
            ours, theirs = (select(cell, method=one).accuracy for one in (method, "fixed"))
            if len(ours):
                kind = "rotated" if rotated else "upright"
                claims.append(at_least(f"{kind}, {METHODS[method][0]}: at or above those that stay", ours, theirs))
        return claims
