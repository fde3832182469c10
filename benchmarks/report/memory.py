"""memory: stacked bars of what is kept, dot plots of peaks, and which layers stayed dense."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import by_case
from benchmarks.report import charts, layout, text
from benchmarks.report.layout import Cell, Part, Section, Table
from benchmarks.results import Results
from benchmarks.summary import MemoryRow, ours
from benchmarks.summary import memory as summary

PIECES = {"parameters": "parameters", "map": "map", "defaults": "defaults", "state": "the optimiser's state"}
Models = dict[tuple, list[MemoryRow]]


def section(results: Results) -> Section | None:
    """Of one run; None if it has no such records."""
    records = [record for record in results.records if record.suite == "memory"]
    if not records:
        return None
    rows = models(summary(records))
    note = f"Bytes of models in training. All: {text.constant([r.case for r in records], but=('figure', 'model'))}."
    parts = [_kept(rows)] if rows else []
    return Section("memory", "Memory", note, [*parts, *_peaks(results)])


def models(rows: Sequence[MemoryRow]) -> Models:
    """The rows of each model, in order."""
    found: Models = {}
    for row in rows:
        found.setdefault((row.model, row.batch, row.optimizer), []).append(row)
    return found


def title(row: MemoryRow) -> str:
    return row.model + (" (by arithmetic)" if row.by_arithmetic else "")


def _kept(rows: Models) -> Part:
    most = max(sum(row.bytes.values()) for group in rows.values() for row in group)
    return Part(
        "Kept between steps",
        "Bytes a parameter of the ordinary model. The floor is the least that any assignment with these proportions "
        "takes. Models marked “by arithmetic” are too large to be made here; their figures are computed.",
        [(f"piece-{name}", label) for name, label in PIECES.items()],
        [
            charts.Bars(
                f"{title(group[0])}, {text.OPTIMIZERS.get(group[0].optimizer, group[0].optimizer)}",
                [_bar(row, most) for row in group],
            )
            for group in rows.values()
        ],
        [_share(rows), _bytes(rows)],
    )


def _bar(row: MemoryRow, most: float) -> charts.Bar:
    pieces, start = [], 0.0
    for name, value in row.bytes.items():
        length = 100 * value / most
        if value:
            about = f"{row.peer}, {PIECES[name]}: {text.significant(value)} B"
            pieces.append((f"piece-{name}", round(start, 2), round(length, 2), about))
        start += length
    return charts.Bar(row.peer, f"{sum(row.bytes.values()):.2f} B", pieces)


def _share(rows: Models) -> Table:
    """What is partitioned at all."""
    heads = [*layout.head("model", "optimiser"), *layout.numbers("batch", "of the parameters partitioned")]
    return Table(
        "What is partitioned",
        [*heads, *layout.head("layers that stay dense", "figures are")],
        [
            [
                Cell(row.model, "head"),
                Cell(text.OPTIMIZERS.get(row.optimizer, row.optimizer)),
                Cell(str(row.batch), "number"),
                Cell(f"{100 * row.partitioned:.1f} %", "number"),
                Cell(row.dense_layers or "none"),
                Cell("by arithmetic" if row.by_arithmetic else "measured"),
            ]
            for row in (group[0] for group in rows.values())
        ],
    )


def _bytes(rows: Models) -> Table:
    heads = [*layout.head("model", "peer"), *layout.numbers(*PIECES.values(), "all", "map, bits a weight")]
    cells = []
    for group in rows.values():
        for number, row in enumerate(group):
            name = (title(row),) if not number else ()
            values = [*row.bytes.values(), sum(row.bytes.values())]
            cells.append(
                [
                    *layout.leading(name, len(group)),
                    Cell(row.peer, "peer"),
                    *(Cell(f"{value:.3f}", "number") for value in values),
                    Cell(f"{row.map_bits:.2f}", "number"),
                ]
            )
    return Table("Bytes a parameter: every figure", heads, cells)


def _peaks(results: Results) -> list[Part]:
    """A part for each way of measuring, with a chart for each phase."""
    measured: dict[str, dict[str, list]] = {}
    for case in by_case(results.records, "memory"):
        figure = next(iter(case.values())).case["figure"]
        if figure.startswith("peak of "):
            phase, _, how = figure.removeprefix("peak of ").partition(", by ")
            measured.setdefault(how, {}).setdefault(phase, []).append(case)
    about = {
        "allocator": "The most bytes of tensors in each phase of a step, by PyTorch's allocator.",
        "process": "The most resident bytes of a process of its own in each phase, beyond what it had before it made "
        "the model: with what libraries and kernels take for themselves.",
    }
    parts = []
    for how, phases in measured.items():
        every = [figure for cases in phases.values() for case in cases for figure in case.values()]
        peers = charts.in_order(figure.peer for figure in every)
        axis = charts.Axis(charts.ends(figure.ratio for figure in every))
        note = f"{about.get(how, '')} Over the dense model's; the number at the right is ours."
        dots = [
            charts.Dots(text.first_upper(phase), axis.ticks, [_row(case, peers, axis) for case in cases], len(peers))
            for phase, cases in phases.items()
        ]
        parts.append(Part(f"Peak, by {how}", note, charts.legend(peers), dots, [_peak_table(how, phases)]))
    return parts


def _row(case: dict, peers: Sequence[str], axis: charts.Axis) -> charts.Row:
    dots = []
    for lane, peer in enumerate(peers):
        if peer in case and case[peer].ratio:
            value = text.quantities(case[peer].value, "B")[0]
            title = charts.about(peer, case[peer].ratio, value)
            dots.append(charts.Dot.of(axis, case[peer].ratio, peer, title, lane))
    mine = [text.ratio(case[peer].ratio.value) for peer in ours(peers) if peer in case and case[peer].ratio]
    first = next(iter(case.values())).case
    return charts.Row(f"{first['model']}, batch {first['batch']}", " · ".join(mine) or "no figure", dots, bool(mine))


def _peak_table(how: str, phases: dict[str, list]) -> Table:
    """Rows for each model and peer, columns for each phase."""
    cells: dict[tuple, dict[str, dict]] = {}
    for phase, cases in phases.items():
        for case in cases:
            first = next(iter(case.values())).case
            for peer, figure in case.items():
                model = f"{first['model']}, batch {first['batch']}"
                cells.setdefault((model, first["optimizer"]), {}).setdefault(peer, {})[phase] = figure
    rows = []
    for (model, _), peers in cells.items():
        for number, (peer, figures) in enumerate(peers.items()):
            row = [*layout.leading((model,) if not number else (), len(peers)), Cell(peer, "peer")]
            for phase in phases:
                figure = figures.get(phase)
                row.append(Cell(text.quantities(figure.value, "B")[0] if figure else "–", "number"))
                row.append(Cell(text.ratios(figure.ratio)[0] if figure and figure.ratio else "", "interval"))
            rows.append(row)
    heads = [*layout.head("model", "peer"), *(layout.estimated(phase) for phase in phases)]
    return Table(f"Peak by {how}, and over the dense model's: every figure", heads, rows)
