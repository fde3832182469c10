"""Sections: charts and tables of every figure, for each suite of one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
from markupsafe import Markup

from partbench import summary
from partbench.figures import figures, ours, unforced
from partbench.measuring.estimates import Estimate
from partbench.report import charts, text
from partbench.report.charts import Row, Styles
from partbench.report.tables import Table, number, ratio, reason, styled
from partbench.report.tables import estimate as cell
from partbench.results import Record, Results

SUITES = {"speed": "Speed of layers", "memory": "Memory", "step": "Training step", "optim": "Optimiser"}
PIECES = {"parameters": "parameters", "map": "map", "defaults": "defaults", "state": "the optimiser's state"}
SPEED = """Time of a call over the time of the dense layer's, on a logarithmic axis; left of 1 is faster. A line for
each shape, at the active subnetwork k in which ours is slowest; the number at its right is ours."""
MEMORY = "Bytes of models in training."
BYTES = """Bytes a parameter of the dense model. The floor is the least that any assignment with these proportions
takes. Models marked “by arithmetic” are too large to be made here; their figures are computed."""
PEAKS = {
    "allocator": "The most bytes of tensors in a step, by PyTorch's allocator.",
    "process": "The most resident bytes of a process of its own in a step, beyond what it had before it made the "
    "model: with what libraries and kernels take for themselves.",
}
STEP = """What an update of the parameters and one of the hyperparameters cost, over a dense training step: the mean
over active subnetworks, weighted by how often training draws each."""
TABLE_8 = "The crosses are the paper's Table 8 as published, measured on an RTX 3080; the number at the right is ours."
GROWTH = "Cost over a dense step of the same network, as one thing grows and the others stay."
OPTIM = "A step over the weights of one partition, over the faster of torch.optim's two steps over all weights."


@dataclass(frozen=True)
class Part:
    """Charts that share a legend (colour, sign and name of each peer or piece), and the tables with their figures."""

    title: str = ""
    note: str = ""
    legend: Sequence[tuple[str, str, str]] = ()
    charts: Sequence[Markup] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """The section of one suite of a run."""

    name: str
    note: str
    parts: Sequence[Part] = field(default_factory=list)

    @property
    def title(self) -> str:
        return SUITES[self.name]


def sections(results: Results) -> list[Section]:
    """Return a section for each suite that was measured."""
    found = []
    for name, (note, parts, but) in _SECTIONS.items():
        if records := [record for record in results.records if record.suite == name]:
            common = text.constant([record.case for record in records], but=but)
            found.append(Section(name, f"{note} All: {common}.", parts(records, results)))
    return found


def every(
    title: str,
    records: Sequence[Record],
    leading: Callable[[Record], Mapping[str, str]],
    *,
    over: str = "over dense",
    held: Callable[[Record, Estimate | None], Estimate | None] = lambda record, ratio: ratio,
    more: Mapping[str, Callable[[Record, Estimate], str]] | None = None,
) -> Table:
    """Return a table with a row for each record, and the reason in place of a missing figure.

    Args:
        leading: returns the columns that identify a case; its peers share them.
        over, held: the name of the baseline, and a function of a record and its ratio to the base that returns its
            ratio to that baseline.
        more: further columns of numbers.
    """
    more, rows = more or {}, []
    known = {row.record.key: row for row in figures(records, records[0].suite).itertuples()}
    cases = {key: i for i, key in enumerate(dict.fromkeys(record.key[:-1] for record in records))}
    for record in sorted(records, key=lambda record: cases[record.key[:-1]]):
        row = {**leading(record), "peer": styled("peer", record.peer)}
        if (figure := known.get(record.key)) is None:
            row["median time"] = reason(record)
        else:
            value, beside = figure.value, held(record, figure.ratio)
            row |= {"median time": cell(text.quantities(value, record.unit)), over: ratio(beside) if beside else ""}
            row |= {name: number(of(record, value)) for name, of in more.items()}
        rows.append(row)
    heads = [*leading(records[0]), "peer", "median time", over, *more]
    return Table(title, rows, leading=len(leading(records[0])), heads=heads)


def _speed(records: Sequence[Record], results: Results) -> list[Part]:
    parts = []
    for operator in dict.fromkeys(record.case["operator"] for record in records):
        mine = [record for record in records if record.case["operator"] == operator]
        several = text.varying([record.case for record in mine])
        names = ["shape", *(name for name in several if name not in ("work", "shape"))]

        def leading(record: Record, names: Sequence[str] = names) -> dict[str, str]:
            return {"k" if name == "active" else name: str(record.case[name]) for name in names}

        def roofline(record: Record, value: Estimate) -> str:
            least = shortest(record, results)
            return text.percent(least / value.value) if least and value.value else "–"

        works = {w: [r for r in mine if r.case["work"] == w] for w in dict.fromkeys(r.case["work"] for r in mine)}
        titles = {work: f"{text.first_upper(text.phrase('work', work))}: every figure" for work in works}
        more = {"of the roofline": roofline}
        tables = [every(titles[work], some, leading, more=more) for work, some in works.items()]
        styles = Styles.of(record.peer for record in mine)
        note = f"Shapes are {'M×N×K' if operator == 'linear' else 'input, weight'}."
        parts.append(Part(text.first_upper(operator), note, styles.legend(), _speed_charts(mine, several), tables))
    return parts


def _speed_charts(records: Sequence[Record], several: Sequence[str]) -> list[Markup]:
    """Plot a chart for each work and dtype, all on one axis, with the slowest active subnetwork for each shape."""
    found = figures(records, "speed")
    apart = ["work", *(name for name in several if name in ("dtype", "device"))]
    within = ["shape", *(name for name in several if name not in (*apart, "shape", "active"))]
    refused = {tuple(r.case.items()) for r in records if r.refused and ours([r.peer])}
    shown: dict[str, dict[str, pd.DataFrame]] = {}
    for _, case in found.groupby("key", sort=False):
        facts = case.record.iloc[0].case
        lines, label = shown.setdefault(text.phrases(facts, apart), {}), text.phrases(facts, within)
        if label not in lines or _cost(case) > _cost(lines[label]):
            lines[label] = case
    limits = charts.span(ratio for lines in shown.values() for case in lines.values() for ratio in case.ratio)
    drawn = []
    for title, lines in shown.items():
        styles, rows = Styles.of(peer for case in lines.values() for peer in case.peer), []
        for label, case in lines.items():
            facts = case.record.iloc[0].case
            k = " · " + text.phrase("active", facts["active"]) if "active" in several else ""
            rows.append(_line(label + k, case, "s", "refused" if tuple(facts.items()) in refused else ""))
        drawn.append(charts.dots(text.first_upper(title), rows, styles, limits))
    return drawn


def _line(label: str, case: pd.DataFrame, unit: str, no: str = "") -> Row:
    """Build a line of a dot plot from the figures of one case."""
    known = [row for row in case.itertuples() if row.ratio]
    said = {row.peer: text.quantities(row.value, unit)[0] for row in known}
    return Row.of(label, {row.peer: row.ratio for row in known}, said, no)


def _cost(case: pd.DataFrame) -> float:
    """Return the largest ratio of our peers that choose their plan themselves."""
    mine = case[case.peer.isin(unforced(case.peer)) & case.ratio.notna()]
    return max((ratio.value for ratio in mine.ratio), default=0.0)


def shortest(record: Record, results: Results) -> float | None:
    """Return the shortest possible time by this machine's rooflines [s]; None if they or the facts are unknown."""
    matmul, copy = results.rooflines.get(f"matmul {record.case.get('dtype')}"), results.rooflines.get("copy")
    if not matmul or not copy or not {"flops", "bytes"} <= record.facts.keys():
        return None
    return max(record.facts["flops"] / matmul, record.facts["bytes"] / copy)


