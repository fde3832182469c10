"""speed: for each operator, a dot plot of each work and every figure in tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Figure, by_case
from benchmarks.report import charts, every, text
from benchmarks.report.layout import Part, Section, Table
from benchmarks.results import Record, Results
from benchmarks.summary import ours, unforced

Cases = Sequence[dict[str, Figure]]


def section(results: Results) -> Section | None:
    """Of one run; None if it has no such records."""
    records = [record for record in results.records if record.suite == "speed"]
    if not records:
        return None
    common = text.constant([record.case for record in records], but=("operator", "work", "shape"))
    note = (
        "Time of a call over the time of the dense layer's, on a logarithmic axis; left of 1 is faster. "
        "A line for each shape, at the live subnetwork k that costs ours most; the number at its right is ours. "
        f"All: {common}."
    )
    operators = dict.fromkeys(record.case["operator"] for record in records)
    return Section(
        "speed",
        "Speed of layers",
        note,
        [_part([r for r in records if r.case["operator"] == operator], operator, results) for operator in operators],
    )


def _part(records: Sequence[Record], operator: str, results: Results) -> Part:
    cases = by_case(records, "speed")
    peers = charts.in_order(record.peer for record in records)
    shape = "M×N×K" if operator == "linear" else "input, weight"
    return Part(
        text.first_upper(operator),
        f"Shapes are {shape}.",
        charts.legend(peers),
        _dots(cases, {tuple(record.case.items()) for record in records if record.refused and ours([record.peer])}),
        _tables(records, results),
    )


def _dots(cases: Cases, refused: set[tuple]) -> list[charts.Dots]:
    """A chart for each work and dtype, all on one axis; `refused` are the cases in which ours was."""
    several = text.varying([_case(case) for case in cases])
    apart = ["work", *(name for name in several if name in ("dtype", "device"))]
    within = ["shape", *(name for name in several if name not in (*apart, "shape", "active"))]
    by_title: dict[str, dict[str, Cases]] = {}
    for case in cases:
        title = text.first_upper(text.phrases(_case(case), apart))
        by_title.setdefault(title, {}).setdefault(text.phrases(_case(case), within), []).append(case)
    shown = {
        title: {label: max(same, key=_cost) for label, same in by_label.items()} for title, by_label in by_title.items()
    }
    axis = charts.Axis(
        charts.ends(figure.ratio for lines in shown.values() for case in lines.values() for figure in case.values())
    )
    found = []
    for title, lines in shown.items():
        peers = charts.in_order(peer for case in lines.values() for peer in case)
        rows = []
        for label, case in lines.items():
            k = " · " + text.phrase("active", _case(case)["active"]) if "active" in several else ""
            nothing = "refused" if tuple(_case(case).items()) in refused else "no figure"
            rows.append(_row(label + k, case, peers, axis, nothing))
        found.append(charts.Dots(title, axis.ticks, rows, len(peers)))
    return found


def _row(label: str, case: dict[str, Figure], peers: Sequence[str], axis: charts.Axis, nothing: str) -> charts.Row:
    known = {peer: case[peer] for peer in peers if peer in case and case[peer].ratio}
    dots = []
    for peer, figure in known.items():
        seconds = text.quantities(figure.value, "s")[0]
        about = charts.about(peer, figure.ratio, seconds)
        dots.append(charts.Dot.of(axis, figure.ratio, peer, about, peers.index(peer)))
    mine = {peer.removeprefix("partkernels "): text.ratio(known[peer].ratio.value) for peer in ours(known)}
    values = list(mine.values()) if len(mine) == 1 else [f"{backend} {value}" for backend, value in mine.items()]
    return charts.Row(label, " · ".join(values) or nothing, dots, bool(values))


def _case(case: dict[str, Figure]) -> text.Case:
    return next(iter(case.values())).case


def _cost(case: dict[str, Figure]) -> float:
    """Of the dearest of ours, by the plans that it chose."""
    return max((case[peer].ratio.value for peer in unforced(case) if case[peer].ratio), default=0.0)


def _tables(records: Sequence[Record], results: Results) -> list[Table]:
    """A table for each work."""
    several = [name for name in text.varying([r.case for r in records]) if name not in ("work", "shape")]
    names = ["shape", *several]

    def roofline(figure: Figure) -> str:
        least = shortest(figure.record, results)
        return text.percent(least / figure.value.value) if least and figure.value.value else "–"

    return [
        every.table(
            f"{text.first_upper(text.phrase('work', work))}: every figure",
            [record for record in records if record.case["work"] == work],
            ["k" if name == "active" else name for name in names],
            lambda record: [str(record.case[name]) for name in names],
            more={"of the roofline": roofline},
        )
        for work in dict.fromkeys(record.case["work"] for record in records)
    ]


def shortest(record: Record, results: Results) -> float | None:
    """The shortest possible time by this machine's rooflines [s]; None if they or the facts are not known."""
    matmul, copy = results.rooflines.get(f"matmul {record.case.get('dtype')}"), results.rooflines.get("copy")
    if not matmul or not copy or not {"flops", "bytes"} <= record.facts.keys():
        return None
    return max(record.facts["flops"] / matmul, record.facts["bytes"] / copy)
