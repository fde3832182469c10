"""Loggers: callbacks of a Trainer that write its history elsewhere while it trains."""

from __future__ import annotations

import csv
import weakref
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from partnets.training.history import History
from partnets.utils.checks import check_at_least
from partnets.utils.files import replacing


class CSV:
    """A callback that writes a CSV file with the rows and columns of History.frame; cells without a value are empty.

    After step n the file has the rows of steps 1..n, except the last n mod `every`; `close` writes these too. Rows are
    appended. The whole file is replaced if there is a new column, such as the first metric, another history, such as
    after resuming, or a file size other than the last written, such as after a full disk. So an interrupted and resumed
    training leaves the same file as an uninterrupted one.

    Put it last among a trainer's callbacks: values recorded for a step after its row was written appear only when the
    file is replaced.

    Args:
        path: the path of the file; an existing file is replaced at the first call.
        every: the number of steps between writes.

    Raises:
        ValueError: every is below 1.
        OSError: the file cannot be written; when called.

    Example:
        >>> import tempfile, types
        >>> from partnets import History
        >>> path = Path(tempfile.mkdtemp()) / "training.csv"
        >>> log, trainer = CSV(path), types.SimpleNamespace(history=History(), steps=1)
        >>> trainer.history.add(1, k=2, loss=0.7, values={"augmentation.rotation": 5.0})
        >>> log(trainer)
        >>> print(path.read_text(), end="")
        step,k,loss,hyper_k,hyper_loss,augmentation.rotation,lml
        1,2,0.7,,,5.0,
    """

    def __init__(self, path: str | PathLike[str], *, every: int = 1) -> None:
        check_at_least(1, every=every)
        self.path, self.every = Path(path), every
        self._history: History | None = None  # the history in the file
        self._names: list[str] = []
        self._rows = self._bytes = 0

    def __call__(self, trainer: Any) -> None:
        """Write the steps that are due."""
        if trainer.history is not self._history:
            self._history, self._names = trainer.history, []
        elif trainer.steps % self.every:
            return
        self._write(trainer.steps - trainer.steps % self.every)

    def close(self) -> None:
        """Write the steps that `every` has deferred; not needed if it is 1."""
        if self._history is not None:
            self._write(len(self._history.steps["step"]))

    def _write(self, rows: int) -> None:
        """Append to the file, or replace it, so that it has the first `rows` rows."""
        columns = self._history.columns(start=self._rows)
        if list(columns) == self._names and self.path.exists() and self.path.stat().st_size == self._bytes:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                _write_rows(file, columns, rows - self._rows)
        else:
            columns = self._history.columns()
            with replacing(self.path) as file:
                csv.writer(file, lineterminator="\n").writerow(columns)
                _write_rows(file, columns, rows)
        self._names, self._rows, self._bytes = list(columns), rows, self.path.stat().st_size


def _write_rows(file, columns: dict[str, list], count: int) -> None:
    rows = zip(*(column[:count] for column in columns.values()), strict=True)
    csv.writer(file, lineterminator="\n").writerows(rows)


class Scalars:
    """A callback that passes each step's scalars to a function of another library, with TensorBoard's names.

    Args:
        log: a function `log(scalars, step=step)` of a dict of floats by name, such as `log` of Weights & Biases' runs,
            `mlflow.log_metrics`, or `log_metrics` of Lightning's loggers.

    Example:
        >>> from partnets import Trainer
        >>> run = wandb.init(project="digits")  # doctest: +SKIP
        >>> Trainer(model, chunks, callbacks=[Scalars(run.log)]).fit(1000)  # doctest: +SKIP
        >>> Trainer(model, chunks, callbacks=[Scalars(mlflow.log_metrics)]).fit(1000)  # doctest: +SKIP
    """

    def __init__(self, log: Callable[..., Any]) -> None:
        self._log = log

    def __call__(self, trainer: Any) -> None:
        """Pass on the latest step."""
        self._log(_latest(trainer.history, trainer.steps), step=trainer.steps)


def _latest(history: History, step: int) -> dict[str, float]:
    """Return the scalars that the history has for its last step, by name."""
    latest = {name: history.steps[name][-1] for name in ("loss", "hyper_loss")}
    latest |= {f"values/{name}": values[-1] for name, values in history.values.items()}
    evaluated = {f"metrics/{name}": record for name, record in history.metrics.items()}
    for name, record in {"lml": history.lml, **evaluated}.items():
        if record["step"] and record["step"][-1] == step:
            latest[name] = record["lml" if name == "lml" else "value"][-1]
    return {name: value for name, value in latest.items() if value is not None}


class TensorBoard:
    """A callback that writes scalars for TensorBoard: loss, hyper_loss, lml, values/NAME and metrics/NAME.

    A resumed training hides scalars that an earlier one wrote into the folder for later steps. Put it last among a
    trainer's callbacks: it writes the values that are recorded for a step when it is called.

    Args:
        folder: a folder for this training, created if needed; files are added.

    Raises:
        ImportError: tensorboard is not installed.

    Example:
        >>> from partnets import Trainer
        >>> log = TensorBoard("runs/1")  # doctest: +SKIP
        >>> Trainer(model, chunks, callbacks=[log]).fit(1000)  # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "loggers.TensorBoard needs tensorboard; pip install tensorboard, or partkernels' extra 'tensorboard'."
            ) from error
        self.folder = Path(folder)
        self._new_writer = SummaryWriter
        self._history: Any = None  # the history that the writer writes
        self._close_writer = lambda: None

    def __call__(self, trainer: Any) -> None:
        """Write the latest step."""
        history = trainer.history
        if history is not self._history:
            self.close()
            self._history = history
            self._writer = self._new_writer(str(self.folder), purge_step=trainer.steps)
            # Closed at Python's exit at the latest: the writer buffers scalars up to two minutes and would lose them.
            self._close_writer = weakref.finalize(self, self._writer.close)
        for name, value in _latest(history, trainer.steps).items():
            self._writer.add_scalar(name, value, trainer.steps)

    def close(self) -> None:
        """Write buffered scalars, as also happens at Python's exit; a further call begins another file."""
        self._close_writer()
        self._history = None
