"""History: what happened in each step of training, as numbers, a table and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STEP_COLUMNS = ("step", "k", "loss", "hyper_k", "hyper_loss")
# Wider figures are unreadable; more hyperparameters than this share one panel.
PANEL_COLUMNS = 3
MOST_PANELS = 9


@dataclass
class History:
    """The records of a Trainer, in plain lists.

    Attributes:
        steps: a list for each of step (from 1), k and loss (of the step of w_k: the mean negative log-likelihood of the
            batch from D_1:k), hyper_k and hyper_loss (of the step of ψ: that of the batch from D_k on subnetwork k - 1;
            None without hyperparameters).
        values: a list for each hyperparameter, its value after each step, in its units.
        lml: a list for each of step and lml, in nats.

    Example:
        >>> history = History()
        >>> history.add(1, k=2, loss=0.7, hyper_k=2, hyper_loss=0.8, values={"augmentation.rotation": 5.0})
        >>> history.add_lml(1, -120.0)
        >>> history.steps["loss"], history.values, history.lml["lml"]
        ([0.7], {'augmentation.rotation': [5.0]}, [-120.0])
    """

    steps: dict[str, list] = field(default_factory=lambda: {name: [] for name in STEP_COLUMNS})
    values: dict[str, list[float]] = field(default_factory=dict)
    lml: dict[str, list] = field(default_factory=lambda: {"step": [], "lml": []})

    def add(
        self,
        step: int,
        k: int,
        loss: float,
        hyper_k: int | None = None,
        hyper_loss: float | None = None,
        values: dict[str, float] | None = None,
    ) -> None:
        """Appends a step."""
        for name, value in zip(STEP_COLUMNS, (step, k, loss, hyper_k, hyper_loss), strict=True):
            self.steps[name].append(value)
        for name, value in (values or {}).items():
            self.values.setdefault(name, []).append(value)

    def add_lml(self, step: int, lml: float) -> None:
        """Appends an evaluation of L_ML."""
        self.lml["step"].append(step)
        self.lml["lml"].append(lml)

    def frame(self) -> pandas.DataFrame:
        """A row for each step, a column for each list; lml is NaN where it was not evaluated.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> history = History()
            >>> history.add(1, k=1, loss=0.7)
            >>> history.frame()[["step", "k", "loss"]].to_dict("list")
            {'step': [1], 'k': [1], 'loss': [0.7]}
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("History.frame needs pandas; pip install partkernels[plot].") from error
        frame = pandas.DataFrame(self.steps | self.values)
        return frame.merge(pandas.DataFrame(self.lml, dtype=float), on="step", how="left")

    def plot(self, path: str | PathLike | None = None) -> Figure:
        """Draws each hyperparameter, L_ML and the losses over the steps.

        Args:
            path: where to write the picture; its suffix decides the format. None writes none.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> history = History()
            >>> history.add(1, k=1, loss=0.7)
            >>> len(history.plot().axes)
            2
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("History.plot needs matplotlib; pip install partkernels[plot].") from error
        steps = self.steps["step"]
        if len(self.values) <= MOST_PANELS:
            panels = [(name, {name: (steps, values)}) for name, values in self.values.items()]
        else:
            panels = [("hyperparameters", {name: (steps, values) for name, values in self.values.items()})]
        panels.append(("L_ML [nats]", {"L_ML": (self.lml["step"], self.lml["lml"])}))
        losses = {"in chunks (w)": (steps, self.steps["loss"])}
        if self.values:
            losses["out of chunk (ψ)"] = (steps, self.steps["hyper_loss"])
        panels.append(("loss [nats per example]", losses))

        rows = math.ceil(len(panels) / PANEL_COLUMNS)
        figure = Figure(figsize=(4 * min(len(panels), PANEL_COLUMNS), 2.6 * rows), layout="constrained")
        for position, (title, lines) in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, min(len(panels), PANEL_COLUMNS), position, title=title, xlabel="step")
            for label, (x, y) in lines.items():
                axes.plot(x, y, label=label, linewidth=0.8, marker="." if len(x) == 1 else None)
            if 1 < len(lines) <= MOST_PANELS:
                axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure
