"""What a page is made of: sections of parts, which hold charts and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.report.charts import Bars, Dots, Lines, Strip

# A longer table is folded until a reader asks for it.
OPEN_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """Of a table.

    Attributes:
        style: "number", "interval", "head", "reason" or other classes of style.css.
        rows, columns: how many it spans.
        strip: a drawing in its place.
    """

    text: str
    style: str = ""
    rows: int = 1
    columns: int = 1
    strip: Strip | None = None


@dataclass(frozen=True)
class Table:
    """Attributes:
    title: what its rows are.
    heads: of the columns; they span like other cells.
    rows: cells, and the class of each row in `styles` if there are any.
    groups: heads of several columns, above the others.
    """

    title: str
    heads: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    styles: Sequence[str] = ()
    groups: Sequence[Cell] = ()

    @property
    def open(self) -> bool:
        return len(self.rows) <= OPEN_ROWS


@dataclass(frozen=True)
class Part:
    """Charts that share a legend, and the tables with the same figures.

    Attributes:
        legend: style and name of each peer, or of each piece of a bar.
    """

    title: str
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()
    charts: Sequence[Dots | Bars | Lines] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """A suite of one run."""

    name: str
    title: str
    note: str
    parts: Sequence[Part] = field(default_factory=list)


def head(*names: str) -> list[Cell]:
    """Heads of columns of text."""
    return [Cell(name, "head") for name in names]


def numbers(*names: str) -> list[Cell]:
    """Heads of columns of numbers."""
    return [Cell(name, "head number") for name in names]


def estimated(name: str) -> Cell:
    """The head of a figure and its interval."""
    return Cell(name, "head estimate", columns=2)


def estimate(texts: tuple[str, str]) -> list[Cell]:
    """A figure and its interval."""
    return [Cell(texts[0], "number"), Cell(texts[1], "interval")]


def leading(texts: Iterable[str], rows: int) -> list[Cell]:
    """The cells before a case's peers, which they share."""
    return [Cell(text, "head", rows=rows) for text in texts]
