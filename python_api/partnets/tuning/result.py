"""Tuned: the result of partnets.tune: the chosen values, the trained network, and the trainings of the search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from partnets.convert.deploying import deployed
from partnets.hyper import Averaged
from partnets.utils.checks import check_at_least

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trial:
    """One training of a search.

    Attributes:
        values: the value of each setting.
        nats: the loss of unseen data at each tenth of the training, in nats.
        batch_size: the mean batch size.
        weight: its weight in the choice, in [0, 1]. The weights of a factor and of the untuned training have a sum of
            1; with several factors, the untuned training shows its smallest weight.
        cost: its cost, in trainings of `steps` full batches.
    """

    values: dict[str, float]
    nats: list[float]
    batch_size: float
    weight: float
    cost: float

    @property
    def late(self) -> float:
        """The mean nats over the second half, which determine its weight in the choice."""
        return sum(self.nats[len(self.nats) // 2 :]) / len(self.nats[len(self.nats) // 2 :])


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of partnets.tune.

    Attributes:
        values: the chosen value of each setting, by its name.
        model: the network, trained with them on all data: torch modules only, in evaluation mode.
        lml: L_ML of the training at the chosen values, in nats. A squared error counts as -n / 2 log(error); if
            augmentations learned, logits are divided by their best temperature. If no training was better than a
            guess, so that the values are untuned, it is L_ML of the first training in `history`.
        counted: the number of targets in L_ML. Only a part of a large unseen chunk judges.
        steps: the number of steps of the final training.
        schedule: the value of each number that learned by gradient descent, such as the width of an augmentation, at
            the start and after each tenth of the training. The final training repeats it; `values` has the last.
        history: the trainings of the search; the first one is untuned.
        confirmed: the training at the chosen values.
        cost: the cost of all trainings and judgements, in trainings of `steps` full batches.
        augmentation: the learned augmentation in front of the network, or None.
        notes: sentences about the limits of the result, such as few unseen examples.

    Example:
        >>> trial = Trial({"dropout": 0.5}, [3.0, 2.0], 8, 1.0, 0.25)
        >>> print(Tuned({"dropout": 0.5}, nn.Identity(), -2.0, 10, 100, {}, [trial], trial, 1.5, ["Few."]).report())
        dropout 0.5
        L_ML -2.0 nats of 10 unseen targets, 100 steps in the final training, cost of 1.50 trainings
        tried  weight  L_ML  dropout
            1    1.00  -2.0      0.5
        Few.
    """

    values: dict[str, float]
    model: nn.Module = field(repr=False)
    lml: float
    counted: int
    steps: int
    schedule: dict[str, list[float]]
    history: Sequence[Trial]
    confirmed: Trial
    cost: float
    notes: Sequence[str]
    augmentation: nn.Module | None = field(default=None, repr=False)

    def averaged(self, copies: int = 8) -> nn.Module:
        """Return a network that averages its predictions over augmented copies of each example.

        A prediction then takes `copies` times as long. A note reports if L_ML is higher with 8 copies.

        Args:
            copies: the number of augmentations, drawn once and used for all examples.

        Returns:
            A torch module in evaluation mode: x [batch, ...] to the mean of `copies` outputs of `model`.

        Raises:
            ValueError: no augmentation in front of the network was learned.

        Example:
            >>> import torch, partnets
            >>> from partnets import hyper
            >>> network = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
            >>> data = torch.rand(40, 1, 6, 6), torch.randint(2, (40,))
            >>> result = partnets.tune(network, data, hyper.Affine(), steps=4)
            >>> result.averaged()(data[0]).shape
            torch.Size([40, 2])
        """
        check_at_least(1, copies=copies)
        if self.augmentation is None:
            raise ValueError("no augmentation before the network was tuned; pass one in hyper, such as hyper.Affine().")
        return deployed(Averaged(self.augmentation, self.model, samples=copies), draws=copies, seed=0).eval()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.3g}" for name, value in self.values.items())
        return f"Tuned({values}; L_ML {self.lml:.1f} nats, {self.steps} steps, cost {self.cost:.2f})"

    def report(self) -> str:
        """Return the chosen values, the trainings of the search and the notes as text.

        L_ML of a training in the search is the mean over its second half, which determines its weight.
        """
        lines = [f"{name} {value:.4g}{self._begun(name)}" for name, value in self.values.items()]
        lines.append(
            f"L_ML {self.lml:.1f} nats of {self.counted} unseen targets, {self.steps} steps in the final training, cost"
            f" of {self.cost:.2f} trainings"
        )
        if self.history:
            rows = [["tried", "weight", "L_ML", *self.history[0].values]]
            for number, trial in enumerate(self.history, start=1):
                values = [f"{value:.3g}" for value in trial.values.values()]
                rows.append([str(number), f"{trial.weight:.2f}", f"{-trial.late:.1f}", *values])
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([*lines, *self.notes])

    def _begun(self, name: str) -> str:
        return f", at the start {self.schedule[name][0]:.4g}" if name in self.schedule else ""

    def plot(self, path: str | os.PathLike | None = None) -> Figure:
        """Draw L_ML over the steps of each training in the search, and of the one at the chosen values.

        Args:
            path: a file to write the figure to; its suffix selects the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from partnets.training.plots import new_figure

        figure = new_figure()
        axes = figure.add_subplot()
        for number, trial in enumerate(self.history, start=1):
            label = f"{number}: " + ", ".join(f"{name} {value:.2g}" for name, value in list(trial.values.items())[:3])
            axes.plot(_tenths(trial), [-nats for nats in trial.nats], marker=".", label=label)
        axes.plot(_tenths(self.confirmed), [-nats for nats in self.confirmed.nats], color="black", label="chosen")
        axes.set(xlabel="share of the steps", ylabel="L_ML [nats]")
        axes.legend(fontsize="small")
        if path is not None:
            figure.savefig(path)
        return figure


def _tenths(trial: Trial) -> list[float]:
    return [(i + 1) / len(trial.nats) for i in range(len(trial.nats))]
