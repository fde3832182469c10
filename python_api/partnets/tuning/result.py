"""Tuned: the result of partnets.tune: the chosen values, the trained network, and the trainings of the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from partnets.convert.deploying import deployed
from partnets.hyper import Averaged
from partnets.utils.checks import check_at_least


@dataclass(frozen=True)
class Trial:
    """One training of a search.

    Attributes:
        values: the value of each setting.
        nats: the loss of unseen data at each tenth of the training, in nats.
        batch_size: the mean batch size.
        cost: its cost, in trainings of `steps` full batches.
        counted: the number of targets in each judgement.
        weight: its weight in the choice, in [0, 1]. The weights of a factor and of the untuned training have a sum of
            1; with several factors, the untuned training shows its smallest weight.
        guessed: the nats of the best constant prediction, if known; only of the training at the chosen values.
        averaged: the nats at the end, averaged over augmented copies; likewise.
        fitted: the nats per target by which it predicts its training examples better than a constant, if known; only of
            the untuned training.
        shrank: whether the width of an augmentation shrank to a small part of its initial value.
    """

    values: dict[str, float]
    nats: list[float]
    batch_size: float
    cost: float
    counted: int
    weight: float = 1.0
    guessed: float | None = None
    averaged: float | None = None
    fitted: float | None = None
    shrank: bool = False

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
        notes: sentences about the limits of the result, such as few unseen examples.
        augmentation: the learned augmentation in front of the network, or None.

    Example:
        >>> trial = Trial({"dropout": 0.5}, [3.0, 2.0], batch_size=8, cost=0.25, counted=10)
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
            >>> import partnets, torch
            >>> from partnets import hyper
            >>> data = torch.rand(40, 1, 6, 6), torch.randint(2, (40,))
            >>> network = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
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
        starts = {name: f", at the start {values[0]:.4g}" for name, values in self.schedule.items()}
        lines = [f"{name} {value:.4g}{starts.get(name, '')}" for name, value in self.values.items()]
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
