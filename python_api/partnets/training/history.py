"""History: the numbers of each training step, in plain lists, as a table and as plots."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from partnets.training import plots

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STEP_COLUMNS = ("step", "k", "loss", "hyper_k", "hyper_loss")


@dataclass(repr=False)
class History:
    """The records of a Trainer.

    Attributes:
        steps: a list for each of step (from 1); k and loss, the partition of the step of w_k and the mean negative
            log-likelihood of its batch from D_1:k in nats (k is 0 if all partitions took a step); hyper_k and
            hyper_loss, the chunk D_k of the step of ψ and the loss of its batch on subnetwork k - 1 (both None if ψ
            took no step; hyper_k None if it took one on all chunks).
        values: a list for each hyperparameter: its value after each step, in its units.
        lml: a list for each of step and lml, in nats.
        metrics: for each metric, by name, a list for each of step and value.

    Raises:
        ValueError, TypeError: in the methods below; nothing is recorded.

    Example:
        >>> history = History()
        >>> history.add(1, k=2, loss=0.7, hyper_k=2, hyper_loss=0.8, values={"augmentation.rotation": 5.0})
        >>> history.add_lml(1, -120.0)
        >>> history.steps["loss"], history.values, history.lml["lml"]
        ([0.7], {'augmentation.rotation': [5.0]}, [-120.0])
    """

    steps: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in STEP_COLUMNS})
    values: dict[str, list[float]] = field(default_factory=dict)
    lml: dict[str, list[float]] = field(default_factory=lambda: {"step": [], "lml": []})
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a summary with the numbers of records.

        Example:
            >>> History()
            History(0 steps)
        """
        counts = {"steps": self.steps, "evaluations of L_ML": self.lml}
        shown = [f"{len(lists['step'])} {what}" for what, lists in counts.items() if lists["step"] or what == "steps"]
        return f"History({', '.join([*shown, *self.values, *self.metrics])})"

    def add(
        self,
        step: int,
        k: int,
        loss: float,
        hyper_k: int | None = None,
        hyper_loss: float | None = None,
        values: dict[str, float] | None = None,
    ) -> None:
        """Append a step.

        Raises:
            TypeError: a value is not a number.
            ValueError: values has other names than in earlier steps, or the name of another column of `frame`.
        """
        values = _numbers(values or {})
        if self.steps["step"] and values.keys() != self.values.keys():
            raise ValueError(
                f"step {step} has values of {list(values)}, but earlier steps of {list(self.values)}; pass every"
                " hyperparameter at every step."
            )
        self._check_names(values.keys() - self.values.keys())
        for name, value in zip(STEP_COLUMNS, (step, k, loss, hyper_k, hyper_loss), strict=True):
            self.steps[name].append(value)
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def add_lml(self, step: int, lml: float) -> None:
        """Append an evaluation of L_ML, in nats.

        Raises:
            ValueError: step is before the last evaluation's.
        """
        _check_order(step, self.lml)
        self.lml["step"].append(step)
        self.lml["lml"].append(lml)

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Append an evaluation of metrics, under any names.

        Raises:
            TypeError: metrics is not a dict, or a metric is not a number.
            ValueError: a metric has the name of another column of `frame`, or step is before its last value's.

        Example:
            >>> history = History()
            >>> history.add_metrics(10, {"test accuracy": 0.93})
            >>> history.metrics
            {'test accuracy': {'step': [10], 'value': [0.93]}}
        """
        numbers = _numbers(metrics)
        self._check_names(numbers.keys() - self.metrics.keys())
        for name in numbers.keys() & self.metrics.keys():
            _check_order(step, self.metrics[name])
        for name, value in numbers.items():
            record = self.metrics.setdefault(name, {"step": [], "value": []})
            record["step"].append(step)
            record["value"].append(value)

    def best_lml(self) -> tuple[int, float] | None:
        """Return the first step with the highest L_ML, and this L_ML in nats; None without a finite one.

        Example:
            >>> history = History()
            >>> for step, lml in ((10, -80.0), (20, -60.0), (30, -75.0)):
            ...     history.add_lml(step, lml)
            >>> history.best_lml()
            (20, -60.0)
        """
        evaluations = zip(self.lml["step"], self.lml["lml"], strict=True)
        finite = [(step, lml) for step, lml in evaluations if math.isfinite(lml)]
        return max(finite, key=lambda evaluation: evaluation[1], default=None)

    def columns(self, start: int = 0) -> dict[str, list[Any]]:
        """Return the columns of `frame` as lists, from row `start` (from 0) on, with None where nothing was evaluated.

        If a step was evaluated several times, the last evaluation counts.

        Example:
            >>> history = History()
            >>> history.add(1, k=1, loss=0.7)
            >>> history.add(2, k=2, loss=0.5)
            >>> history.add_lml(2, -120.0)
            >>> history.columns(start=1)["lml"]
            [-120.0]
        """
        records = {"lml": (self.lml["step"], self.lml["lml"])}
        records |= {name: (record["step"], record["value"]) for name, record in self.metrics.items()}
        columns = {name: column[start:] for name, column in (self.steps | self.values).items()}
        for name, (steps, values) in records.items():
            found = dict(zip(steps, values, strict=True))
            columns[name] = [found.get(step) for step in columns["step"]]
        return columns

    def frame(self) -> pandas.DataFrame:
        """Return a DataFrame with a row for each step; lml and metrics are NaN where they were not evaluated.

        The columns step and k are int64, all others float64; None is NaN.

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
            raise ImportError(
                "History.frame needs pandas; pip install pandas, or partkernels' extra 'plot'."
            ) from error
        frame = pandas.DataFrame(self.columns())
        return frame.astype({name: "int64" if name in ("step", "k") else "float64" for name in frame})

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot each hyperparameter, L_ML beside the losses, and each metric.

        Losses are thin lines; their running means over a twentieth of the steps (at least 10, at most 500) are thick.
        A dotted line marks the highest L_ML, which falls again while the training loss still improves by overfitting.

        Args:
            path: a file to write, in the format of its suffix; None writes no file.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> history = History()
            >>> history.add(1, k=1, loss=0.7)
            >>> len(history.plot().axes)
            2
        """
        figure = plots.overview(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def _check_names(self, names: set[str]) -> None:
        if taken := names & {*STEP_COLUMNS, "lml", *self.values, *self.metrics}:
            raise ValueError(f"{min(taken)!r} is already a column of History.frame; give it another name.")


def _check_order(step: int, record: dict[str, list]) -> None:
    if record["step"] and step < record["step"][-1]:
        raise ValueError(
            f"an evaluation of step {step} came after that of step {record['step'][-1]}; pass them in order."
        )


def _numbers(numbers: dict[str, float]) -> dict[str, float]:
    """Return the numbers as Python floats."""
    if not isinstance(numbers, dict):
        raise TypeError(f"the metrics are {numbers!r}; pass a dict from names to floats.")
    found = {}
    for name, value in numbers.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name!r} is {value!r}; pass a float for each name.") from error
    return found
