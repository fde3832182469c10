"""HTML tables. pandas can write tables, but no reasons in place of figures, and no classes of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from markupsafe import Markup

from partbench.measuring.estimates import Estimate
from partbench.report import text
from partbench.results import Record

# Longer tables are folded.
OPEN_ROWS = 16
Cells = Mapping[str, str]


def number(value: str, *, strong: bool = False) -> Markup:
    """Return a right-aligned cell of a number."""
    return Markup('<td class="number{}">{}').format(" strong" * strong, value)


def estimate(words: tuple[str, str], *, strong: bool = False) -> Markup:
    """Return a cell of a figure and its interval."""
    return Markup('{} <span class="interval">{}</span>').format(number(words[0], strong=strong), words[1])


def ratio(found: Estimate | None, *, strong: bool = False) -> Markup:
    return estimate(text.ratios(found), strong=strong)


def styled(style: str, value: str) -> Markup:
    """Return a cell with a class of style.css; a "reason" takes the place of the rest of its row."""
    return Markup('<td class="{}">{}').format(style, value)


def reason(record: Record) -> Markup:
    return styled("reason", text.why(record))


def plain(value: object) -> str:
    """Return a cell of a value of summary's tables: an Estimate, a number, or text."""
    if isinstance(value, Estimate) or value is None:
        return ratio(value)
    if isinstance(value, float | int):
        return number("–" if value != value else f"{value:.3f}" if isinstance(value, float) else str(value))
    return value


@dataclass(frozen=True)
class Table:
    """A table that renders itself in HTML.

    Attributes:
        title: a description of the rows.
        rows: cells by the names of columns; the first row has all columns, unless there are heads.
        leading: the number of columns that name a row; adjacent rows share equal ones.
        styles: classes of the rows, if any.
        heads: names of the columns, if the first row does not have all of them.
    """

    title: str
    rows: Sequence[Cells]
    leading: int = 1
    styles: Sequence[str] = ()
    heads: Sequence[str] = field(default=())

    @classmethod
    def of(cls, title: str, frame: pd.DataFrame, names: Sequence[str]) -> Table:
        """Build a table of a frame with new column names; the first column names a row, the second is a peer."""
        rows = [[plain(value) for value in row] for row in frame.itertuples(index=False)]
        rows = [[first, styled("peer", peer), *rest] for first, peer, *rest in rows]
        return cls(title, [dict(zip(names, row, strict=True)) for row in rows])

    @property
    def is_open(self) -> bool:
        return len(self.rows) <= OPEN_ROWS

    def __html__(self) -> Markup:
        names = list(self.heads or dict.fromkeys(name for row in self.rows for name in row))
        right = {name for row in self.rows for name, cell in row.items() if str(cell).startswith('<td class="number')}
        heads = [Markup("<th{}>{}</th>").format(Markup(' class="number"') * (n in right), n.strip()) for n in names]
        parts = [Markup("<table><thead><tr>"), *heads, Markup("</tr></thead><tbody>")]
        keys = [[tuple(row.get(name) for name in names[: i + 1]) for i in range(self.leading)] for row in self.rows]
        for number, row in enumerate(self.rows):
            style = self.styles[number] if self.styles else ""
            parts.append(Markup('<tr class="{}">').format(style) if style else Markup("<tr>"))
            for column in range(self.leading):
                if number and keys[number][column] == keys[number - 1][column]:
                    continue
                same = next((i for i, k in enumerate(keys[number:]) if k[column] != keys[number][column]), None)
                rows = same or len(self.rows) - number
                parts.append(
                    Markup("<th{}>{}</th>").format(Markup(f' rowspan="{rows}"') * (rows > 1), row[names[column]])
                )
            for column in range(self.leading, len(names)):
                cell = row.get(names[column], "")
                cell = cell if str(cell).startswith("<td") else Markup("<td>{}").format(cell)
                if 'class="reason"' in cell:
                    parts += [cell.replace("<td", Markup(f'<td colspan="{len(names) - column}"'), 1), Markup("</td>")]
                    break
                parts += [cell, Markup("</td>")]
            parts.append(Markup("</tr>"))
        table = Markup("").join([*parts, Markup("</tbody></table>")])
        scroll = Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>')
        return scroll.format(self.title, table)
