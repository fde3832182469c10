"""Charts as positions in percent of the width: the template draws them without scaling their text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.estimates import Estimate
from benchmarks.report import text
from benchmarks.summary import ours

MOST_TICKS = 6
# Each decade's ticks, from coarse to fine.
TICKS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
# Colours and shapes of style.css. A backend of ours that is none of these is drawn as other peers are.
STYLES = {
    "dense": "dense",
    "where": "where",
    "where, compiled": "compiled",
    "parametrize": "parametrize",
    "paper": "paper",
    "floor": "floor",
    "torch, fused": "where",
    "torch, foreach": "compiled",
    "partnets": "ours",
    "partkernels cpu": "ours",
    "partkernels triton": "ours",
    "partkernels triton fused": "ours-2",
    "partkernels triton rebuild": "ours-3",
    "partkernels cuda": "ours-2",
    "partkernels reference": "ours-3",
}


@dataclass(frozen=True)
class Tick:
    at: float
    text: str
    is_one: bool


class Axis:
    """A logarithmic axis that shows all values, and 1."""

    def __init__(self, values: Iterable[float], *, one: bool = True) -> None:
        logs = [math.log(value) for value in values if value > 0 and math.isfinite(value)] or [0.0]
        if one:
            logs.append(0.0)
        low, high = min(logs), max(logs)
        # A smaller range would blow noise up.
        spare = max(0.0, math.log(1.6) - (high - low)) / 2
        margin = 0.06 * (high - low + 2 * spare)
        self.low, self.high = low - spare - margin, high + spare + margin

    def at(self, value: float) -> float:
        """Percent of the axis."""
        if value <= 0:
            return 0.0
        return round(100 * (math.log(value) - self.low) / (self.high - self.low), 2)

    @property
    def ticks(self) -> list[Tick]:
        decades = range(math.floor(self.low / math.log(10)), math.ceil(self.high / math.log(10)) + 1)
        for steps in reversed(TICKS):
            values = [step * 10.0**decade for decade in decades for step in steps]
            values = [value for value in values if self.low < math.log(value) < self.high]
            if len(values) <= MOST_TICKS:
                return self.marked(values)
        return self.marked([1.0])

    def marked(self, values: Iterable[float], form: str = "g") -> list[Tick]:
        """Ticks at these values."""
        return [Tick(self.at(value), f"{round(value, 9):{form}}", abs(value - 1) < 1e-9) for value in values]


@dataclass(frozen=True)
class Dot:
    """A figure at a place; low and high of its interval, None without one."""

    at: float
    low: float | None
    high: float | None
    style: str
    title: str
    lane: int = 0

    @classmethod
    def of(cls, axis: Axis, estimate: Estimate, peer: str, title: str, lane: int = 0) -> Dot:
        low, high = (axis.at(estimate.low), axis.at(estimate.high)) if estimate.confidence else (None, None)
        return cls(axis.at(estimate.value), low, high, style(peer), title, lane)


@dataclass(frozen=True)
class Row:
    """A line of a dot plot: what it is about, our figure in words or why there is none, and all figures."""

    label: str
    value: str
    dots: Sequence[Dot]
    found: bool = True


@dataclass(frozen=True)
class Dots:
    """Figures of several peers, a line for each case."""

    title: str
    ticks: Sequence[Tick]
    rows: Sequence[Row]
    lanes: int
    kind: str = "dots"


@dataclass(frozen=True)
class Bar:
    """A bar of pieces: style, start, length [percent], title."""

    label: str
    value: str
    pieces: Sequence[tuple[str, float, float, str]]


@dataclass(frozen=True)
class Bars:
    title: str
    bars: Sequence[Bar]
    kind: str = "bars"


@dataclass(frozen=True)
class Point:
    """Of a line: x and the figure on the y axis, both in percent."""

    x: float
    y: Dot


@dataclass(frozen=True)
class Lines:
    """A figure's growth: a line for each peer."""

    title: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Sequence[Point]]
    kind: str = "lines"


@dataclass(frozen=True)
class Strip:
    """A range with its mean, beside 1."""

    low: float
    mean: float
    high: float
    one: float


def style(peer: str) -> str:
    """The class of a peer's marks."""
    return STYLES.get(peer, "other")


def in_order(peers: Iterable[str]) -> list[str]:
    """Each peer but the dense one once, ours first: the lanes of a dot plot from the top."""
    names = [peer for peer in dict.fromkeys(peers) if peer != "dense"]
    return [*ours(names), *(peer for peer in names if peer not in ours(names))]


def legend(peers: Iterable[str]) -> list[tuple[str, str]]:
    """Style and name of each peer, once."""
    return [(style(peer), peer) for peer in dict.fromkeys(peers)]


def about(peer: str, estimate: Estimate, form: str = "") -> str:
    """What a reader sees who points at a mark."""
    value, interval = text.ratios(estimate)
    return f"{peer}: {value}" + (f" [{interval}]" if interval else "") + (f", {form}" if form else "")


def ends(estimates: Iterable[Estimate | None]) -> list[float]:
    """All that an axis has to show."""
    return [value for each in estimates if each is not None for value in (each.low, each.value, each.high)]