def _memory(records: Sequence[Record], results: Results) -> list[Part]:
    rows, parts = summary.memory(records), []
    if len(rows):
        rows = rows.assign(name=[title(row) for row in rows.itertuples()])
        rows = rows.assign(optimizer=[text.OPTIMIZERS.get(o, o) for o in rows.optimizer])
        drawn, share = [], []
        for _, group in rows.groupby(summary.MODEL, sort=False):
            first = next(group.itertuples())
            pieces = {row.peer: {name: getattr(row, name) for name in PIECES} for row in group.itertuples()}
            drawn.append(charts.bars(f"{first.name}, {first.optimizer}", pieces, rows["all"].max()))
            about = {"model": first.model, "optimiser": first.optimizer, "batch": number(str(first.batch))}
            about |= {"of the parameters partitioned": number(f"{100 * first.partitioned:.1f} %")}
            how = "by arithmetic" if first.by_arithmetic else "measured"
            share.append(about | {"layers that stay dense": first.dense_layers or "none", "figures are": how})
        shown = rows.assign(bits=[number(f"{bits:.2f}") for bits in rows.map_bits])
        names = ["model", "peer", *PIECES.values(), "all", "map, bits a weight"]
        every = Table.of("Bytes a parameter: every figure", shown[["name", "peer", *PIECES, "all", "bits"]], names)
        legend = [(charts.PIECES[name], "■", label) for name, label in PIECES.items()]
        parts.append(Part("Kept between steps", BYTES, legend, drawn, [Table("What is partitioned", share), every]))
    return parts + _peaks(records)


