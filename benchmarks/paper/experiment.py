"""Experiment: trainings, what they give, and what of the paper's claims they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

# A training's settings and results: plain JSON values.
Record = dict


@dataclass(frozen=True)
class Claim:
    """One thing that an experiment must show.

    Attributes:
        text: the claim.
        found: the numbers that decide it.
        holds: whether they bear it out.
    """

    text: str
    found: str
    holds: bool


class Experiment:
    """What is trained, how it is shown, and what it must show. Experiments are subclasses with one instance each.

    Attributes:
        name: on the command line.
        paper: where the paper has it.
        datasets: that it can be run on; the first is the default.
    """

    name: str
    paper: str
    datasets: Sequence[str] = ("digits", "mnist", "cifar10", "tiny-imagenet")

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        """One dict for each training. Everything that decides its result is in it."""
        raise NotImplementedError

    def train(self, setting: Record, checkpoint: Path) -> Record:
        """Trains once and returns numbers; keeps what it needs to go on after an interruption in `checkpoint`."""
        raise NotImplementedError

    def table(self, records: Sequence[Record]) -> str:
        """The results as a table in Markdown. A record is a setting and the result of its training in one dict."""
        raise NotImplementedError

    def draw(self, records: Sequence[Record]) -> Figure:
        """The results as a figure."""
        raise NotImplementedError

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        """What the paper claims, held against the results."""
        raise NotImplementedError


def select(records: Iterable[Record], **wanted) -> list[Record]:
    """The records that have these values.

    Example:
        >>> select([{"seed": 0, "x": 1}, {"seed": 1, "x": 2}], seed=1)
        [{'seed': 1, 'x': 2}]
    """
    return [record for record in records if all(record[name] == value for name, value in wanted.items())]


def values(records: Iterable[Record], name: str) -> list[float]:
    """One number of each record."""
    return [record[name] for record in records]


def mean(numbers: Sequence[float]) -> float:
    """The arithmetic mean."""
    return statistics.fmean(numbers)


def standard_error(numbers: Sequence[float]) -> float:
    """Of the mean; NaN for a single number.

    Example:
        >>> round(standard_error([1.0, 2.0, 3.0]), 3)
        0.577
    """
    return statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan


def error_bars(points: Iterable[Sequence[float]]) -> list[float]:
    """The standard error of each point, for a plot; 0 where there is a single number.

    Example:
        >>> error_bars([[1.0], [2.0, 2.0]])
        [0.0, 0.0]
    """
    return [standard_error(point) if len(point) > 1 else 0.0 for point in points]


def text(numbers: Sequence[float], digits: int = 1, unit: str = "") -> str:
    """Mean ± standard error.

    Example:
        >>> text([90.0, 91.0, 92.0], unit=" %")
        '91.0 ± 0.6 %'
    """
    spread = f" ± {standard_error(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{spread}{unit}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table.

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        | --- | --- |
        | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))
