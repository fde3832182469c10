"""Records: the numbers of each training step, in plain lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

STEP_COLUMNS = ("step", "k", "loss", "hyper_k", "hyper_loss")


@dataclass(repr=False)
class Records:
    """The records of a Trainer, in plain lists; a History can also plot them.

    Attributes:
        steps: a list for each of step (from 1); k and loss, the partition of the step of w_k and the mean negative
            log-likelihood of its batch from D_1:k in nats (k is 0 if all partitions took a step); hyper_k and
            hyper_loss, the chunk D_k of the step of ψ and the loss of its batch on subnetwork k - 1 (both None if ψ
            took no step; hyper_k None if it took one on all chunks).
        values: a list for each hyperparameter: its value after each step, in its units.
        lml: a list for each of step and lml, in nats.
        metrics: for each metric, by name, a list for each of step and value.
        matrices: a list for each of step and matrix: matrix[k - 1][j - 1] is the mean loss per example of subnetwork k
            on chunk j, in nats. It has seen chunks 1..k; L_ML (Eq. 2) sums the entries [k - 1][k].

    Raises:
        ValueError, TypeError: in the methods below; nothing is recorded.

    Example:
        >>> history = Records()
        >>> history.add(1, k=2, loss=0.7, hyper_k=2, hyper_loss=0.8, values={"augmentation.rotation": 5.0})
        >>> history.add_lml(1, -120.0)
        >>> history.steps["loss"], history.values, history.lml["lml"]
        ([0.7], {'augmentation.rotation': [5.0]}, [-120.0])
    """

    steps: dict[str, list] = field(default_factory=lambda: {name: [] for name in STEP_COLUMNS})
    values: dict[str, list[float]] = field(default_factory=dict)
    lml: dict[str, list] = field(default_factory=lambda: {"step": [], "lml": []})
    metrics: dict[str, dict[str, list]] = field(default_factory=dict)
    matrices: dict[str, list] = field(default_factory=lambda: {"step": [], "matrix": []})

    def __repr__(self) -> str:
        """Return a summary with the numbers of records.

        Example:
            >>> Records()
            Records(0 steps)
        """
        counts = {"steps": self.steps, "evaluations of L_ML": self.lml, "loss matrices": self.matrices}
        shown = [f"{len(lists['step'])} {what}" for what, lists in counts.items() if lists["step"] or what == "steps"]
        return f"{type(self).__name__}({', '.join([*shown, *self.values, *self.metrics])})"

    def check(self) -> None:
        """Raise ValueError unless all lists could be made by the methods below, to detect a damaged file.

        Example:
            >>> history = Records(lml={"step": [10, 20], "lml": [-80.0]})
            >>> history.check()
            Traceback (most recent call last):
            ValueError: lml has lists of different lengths: step 2, lml 1.
        """
        columns = {"steps": self.steps, "lml": self.lml, "matrices": self.matrices}
        expected = {"steps": STEP_COLUMNS, "lml": ("step", "lml"), "matrices": ("step", "matrix")}
        expected |= dict.fromkeys(self.metrics, ("step", "value"))
        for name, record in (columns | self.metrics).items():
            if set(record) != set(expected[name]):
                raise ValueError(f"{name} has {', '.join(record)} instead of {', '.join(expected[name])}.")
            _check_columns(name, record)
            if not all(a <= b for a, b in pairwise(record["step"])):
                raise ValueError(f"{name} has steps that are not in order.")
        _check_columns("values", self.values | {"step": self.steps["step"]} if self.values else {})

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
        for name in values:
            if name not in self.values:
                self._check_name(name)
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
            >>> history = Records()
            >>> history.add_metrics(10, {"test accuracy": 0.93})
            >>> history.metrics
            {'test accuracy': {'step': [10], 'value': [0.93]}}
        """
        numbers = _numbers(metrics)
        for name in numbers:
            if name in self.metrics:
                _check_order(step, self.metrics[name])
            else:
                self._check_name(name)
        for name, value in numbers.items():
            record = self.metrics.setdefault(name, {"step": [], "value": []})
            record["step"].append(step)
            record["value"].append(value)

    def add_matrix(self, step: int, matrix: Sequence[Sequence[float]]) -> None:
        """Append the mean loss of each subnetwork (C rows) on each chunk (C columns), in nats per example.

        Raises:
            ValueError: matrix is not square, or step is before the last matrix's.

        Example:
            >>> history = Records()
            >>> history.add_matrix(10, [[0.2, 0.6], [0.3, 0.3]])
            >>> history.matrices["matrix"][-1][0][1]  # subnetwork 1 on chunk 2, which it has not seen
            0.6
        """
        rows = [[float(loss) for loss in row] for row in matrix]
        if not rows or {len(row) for row in rows} != {len(rows)}:
            raise ValueError(
                f"the matrix has rows of {[len(row) for row in rows]} losses; pass C rows, one for each subnetwork, of"
                " C losses, one for each chunk."
            )
        _check_order(step, self.matrices)
        self.matrices["step"].append(step)
        self.matrices["matrix"].append(rows)

    def best_lml(self) -> tuple[int, float] | None:
        """Return the first step with the highest L_ML, and this L_ML in nats; None without a finite one.

        Example:
            >>> history = Records()
            >>> for step, lml in ((10, -80.0), (20, -60.0), (30, -75.0)):
            ...     history.add_lml(step, lml)
            >>> history.best_lml()
            (20, -60.0)
        """
        evaluations = zip(self.lml["step"], self.lml["lml"], strict=True)
        finite = [(step, lml) for step, lml in evaluations if math.isfinite(lml)]
        return max(finite, key=lambda evaluation: evaluation[1], default=None)

    def columns(self, start: int = 0) -> dict[str, list]:
        """Return the columns of `frame` as lists, from row `start` (from 0) on, with None where nothing was evaluated.

        If a step was evaluated several times, the last evaluation counts.

        Example:
            >>> history = Records()
            >>> history.add(1, k=1, loss=0.7)
            >>> history.add(2, k=2, loss=0.5)
            >>> history.add_lml(2, -120.0)
            >>> history.columns(start=1)
            {'step': [2], 'k': [2], 'loss': [0.5], 'hyper_k': [None], 'hyper_loss': [None], 'lml': [-120.0]}
        """
        columns = {name: column[start:] for name, column in (self.steps | self.values).items()}
        steps = columns["step"]
        columns["lml"] = _at(steps, self.lml["step"], self.lml["lml"])
        for name, record in self.metrics.items():
            columns[name] = _at(steps, record["step"], record["value"])
        return columns

    def _check_name(self, name: str) -> None:
        if name in STEP_COLUMNS or name == "lml" or name in self.values or name in self.metrics:
            raise ValueError(f"{name!r} is already a column of History.frame; give it another name.")


