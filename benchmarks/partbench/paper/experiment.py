"""Experiment: the base class of trainings with their results and the claims that these check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# A training's settings and results: plain JSON values.
Record = dict
# A table's head and rows.
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Claim:
    """A claim that an experiment must show, the numbers that decide it, and whether it holds."""

    text: str
    found: str
    holds: bool


class Experiment:
    """The trainings of an experiment, their presentation and their claims. Subclasses are `registered`.

    Attributes:
        name: on the command line.
        paper: the table, figure or section of the paper.
        datasets: the possible data sets; the first is the default.
        partial_results: whether a table, claims and a picture can be made of some of its trainings.
    """

    name: str
    paper: str
    partial_results: bool = False
    datasets: Sequence[str] = ("digits", "mnist", "cifar10", "tiny-imagenet")

    def settings(self, dataset: str, seeds: Sequence[int], quick: bool) -> list[Record]:
        """Return one dict for each training, with everything that decides its result."""
        raise NotImplementedError

    def train(self, setting: Record, checkpoint: Path) -> Record:
        """Train once and return numbers; keep in `checkpoint` all that is needed to resume after an interruption."""
        raise NotImplementedError

    def table(self, found: pd.DataFrame) -> Table:
        """Return a table of the results; a row of `found` is a setting with the result of its training."""
        raise NotImplementedError

    def draw(self, found: pd.DataFrame) -> Figure:
        """Plot the results."""
        raise NotImplementedError

    def claims(self, found: pd.DataFrame) -> list[Claim]:
        """Return the paper's claims, checked against the results."""
        raise NotImplementedError


EXPERIMENTS: dict[str, Experiment] = {}


def registered(experiment: type[Experiment]) -> type[Experiment]:
    """Register a class by its name, for the command line and the page."""
    EXPERIMENTS[experiment.name] = experiment()
    return experiment


def select(found: pd.DataFrame, **wanted) -> pd.DataFrame:
    """Return the rows that have these values.

    Example:
        >>> select(pd.DataFrame({"seed": [0, 1], "x": [1, 2]}), seed=1).x.tolist()
        [2]
    """
    for name, value in wanted.items():
        found = found[found[name] == value]
    return found


def of_common_seeds(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of both tables with a seed that both have, sorted by seed.

    Example:
        >>> ours, theirs = of_common_seeds(pd.DataFrame({"seed": [0, 1], "x": [3, 4]}), pd.DataFrame({"seed": [1, 2]}))
        >>> ours.x.tolist(), theirs.seed.tolist()
        ([4], [1])
    """
    seeds = set(ours.seed) & set(theirs.seed)
    return tuple(one[one.seed.isin(seeds)].sort_values("seed") for one in (ours, theirs))


def text(numbers: pd.Series, digits: int = 1, unit: str = "") -> str:
    """Format mean ± standard error.

    Example:
        >>> text(pd.Series([90.0, 91.0, 92.0]), unit=" %")
        '91.0 ± 0.6 %'
    """
    spread = f" ± {numbers.sem():.{digits}f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():.{digits}f}{spread}{unit}"


def at_least(claim: str, ours: pd.Series, theirs: pd.Series, margin: float = 0.0) -> Claim:
    """Claim that the mean of ours is at least that of theirs plus a margin."""
    return Claim(claim, f"{text(ours)} and {text(theirs)} %", bool(ours.mean() >= theirs.mean() + margin))


def lower(claim: str, ours: pd.Series, theirs: pd.Series, digits: int = 3) -> Claim:
    """Claim that ours is lower with every seed, since the means of three seeds can differ by chance.

    Example:
        >>> lower("ours: less than theirs", pd.Series([1.0, 2.0]), pd.Series([2.0, 1.5]), digits=1).found
        '1.5 ± 0.5 and 1.8 ± 0.2; with 1 of 2 seeds'
    """
    count = sum(a < b for a, b in zip(ours, theirs, strict=True))
    found = f"{text(ours, digits)} and {text(theirs, digits)}; with {count} of {len(ours)} seeds"
    return Claim(claim, found, count == len(ours))


def curve(axes: Axes, x: pd.Series, y: pd.Series, label: str, **style) -> None:
    """Plot the mean of y at each x, with its standard error."""
    points = y.groupby(x)
    style = {"marker": ".", "linewidth": 1} | style
    axes.errorbar(points.mean().index, points.mean(), points.sem().fillna(0), label=label, **style)


def rotation(psi: dict[str, float]) -> float:
    """Return the half-width of the rotation in degrees, for any parametrisation."""
    return abs(psi["rotation"]) if "rotation" in psi else (psi["rotation_max"] - psi["rotation_min"]) / 2