def title(row) -> str:
    """Return a model's name, with a note if its figures were computed."""
    return row.model + (" (by arithmetic)" if row.by_arithmetic else "")


def _peaks(records: Sequence[Record]) -> list[Part]:
    """Return a part for each way of measuring, with a chart for each phase."""
    found, parts = figures(records, "memory"), []
    found = found[found.figure.str.startswith("peak of ")]
    words = found.figure.str.extract("peak of (?P<phase>.*), by (?P<how>.*)")
    found = found.assign(**words, label=[f"{m}, batch {b}" for m, b in zip(found.model, found.batch, strict=True)])
    for how, measured in found.groupby("how", sort=False):
        styles, limits = Styles.of(measured.peer), charts.span(measured.ratio)
        drawn, cells = [], {}
        for phase, some in measured.groupby("phase", sort=False):
            rows = []
            for (label, _), case in some.groupby(["label", "key"], sort=False):
                rows.append(_line(label, case, "B"))
                for row in case.itertuples():
                    peak = text.quantities(row.value, "B")[0], text.ratios(row.ratio)[0] if row.ratio else ""
                    about = {"model": label, "peer": styled("peer", row.peer)}
                    cells.setdefault((label, row.optimizer, row.peer), about)[phase] = cell(peak)
            drawn.append(charts.dots(text.first_upper(phase), rows, styles, limits))
        note = f"{PEAKS.get(how, '')} Over the dense model's; the number at the right is ours."
        table = Table(f"Peak by {how}, and over the dense model's: every figure", _together(cells))
        parts.append(Part(f"Peak, by {how}", note, styles.legend(), drawn, [table]))
    return parts


