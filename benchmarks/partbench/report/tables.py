"""Tables of a page; the template renders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

# A text, or a figure and its interval.
Cell = str | tuple[str, str]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        title: a description of the rows.
        heads: the names of the columns.
        rows: the last cell of a row with fewer cells spans the remaining columns.
        leading: the number of columns that name a row; adjacent rows share equal ones.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    leading: int = 1

    def groups(self) -> list[tuple[Sequence[Cell], list[Sequence[Cell]]]]:
        """Return the leading cells of adjacent rows that share them, and the other cells of each of these rows."""
        groups = groupby(self.rows, lambda row: row[: self.leading])
        return [(names, [row[self.leading :] for row in rows]) for names, rows in groups]