def _check_columns(name: str, columns: dict[str, list]) -> None:
    """Raise ValueError unless columns are lists of one length with valid values."""
    if not all(isinstance(column, list) for column in columns.values()):
        raise ValueError(f"{name} has columns that are not lists.")
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{column} {len(values)}" for column, values in columns.items())
        raise ValueError(f"{name} has lists of different lengths: {lengths}.")
    for column, values in columns.items():
        is_right = _OTHERS.get(column, lambda value: type(value) in (int, float))
        if wrong := [value for value in values if not is_right(value)]:
            raise ValueError(f"{name} has {repr(wrong[0])[:60]} under {column}.")


# Checks of values in columns that do not contain only numbers.
_OTHERS = {
    "step": lambda value: type(value) is int and value >= 0,
    "k": lambda value: type(value) is int,
    "hyper_k": lambda value: value is None or type(value) is int,
    "hyper_loss": lambda value: value is None or type(value) in (int, float),
    "matrix": lambda rows: (
        bool(rows)
        and {len(row) for row in rows} == {len(rows)}
        and all(type(loss) in (int, float) for row in rows for loss in row)
    ),
}


def _check_order(step: int, record: dict[str, list]) -> None:
    if record["step"] and step < record["step"][-1]:
        raise ValueError(
            f"an evaluation of step {step} came after that of step {record['step'][-1]}; pass them in order."
        )


def _at(steps: list[int], evaluated: list[int], values: list[float]) -> list[float | None]:
    """Return the last value evaluated at each of these steps, or None."""
    found, first = {}, min(steps, default=math.inf)
    for step, value in zip(reversed(evaluated), reversed(values), strict=True):
        if step < first:  # stop early: loggers request only the last rows, after each step
            break
        found.setdefault(step, value)
    return [found.get(step) for step in steps]


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