def _together(cells: Mapping[tuple, Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return rows with those of a model together, in the order of each model's first row."""
    models = list(dict.fromkeys(key[:2] for key in cells))
    return [cells[key] for key in sorted(cells, key=lambda key: models.index(key[:2]))]


def _step(records: Sequence[Record], results: Results) -> list[Part]:
    rows, parts = summary.step(records), []
    if len(rows):
        table, growing = rows[rows.series == ""], rows[rows.series != ""]
        parts += [_table_8(table)] if len(table) else []
        parts += [_growth(growing)] if len(growing) else []
    names = [n for n in text.varying([r.case for r in records]) if n not in ("model", "active", "optimizer")]

    def leading(record: Record) -> dict[str, str]:
        case = record.case
        return {"model": case["model"], "with": text.phrases(case, names), "k": str(case["active"])}

    return [
        *parts,
        Part("Each active subnetwork", tables=[every("By active subnetwork k: every figure", records, leading)]),
    ]


def by_model(rows: pd.DataFrame) -> list[tuple[str, dict[str, object]]]:
    """Return the name of each model of Table 8 with its rows by scheme."""
    case = [name for name in rows if name not in ("scheme", "paper", "place", "iteration", *summary.UPDATES)]
    groups = rows.groupby(case, sort=False, dropna=False)
    return [
        (text.phrases(group.iloc[0], ["model", "batch"]), {row.scheme: row for row in group.itertuples()})
        for _, group in groups
    ]


def _table_8(rows: pd.DataFrame) -> Part:
    published = [charts.PUBLISHED] * any(rows.paper)
    styles = Styles.of([*rows.scheme, *published])
    costs = [cost for update in summary.UPDATES for cost in rows[update]]
    limits = charts.span([*costs, *(Estimate(v, v, v, 0) for paper in rows.paper if paper for v in paper)])
    drawn = []
    for which, update in enumerate(summary.UPDATES):
        lines = []
        for name, schemes in by_model(rows):
            found = {scheme: cost for scheme, row in schemes.items() if (cost := getattr(row, update))}
            if paper := next(iter(schemes.values())).paper:
                found[charts.PUBLISHED] = Estimate(paper[which], paper[which], paper[which], 0)
            lines.append(Row.of(name, found))
        drawn.append(charts.dots(f"Update of the {update}", lines, styles, limits))
    papers = [[number(text.ratio(value)) for value in paper or (math.nan,) * 2] for paper in rows.paper]
    shown = pd.DataFrame({"model": [text.phrases(row, ["model", "batch"]) for _, row in rows.iterrows()]})
    shown = shown.assign(**{name: list(rows[name]) for name in ("scheme", *summary.UPDATES, "iteration")})
    shown = shown.assign(first=[both[0] for both in papers], second=[both[1] for both in papers])
    names = ["model", "scheme", *summary.UPDATES, "both", *(f"{update}, published" for update in summary.UPDATES)]
    return Part("Table 8", TABLE_8, styles.legend(), drawn, [Table.of("Cost over a dense step", shown, names)])


def _growth(rows: pd.DataFrame) -> Part:
    styles = Styles.of(rows.scheme)
    limits = charts.span(cost for update in summary.UPDATES for cost in rows[update])
    drawn = []
    for series, points in rows.groupby("series", sort=False):
        for update in summary.UPDATES:
            lines = {
                scheme: [
                    (row.place, cost, f"{series} {row.place:g}, {charts.tip(scheme, cost)}")
                    for row in some.sort_values("place").itertuples()
                    if (cost := getattr(row, update))
                ]
                for scheme, some in points.groupby("scheme", sort=False)
            }
            drawn.append(charts.lines(f"{text.first_upper(update)}, by {series}", lines, styles, limits))
    points = [f"{row.series} {row.place:g}" for row in rows.itertuples()]
    shown = rows.assign(point=points)[["point", "scheme", *summary.UPDATES]]
    table = Table.of("Growth: every point", shown, list(shown))
    return Part("Growth", GROWTH, styles.legend(), drawn, [table])


def _optim(records: Sequence[Record], results: Results) -> list[Part]:
    rows = summary.optim(records)
    rows = rows[rows.ratio.notna()]
    over = {(*(row[n] for n in ("model", "optimizer", "update", "peer")),): row.ratio for _, row in rows.iterrows()}

    def leading(record: Record) -> dict[str, str]:
        case, share = record.case, text.percent(record.facts["share"])
        optimizer = text.OPTIMIZERS.get(case["optimizer"], case["optimizer"])
        return {"model": case["model"], "optimiser": optimizer, "partition": str(case["update"]), "share": share}

    def held(record: Record, _: Estimate | None) -> Estimate | None:
        return over.get((*(record.case[name] for name in ("model", "optimizer", "update")), record.peer))

    drawn = []
    for optimizer, some in rows.groupby("optimizer", sort=False):
        lines = [Row.of(f"{row.model}, {partition(row)}", {row.peer: row.ratio}) for row in some.itertuples()]
        limits = charts.span(rows.ratio)
        drawn.append(charts.dots(text.OPTIMIZERS.get(optimizer, optimizer), lines, Styles.of(some.peer), limits))
    table = every("Optimisers' steps: every figure", records, leading, over="over torch's faster", held=held)
    return [Part(charts=drawn, tables=[table])]


def partition(row) -> str:
    return f"partition {row.update}, {text.percent(row.share)} of the weights"


# For each suite: a description of its figures, a function that makes its parts, and entries that the note leaves out.
_SECTIONS = {
    "speed": (SPEED, _speed, ("operator", "work", "shape")),
    "memory": (MEMORY, _memory, ("figure", "model")),
    "step": (STEP, _step, ("model",)),
    "optim": (OPTIM, _optim, ("model", "optimizer", "update")),
}
