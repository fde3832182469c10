"""History: the records of training as numbers, a table, plots and an HTML page."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from partnets.training import plots, report
from partnets.training.records import Records

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class History(Records):
    """The records of a Trainer, with methods to show them; see Records for its attributes.

    Example:
        >>> history = History()
        >>> history.add(1, k=2, loss=0.7, hyper_k=2, hyper_loss=0.8, values={"augmentation.rotation": 5.0})
        >>> history.steps["loss"], history.values
        ([0.7], {'augmentation.rotation': [5.0]})
    """

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

    def plot(self, path: str | PathLike | None = None) -> Figure:
        """Plot each hyperparameter, L_ML beside the losses, each metric, and the latest matrix of losses.

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

    def report(self, path: str | PathLike) -> None:
        """Write an HTML page with a summary, the plots and the latest matrix of losses, atomically.

        The page needs no other files, network or scripts; it follows the reader's light or dark scheme.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no step yet.

        Example:
            >>> import pathlib, tempfile
            >>> history = History()
            >>> history.add(1, k=1, loss=0.7)
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "training.html"
            >>> history.report(path)
            >>> "<svg" in path.read_text(encoding="utf-8")
            True
        """
        report.write(self, path)
