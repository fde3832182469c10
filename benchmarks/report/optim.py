"""optim: an optimiser's step over one partition, over torch's fastest."""

from __future__ import annotations

from benchmarks.report import charts, every, text
from benchmarks.report.layout import Part, Section, Table
from benchmarks.results import Record, Results
from benchmarks.summary import OptimRow
from benchmarks.summary import optim as summary


def section(results: Results) -> Section | None:
    """Of one run; None if it has no such records."""
    records = [record for record in results.records if record.suite == "optim"]
    if not records:
        return None
    note = (
        "A step over the weights of one partition, over the faster of torch.optim's two steps over all weights. "
        f"All: {text.constant([record.case for record in records], but=('model', 'optimizer', 'update'))}."
    )
    rows = [row for row in summary(records) if row.ratio]
    return Section("optim", "Optimiser", note, [Part("", "", (), _dots(rows), [_table(records)])])


def what(row: OptimRow) -> str:
    return f"partition {row.update}, {text.percent(row.share)} of the weights"


def _dots(rows: list[OptimRow]) -> list[charts.Dots]:
    """A chart for each optimiser."""
    axis = charts.Axis(charts.ends(row.ratio for row in rows))
    return [
        charts.Dots(
            text.OPTIMIZERS.get(optimizer, optimizer),
            axis.ticks,
            [
                charts.Row(
                    f"{row.model}, {what(row)}",
                    text.ratio(row.ratio.value),
                    [charts.Dot.of(axis, row.ratio, row.peer, charts.about(row.peer, row.ratio))],
                )
                for row in rows
                if row.optimizer == optimizer
            ],
            1,
        )
        for optimizer in dict.fromkeys(row.optimizer for row in rows)
    ]


def _table(records: list[Record]) -> Table:
    over = {(row.model, row.optimizer, row.update, row.peer): row.ratio for row in summary(records)}

    def texts(record: Record) -> list[str]:
        case = record.case
        return [
            str(case["model"]),
            text.OPTIMIZERS.get(case["optimizer"], case["optimizer"]),
            str(case["update"]),
            text.percent(record.facts["share"]),
        ]

    return every.table(
        "Optimisers' steps: every figure",
        records,
        ("model", "optimiser", "partition", "of the weights"),
        texts,
        over="over torch's faster",
        ratio=lambda figure: over.get(
            (figure.case["model"], figure.case["optimizer"], figure.case["update"], figure.peer)
        ),
    )
