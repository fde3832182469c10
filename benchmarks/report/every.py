"""Every figure of a suite as a table: a row for each record, and the reason in place of a figure that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.estimates import Estimate
from benchmarks.figures import Figure, by_case
from benchmarks.report import layout, text
from benchmarks.report.layout import Cell, Table
from benchmarks.results import Record


def table(
    title: str,
    records: Sequence[Record],
    heads: Sequence[str],
    texts: Callable[[Record], Sequence[str]],
    *,
    over: str = "over dense",
    ratio: Callable[[Figure], Estimate | None] = lambda figure: figure.ratio,
    more: dict[str, Callable[[Figure], str]] | None = None,
) -> Table:
    """The table of some records of one suite.

    Args:
        heads, texts: of the columns that tell cases apart; peers of a case share them.
        over, ratio: to what figures are held, and the figure's ratio to it.
        more: further columns of numbers.
    """
    more = more or {}
    figures = {id(figure.record): figure for case in by_case(records, records[0].suite) for figure in case.values()}
    cases: dict[tuple, list[Record]] = {}
    for record in records:
        cases.setdefault(tuple(record.case.items()), []).append(record)
    rows = []
    for group in cases.values():
        for record in group:
            row = layout.leading(texts(record), len(group)) if record is group[0] else []
            row.append(Cell(record.peer, "peer"))
            figure = figures.get(id(record))
            if figure is None:
                row.append(Cell(text.why(record), "reason", columns=4 + len(more)))
            else:
                row += layout.estimate(text.quantities(figure.value, record.unit))
                row += layout.estimate(text.ratios(held) if (held := ratio(figure)) else ("", ""))
                row += [Cell(value(figure), "number") for value in more.values()]
            rows.append(row)
    named = [*layout.head(*heads, "peer"), layout.estimated("median time"), layout.estimated(over)]
    return Table(title, [*named, *layout.numbers(*more)], rows)
