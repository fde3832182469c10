"""Loggers: callbacks of a Trainer that write its history elsewhere while it trains."""

from __future__ import annotations

import csv
import weakref
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from partnets.utils.checks import check_at_least
from partnets.utils.files import replacing

if TYPE_CHECKING:
    from partnets.training.records import Records
    from partnets.training.state import TrainingState


class CSV:
    """Writes a file of comma-separated values, with the rows and columns of History.frame; an empty cell is no number.

    After step n the file holds the rows of steps 1..n, less n mod `every`; `close` writes those too. Rows are appended;
    a new column, as of the first metric, another history, as of a resumed training, and a file of another size than
    this left, as of a disk that was full, replace the file as a whole. So an interrupted and resumed training leaves
    the same file as one without interruption.

    Put it last among a trainer's callbacks: what is recorded for a step after its row was written comes into the file
    where it is replaced next.

    Args:
        path: of the file; one that is there is replaced at the first call.
        every: writes after each so many steps.

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

    def __init__(self, path: str | PathLike, *, every: int = 1) -> None:
        check_at_least(1, every=every)
        self.path, self.every = Path(path), every
        self._history: Records | None = None  # whose rows the file holds
        self._names: list[str] = []
        self._rows = self._bytes = 0

    def __call__(self, trainer: TrainingState) -> None:
        """Writes the steps that are due."""
        if trainer.history is not self._history:
            self._history, self._names = trainer.history, []
        elif trainer.steps % self.every:
            return
        self._write(trainer.steps - trainer.steps % self.every)

    def close(self) -> None:
        """Writes the steps that `every` held back; of no use where it is 1."""
        if self._history is not None:
            self._write(len(self._history.steps["step"]))

    def _write(self, rows: int) -> None:
        """Makes the file hold the first so many rows."""
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


class TensorBoard:
    """Writes scalars for TensorBoard: loss, hyper_loss, lml, values/NAME and metrics/NAME, at each step that has them.

    What an earlier training wrote into the folder beyond the step from which this one goes on is hidden there. Put it
    last among a trainer's callbacks: it writes what is recorded for a step when it is called.

    Args:
        folder: one for each training, which is made; files are added.

    Raises:
        ImportError: tensorboard is not installed.

    Example:
        >>> from partnets import Trainer
        >>> log = TensorBoard("runs/1")  # doctest: +SKIP
        >>> Trainer(model, chunks, callbacks=[log]).fit(1000)  # doctest: +SKIP
    """

    def __init__(self, folder: str | PathLike) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "loggers.TensorBoard needs tensorboard; pip install tensorboard, or partkernels' extra 'tensorboard'."
            ) from error
        self.folder = Path(folder)
        self._new_writer = SummaryWriter
        self._history: Records | None = None  # whose rows the writer writes
        self._close_writer = lambda: None

    def __call__(self, trainer: TrainingState) -> None:
        """Writes the latest step."""
        history = trainer.history
        if history is not self._history:
            self.close()
            self._history = history
            self._writer = self._new_writer(str(self.folder), purge_step=trainer.steps)
            # At the latest when Python ends: the writer holds scalars back, up to two minutes, and would lose them.
            self._close_writer = weakref.finalize(self, self._writer.close)
        for name, (value,) in history.columns(start=-1).items():
            if value is not None and name not in ("step", "k", "hyper_k"):
                group = "values/" if name in history.values else "metrics/" if name in history.metrics else ""
                self._writer.add_scalar(group + name, value, trainer.steps)

    def close(self) -> None:
        """Writes what is held back, which also happens when Python ends; a further call begins another file."""
        self._close_writer()
        self._history = None
