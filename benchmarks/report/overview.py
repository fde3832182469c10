"""The page's head: a few numbers for each run, and tables of them over all runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import summary
from benchmarks.report import charts, layout, memory, step, text
from benchmarks.report.layout import Cell, Table
from benchmarks.report.optim import what
from benchmarks.results import Results
from benchmarks.step import UPDATES

Runs = Sequence[tuple[str, Results]]
SCHEME_BYTES = ("parameters", "map", "defaults")


@dataclass(frozen=True)
class Tile:
    """A number that answers a question, and what else to know about it."""

    question: str
    number: str
    more: str


def tiles(results: Results) -> list[Tile]:
    """The answer in one line, as far as it was measured."""
    records = results.records
    found = []
    training = [row for row in summary.speed(records) if row.work == "training"]
    for operator in dict.fromkeys(row.operator for row in training):
        by_kind: dict[tuple, list[summary.SpeedRow]] = {}
        for row in training:
            if row.operator == operator:
                by_kind.setdefault((row.dtype, row.bits, row.defaults), []).append(row)
        # A user takes the fastest backend, but not always the fastest dtype or map.
        best = max((min(rows, key=_mean) for rows in by_kind.values()), key=_mean)
        mean, low, high = best.dense
        more = f"{text.span(low, high)} over {shapes(results, best)} shapes" if best.shapes > 1 else "of one shape"
        found.append(
            Tile(
                f"{text.first_upper(operator)} in training, over dense",
                text.ratio(mean),
                "; ".join(filter(None, (more, faster(best.where)))),
            )
        )
    groups = memory.models(summary.memory(records)).values()
    mine = [row for group in groups for row in group if summary.ours([row.peer])]
    if mine:
        worst = max(mine, key=scheme_bytes)
        group = {row.peer: scheme_bytes(row) for group in groups for row in group if worst in group}
        others = ", ".join(f"{peer} {group[peer]:.2f}" for peer in ("dense", "floor", "paper") if peer in group)
        found.append(Tile("Bytes a parameter, at most", f"{group[worst.peer]:.2f}", f"{worst.model}; {others}"))
    steps = [row for row in summary.step(records) if "series" not in row.case]
    for which, update in enumerate(UPDATES):
        costs = {
            scheme: [cost.value for row in steps if row.scheme == scheme and (cost := step.costs(row)[which])]
            for scheme in dict.fromkeys(row.scheme for row in steps)
        }
        mine = [summary.mean(costs[scheme]) for scheme in summary.ours(costs) if costs[scheme]]
        if mine:
            more = f"the paper's scheme here {text.ratio(summary.mean(costs['paper']))}" if costs.get("paper") else ""
            found.append(Tile(f"Update of the {update}, over dense", text.ratio(min(mine)), more))
    return found


def _mean(row: summary.SpeedRow) -> float:
    return row.dense[0]


def shapes(results: Results, row: summary.SpeedRow) -> str:
    """How many shapes a mean is of, and of how many if some have no figure."""
    names = "operator", "work", "dtype", "bits", "defaults"
    kind = {name: getattr(row, name) for name in names}
    all = {r.case["shape"] for r in results.records if r.suite == "speed" and kind.items() <= r.case.items()}
    return f"{row.shapes}" if row.shapes == len(all) else f"{row.shapes} of {len(all)}"


def scheme_bytes(row: summary.MemoryRow) -> float:
    """Bytes a parameter without the optimiser's state, which no scheme changes."""
    return sum(row.bytes[name] for name in SCHEME_BYTES)


def faster(times: float) -> str:
    """Beside torch.where."""
    if math.isnan(times):
        return ""
    return f"{text.ratio(times)} {'the speed of' if times < 1 else 'faster than'} torch.where"


def tables(runs: Runs) -> list[Table]:
    """One for each suite that any run measured."""
    return [table for table in (_speed(runs), _memory(runs), _step(runs), _optim(runs)) if table.rows]


def _speed(runs: Runs) -> Table:
    rows = [(name, results, row) for name, results in runs for row in summary.speed(results.records)]
    kinds = [{"dtype": row.dtype, "bits": row.bits, "defaults": row.defaults} for _, _, row in rows]
    apart = text.varying(kinds)
    backends = {row.peer for _, _, row in rows}
    axis = charts.Axis(end for _, _, row in rows for end in row.dense)
    found = []
    for (name, results, row), kind in zip(rows, kinds, strict=True):
        mean, low, high = row.dense
        work = f"{text.first_upper(row.operator)}, {text.phrase('work', row.work)}"
        on = [text.phrase(name, kind[name]) for name in apart]
        on += [row.peer.removeprefix("partkernels ")] * (len(backends) > 1)
        cells = [
            Cell(text.ratio(mean), "number strong"),
            Cell("", "strip", strip=charts.Strip(axis.at(low), axis.at(mean), axis.at(high), axis.at(1.0))),
            Cell(text.span(low, high) if row.shapes > 1 else "", "interval"),
            Cell(shapes(results, row), "number"),
            Cell(text.ratio(row.where), "number"),
        ]
        found.append((", ".join([work, *on]), name, cells))
    heads = [*layout.head("speed"), *_heads(runs), Cell("ours over dense", "head estimate", columns=3)]
    return Table(
        "Geometric mean and range over shapes, at the live subnetwork that costs most; below 1 is faster than dense",
        [*heads, *layout.numbers("shapes", "torch.where over ours")],
        _grouped(runs, found),
    )


