"""Sections: charts and a table of every figure, for each suite of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from partbench.figures import figures
from partbench.measuring.estimates import Estimate
from partbench.report import charts, text
from partbench.report.tables import Cell, Table
from partbench.results import Record, Results

SPEED = """Time of a call over the dense layer's; left of 1 is faster. Shapes are M×N×K of linear layers, and input and
weight of convolutions."""
MEMORY = """Bytes of models in training, over the dense model's. The floor is the least that any assignment with these
proportions takes. Figures by allocator are the most bytes of tensors in a step; those by process are the most resident
bytes of a separate process in a step, beyond what it had before it made the model."""
STEP = "Time of an update of the parameters or of the hyperparameters, or of both, over a dense training step."
OPTIM = "Time of a step over the weights of one partition, over that of torch.optim's fused step over all weights."
# For each suite: title, description, base of the ratios, and the entries that the cases of a chart share.
SUITES = {
    "speed": ("Speed of layers", SPEED, "dense", ("operator", "work", "dtype")),
    "memory": ("Memory", MEMORY, "dense", ("figure",)),
    "step": ("Training step", STEP, "dense", ("model",)),
    "optim": ("Optimiser", OPTIM, "torch, fused", ("optimizer",)),
}


@dataclass(frozen=True)
class Section:
    """The section of one suite of a run."""

    title: str
    note: str
    charts: Sequence[Markup]
    table: Table


def sections(results: Results) -> list[Section]:
    """Return a section for each suite that was measured."""
    found = []
    for suite, (title, note, base, shared) in SUITES.items():
        if records := [record for record in results.records if record.suite == suite]:
            cases = [record.case for record in records]
            names = text.varying(cases) or list(cases[0])[:1]
            note = " ".join([f"{note} All: {text.constant(cases, but=names)}.", *_models(records)])
            table = _every(results, records, names, base)
            found.append(Section(title, note, _charts(records, names, shared), table))
    return found


def _models(records: Sequence[Record]) -> list[str]:
    """Return a sentence on each model of memory: the partitioned share, and whether figures were computed."""
    found = {}
    for record in records:
        if record.suite == "memory" and (facts := record.facts):
            share = text.percent(facts["weights"] / facts["parameters"])
            dense, how = facts["dense layers"] or "none", facts.get("how", "measured")
            found[record.case["model"]] = f"{share} of the parameters partitioned, dense layers {dense}, figures {how}"
    return [f"{model}: {about}." for model, about in found.items()]


def _charts(records: Sequence[Record], names: Sequence[str], shared: Sequence[str]) -> list[Markup]:
    """Plot a chart for each combination of the shared entries, with a row for each case that has a ratio."""
    shown: dict[str, dict[str, dict[str, Estimate]]] = {}
    for row in figures(records, records[0].suite).itertuples():
        case = row.record.case
        if row.ratio:
            label = text.phrases(case, [name for name in names if name not in shared])
            rows = shown.setdefault(text.phrases(case, shared), {})
            rows.setdefault(label, {})[row.peer] = row.ratio
    return [charts.dots(title, rows) for title, rows in shown.items()]


def _every(results: Results, records: Sequence[Record], names: Sequence[str], base: str) -> Table:
    """Return a table with a row for each record, and the reason in place of a missing figure."""
    has_rooflines = any(shortest(record, results) for record in records)
    heads = [*names, "peer", "median", f"over {base}"]
    heads += ["of the roofline"] * has_rooflines
    known = {row.record.key: row for row in figures(records, records[0].suite).itertuples()}
    cases = {key: i for i, key in enumerate(dict.fromkeys(record.key[:-1] for record in records))}
    rows: list[list[Cell]] = []
    for record in sorted(records, key=lambda record: cases[record.key[:-1]]):
        row: list[Cell] = [*(str(record.case.get(name, "")) for name in names), record.peer]
        if (figure := known.get(record.key)) is None:
            row.append(text.why(record))
        else:
            row += [text.quantities(figure.value, record.unit), text.ratios(figure.ratio) if figure.ratio else ""]
            if has_rooflines:
                least = shortest(record, results)
                row.append(text.percent(least / figure.value.value) if least and figure.value.value else "–")
        rows.append(row)
    return Table("Every figure", heads, rows, leading=len(names))


def shortest(record: Record, results: Results) -> float | None:
    """Return the shortest possible time by this machine's rooflines [s]; None if they or the facts are unknown."""
    matmul, copy = results.rooflines.get(f"matmul {record.case.get('dtype')}"), results.rooflines.get("copy")
    if not matmul or not copy or not {"flops", "bytes"} <= record.facts.keys():
        return None
    return max(record.facts["flops"] / matmul, record.facts["bytes"] / copy)


def problems(records: Sequence[Record], *kinds: str) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return missing figures of these kinds of Record.problem: kind, suite, peer and reason, and the cases in words."""
    found: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if record.problem in kinds:
            names = text.varying([other.case for other in records if other.suite == record.suite])
            reason = record.refused or record.missing.removeprefix("failed: ") or "no samples were taken"
            key = record.problem, record.suite, record.peer, reason
            found.setdefault(key, []).append(text.phrases(record.case, names or None))
    return list(found.items())
