"""step: Table 8, and how its costs grow."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.estimates import Estimate
from benchmarks.report import charts, every, layout, text
from benchmarks.report.layout import Cell, Part, Section, Table
from benchmarks.results import Record, Results
from benchmarks.step import UPDATES
from benchmarks.summary import StepRow, ours
from benchmarks.summary import step as summary

PUBLISHED = "paper, as published"


def section(results: Results) -> Section | None:
    """Of one run; None if it has no such records."""
    records = [record for record in results.records if record.suite == "step"]
    if not records:
        return None
    rows = summary(records)
    table = [row for row in rows if "series" not in row.case]
    growing = [row for row in rows if "series" in row.case]
    parts = [_table_8(table)] if table else []
    parts += [_growth(growing)] if growing else []
    common = text.constant([record.case for record in records], but=("model",))
    note = (
        "What an update of the parameters and one of the hyperparameters cost, over a dense training step: the mean "
        f"over live subnetworks, weighted by how often training draws each. All: {common}."
    )
    return Section("step", "Training step", note, [*parts, _every(records)])


def models(rows: Sequence[StepRow]) -> dict[tuple, list[StepRow]]:
    """The rows of each model, or point of a series: a row for each scheme."""
    found: dict[tuple, list[StepRow]] = {}
    for row in rows:
        found.setdefault(tuple(row.case.items()), []).append(row)
    return found


def costs(row: StepRow) -> tuple[Estimate | None, Estimate | None]:
    """Of UPDATES, in that order."""
    return row.parameters, row.hyperparameters


def _table_8(rows: Sequence[StepRow]) -> Part:
    grouped = models(rows)
    schemes = charts.in_order(row.scheme for row in rows)
    published = [PUBLISHED] if any(row.paper for row in rows) else []
    axis = charts.Axis(
        [
            *charts.ends(cost for row in rows for cost in costs(row)),
            *(value for row in rows for value in row.paper or ()),
        ]
    )
    return Part(
        "Table 8",
        "The dots of the paper as published are its Table 8, measured on an RTX 3080; the number at the right is ours.",
        [*charts.legend(schemes), *(("published", name) for name in published)],
        [
            charts.Dots(
                f"Update of the {update}",
                axis.ticks,
                [_row(group, which, schemes, axis) for group in grouped.values()],
                len(schemes) + len(published),
            )
            for which, update in enumerate(UPDATES)
        ],
        [_table(grouped)],
    )


def name(row: StepRow) -> str:
    return text.phrases(row.case, ["model", "batch"])


def _row(group: Sequence[StepRow], which: int, schemes: Sequence[str], axis: charts.Axis) -> charts.Row:
    found = {row.scheme: costs(row)[which] for row in group if costs(row)[which]}
    dots = [
        charts.Dot.of(axis, found[scheme], scheme, charts.about(scheme, found[scheme]), lane)
        for lane, scheme in enumerate(schemes)
        if scheme in found
    ]
    if group[0].paper:
        value = group[0].paper[which]
        about = f"{PUBLISHED}: {text.ratio(value)}"
        dots.append(charts.Dot(axis.at(value), None, None, "published", about, len(schemes)))
    mine = [text.ratio(found[scheme].value) for scheme in ours(schemes) if scheme in found]
    return charts.Row(name(group[0]), " · ".join(mine) or "no figure", dots, bool(mine))


def _table(grouped: dict[tuple, list[StepRow]]) -> Table:
    rows = []
    for group in grouped.values():
        for number, row in enumerate(group):
            row_of_model = [*layout.leading((name(row),) if not number else (), len(group)), Cell(row.scheme, "peer")]
            row_of_model += [cell for cost in costs(row) for cell in layout.estimate(text.ratios(cost))]
            published = [Cell(text.ratio(value), "number", rows=len(group)) for value in row.paper or ()]
            published = published or [Cell("–", "number", rows=len(group))] * 2
            rows.append(row_of_model + (published if not number else []))
    heads = [
        *layout.head("model", "scheme"),
        *(layout.estimated(update) for update in UPDATES),
        *layout.numbers(*(f"{update}, published" for update in UPDATES)),
    ]
    return Table("Cost over a dense step", heads, rows)


def _growth(rows: Sequence[StepRow]) -> Part:
    schemes = charts.in_order(row.scheme for row in rows)
    axis = charts.Axis(charts.ends(cost for row in rows for cost in costs(row)))
    lines = []
    for series in dict.fromkeys(row.case["series"] for row in rows):
        points = [row for row in rows if row.case["series"] == series]
        x = charts.Axis((row.place for row in points), one=False)
        for which, update in enumerate(UPDATES):
            by_scheme = [
                [
                    charts.Point(x.at(row.place), charts.Dot.of(axis, cost, scheme, _about(row, cost)))
                    for row in sorted(points, key=lambda row: row.place)
                    if row.scheme == scheme and (cost := costs(row)[which])
                ]
                for scheme in schemes
            ]
            title = f"{text.first_upper(update)}, by {series}"
            places = x.marked(sorted({row.place for row in points}))
            lines.append(charts.Lines(title, places, axis.ticks, [line for line in by_scheme if line]))
    return Part(
        "Growth",
        "Cost over a dense step of the same network, as one thing grows and the others stay.",
        charts.legend(schemes),
        lines,
        [_growth_table(rows)],
    )


def _about(row: StepRow, cost: Estimate) -> str:
    return f"{row.case['series']} {row.place:g}, {charts.about(row.scheme, cost)}"


def _growth_table(rows: Sequence[StepRow]) -> Table:
    cells = [
        [
            Cell(f"{row.case['series']} {row.place:g}", "head"),
            Cell(row.scheme, "peer"),
            *(cell for cost in costs(row) for cell in layout.estimate(text.ratios(cost))),
        ]
        for row in rows
    ]
    heads = [*layout.head("point", "scheme"), *(layout.estimated(update) for update in UPDATES)]
    return Table("Growth: every point", heads, cells)


def _every(records: Sequence[Record]) -> Part:
    """Each live subnetwork by itself."""
    names = [n for n in text.varying([r.case for r in records]) if n not in ("model", "active", "optimizer")]
    table = every.table(
        "Steps by live subnetwork k: every figure",
        records,
        ("model", "with", "k"),
        lambda record: (record.case["model"], text.phrases(record.case, names), str(record.case["active"])),
    )
    return Part("Each live subnetwork", tables=[table])