def _memory(runs: Runs) -> Table:
    found = []
    for name, results in runs:
        for group in memory.models(summary.memory(results.records)).values():
            by_peer = {row.peer: row for row in group}
            for mine in [by_peer[peer] for peer in summary.ours(by_peer)][:1]:  # backends keep the same bytes
                others = [
                    f"{scheme_bytes(by_peer[p]):.2f}" if p in by_peer else "–" for p in ("floor", "paper", "dense")
                ]
                peak = mine.peak_of_dense.get("process", mine.peak_of_dense.get("allocator", math.nan))
                cells = [
                    Cell(f"{scheme_bytes(mine):.2f}", "number strong"),
                    *(Cell(other, "number") for other in others),
                    Cell(f"{mine.map_bits:.2f}", "number"),
                    Cell(text.ratio(peak), "number"),
                ]
                found.append((memory.title(mine), name, cells))
    heads = layout.numbers("ours", "floor", "paper", "dense", "map bits", "peak")
    return Table(
        "Bytes a parameter, without the optimiser's state; bits of our map a weight; our peak in a step over dense",
        [*layout.head("memory"), *_heads(runs), *heads],
        _grouped(runs, found),
    )


def _step(runs: Runs) -> Table:
    found = []
    for name, results in runs:
        rows = [row for row in summary.step(results.records) if "series" not in row.case]
        for group in step.models(rows).values():
            by_scheme = {row.scheme: row for row in group}
            for mine in summary.ours(by_scheme):
                cells = []
                for which in range(len(UPDATES)):
                    paper = step.costs(by_scheme["paper"])[which] if "paper" in by_scheme else None
                    published = group[0].paper
                    cells += [
                        Cell(text.ratios(step.costs(by_scheme[mine])[which])[0], "number strong"),
                        Cell(text.ratios(paper)[0], "number"),
                        Cell(text.ratio(published[which]) if published else "–", "number"),
                    ]
                found.append((step.name(group[0]), name, cells))
    groups = [Cell("", "head", columns=1 + len(_heads(runs)))]
    groups += [Cell(f"update of the {update}", "head number", columns=3) for update in UPDATES]
    return Table(
        "Table 8: an update over a dense step. “Paper” is its scheme on this machine, “published” its own figures",
        [*layout.head("training step"), *_heads(runs), *layout.numbers("ours", "paper", "published") * 2],
        _grouped(runs, found),
        groups=groups,
    )


def _optim(runs: Runs) -> Table:
    found = []
    for name, results in runs:
        groups: dict[str, list[float]] = {}
        for row in summary.optim(results.records):
            if row.ratio:
                label = f"{text.OPTIMIZERS.get(row.optimizer, row.optimizer)}, {what(row)}"
                groups.setdefault(label, []).append(row.ratio.value)
        for label, values in groups.items():
            range_ = text.span(min(values), max(values)) if len(values) > 1 else ""
            mean = Cell(text.ratio(summary.mean(values)), "number strong")
            found.append((label, name, [mean, Cell(range_, "interval")]))
    return Table(
        "A step over one partition, over torch.optim's faster one over all weights; mean and range over models",
        [*layout.head("optimiser"), *_heads(runs), layout.estimated("ours over torch")],
        _grouped(runs, found),
    )


def _grouped(runs: Runs, found: Sequence[tuple[str, str, Sequence[Cell]]]) -> list[list[Cell]]:
    """Rows from a label, a run's name and cells: those with the same label together, whatever run they are of."""
    groups: dict[str, list[list[Cell]]] = {}
    for label, name, cells in found:
        row = [Cell(name, "run"), *cells] if len(runs) > 1 else list(cells)
        groups.setdefault(label, []).append(row)
    return [
        [*layout.leading((label,) if row is rows[0] else (), len(rows)), *row]
        for label, rows in groups.items()
        for row in rows
    ]


def _heads(runs: Runs) -> list[Cell]:
    return layout.head("run") if len(runs) > 1 else []
