"""Loggers: callbacks of a Trainer that write its history elsewhere while it trains."""

from __future__ import annotations

import csv
import weakref
from os import PathLike
from pathlib import Path
from typing import Any

from partnets.training.callbacks import Callback, every
from partnets.utils.files import replacing


def CSV(path: str | PathLike, *, steps: int = 100) -> Callback:
    """Return a callback that writes the rows and columns of History.frame to a CSV file, every `steps` steps.

    Cells without a value are empty. The whole file is replaced, so an interruption leaves no half of it, and a resumed
    training continues it. Put it last among a trainer's callbacks, so that it writes their metrics.

    Args:
        path: the path of the file.
        steps: the number of steps between writes.

    Raises:
        ValueError: steps is below 1.
        OSError: the file cannot be written; when called.

    Example:
        >>> import tempfile, types
        >>> from partnets import History
        >>> path = Path(tempfile.mkdtemp()) / "training.csv"
        >>> log, trainer = CSV(path, steps=1), types.SimpleNamespace(history=History(), steps=1)
        >>> trainer.history.add(1, k=2, loss=0.7, values={"augmentation.rotation": 5.0})
        >>> log(trainer)
        >>> print(path.read_text(), end="")
        step,k,loss,hyper_k,hyper_loss,augmentation.rotation,lml
        1,2,0.7,,,5.0,
    """

    def write(trainer: Any) -> None:
        columns = trainer.history.columns()
        with replacing(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))

    return every(steps, write)


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

    def __init__(self, folder: str | PathLike) -> None:
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
        step = trainer.steps
        latest = {name: history.steps[name][-1] for name in ("loss", "hyper_loss")}
        latest |= {f"values/{name}": values[-1] for name, values in history.values.items()}
        evaluated = {f"metrics/{name}": record for name, record in history.metrics.items()}
        for name, record in {"lml": history.lml, **evaluated}.items():
            if record["step"] and record["step"][-1] == step:
                latest[name] = record["lml" if name == "lml" else "value"][-1]
        for name, value in latest.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write buffered scalars, as also happens at Python's exit; a further call begins another file."""
        self._close_writer()
        self._history = None
