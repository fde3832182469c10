"""History: what happened in each step of training, as numbers, a table, a picture and a page."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from partnets.training import plots, report
from partnets.training.records import Records

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class History(Records):
    """The records of a Trainer, and three ways to look at them; see Records for its attributes.

    Example:
        >>> history = History()
        >>> history.add(1, k=2, loss=0.7, hyper_k=2, hyper_loss=0.8, values={"augmentation.rotation": 5.0})
        >>> history.steps["loss"], history.values
        ([0.7], {'augmentation.rotation': [5.0]})
    """

    def frame(self) -> pandas.DataFrame:
        """A row for each step, a column for each list; lml and metrics are NaN where they were not evaluated.

        The columns step and k are int64, all others float64; NaN also stands for None.

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
        """Draws each hyperparameter, L_ML beside the losses, each metric, and the latest matrix of losses.

        Losses are thin, their running means over a twentieth of the steps (but 10 to 500) thick. A dotted line marks
        where L_ML was highest: it falls again where the training loss still improves by overfitting.

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
        figure = plots.overview(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def report(self, path: str | PathLike) -> None:
        """Writes a page (HTML) with a summary, the plots and the latest matrix of losses, whole or not at all.

        The page needs no other file, no network and no script; it follows the reader's light or dark scheme.

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
