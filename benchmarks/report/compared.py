"""The comparison of two runs: counts, what changed, and every figure of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare import Change
from benchmarks.estimates import Estimate
from benchmarks.report import layout, provenance, text
from benchmarks.report.layout import Cell, Table
from benchmarks.results import Results

# From what a reader should see first.
SIGNS = {"refused": "✕", "failed": "✕", "slower": "▲", "larger": "▲", "faster": "▼", "smaller": "▼"}
GOOD = ("faster", "smaller")
STATES = (*SIGNS, "within noise", "only before", "only after", "not compared", "no figure")
SUITES = {"speed": "Speed of layers", "memory": "Memory", "step": "Training step", "optim": "Optimiser"}


@dataclass(frozen=True)
class Count:
    """How many figures are in a state; style as of their rows."""

    number: int
    name: str
    style: str


@dataclass(frozen=True)
class Comparison:
    """Two runs and what became of each figure."""

    before: Results
    after: Results
    changes: Sequence[Change]

    def state(self, change: Change) -> str:
        """One of STATES."""
        if change.mark:
            return change.mark
        if change.before is None or change.after is None:
            return "only after" if change.after else "only before" if change.before else "no figure"
        if not change.comparable:
            return "not compared"
        return "within noise"

    def counts(self) -> list[Count]:
        """Of each state that occurs; those within noise always."""
        states = [self.state(change) for change in self.changes]
        return [
            Count(states.count(name), name, style(name)) for name in STATES if name in states or name == "within noise"
        ]

    def changed(self) -> Table:
        """The changes that are marked, the worst and the largest first."""
        marked = [change for change in self.changes if change.mark]
        order = [{"slower": 2, "larger": 2, "faster": 3, "smaller": 3}.get(change.mark, 1) for change in marked]
        ranked = sorted(zip(order, marked, strict=True), key=lambda each: (each[0], -abs(each[1].relative or 0)))
        return self._table("Changed beyond noise", [change for _, change in ranked], with_suite=True)

    def by_suite(self) -> list[Table]:
        """Every figure of either file."""
        suites = dict.fromkeys(change.record.suite for change in self.changes)
        return [
            self._table(
                f"{SUITES.get(suite, suite)}: every figure", [c for c in self.changes if c.record.suite == suite]
            )
            for suite in suites
        ]

    def _table(self, title: str, changes: Sequence[Change], *, with_suite: bool = False) -> Table:
        cases: dict[str, list[text.Case]] = {}
        for change in self.changes:
            cases.setdefault(change.record.suite, []).append(change.record.case)
        names = {suite: text.varying(every) or list(every[0]) for suite, every in cases.items()}
        rows = []
        for change in changes:
            record, state = change.record, self.state(change)
            percent = "" if change.relative is None else f"{100 * change.relative:+.0f} %".replace("-", "\u2212")
            rows.append(
                [
                    Cell(f"{SIGNS[state]} {state}" if state in SIGNS else state, "mark"),
                    Cell(percent, "number strong"),
                    *([Cell(record.suite)] if with_suite else []),
                    Cell(text.phrases(record.case, names[record.suite]), "case"),
                    Cell(record.peer, "peer"),
                    Cell("over dense" if change.quantity == "ratio" and record.suite != "optim" else change.quantity),
                    *_figures(change),
                ]
            )
        heads = layout.head("", "", *["suite"] * with_suite, "case", "peer", "quantity")
        heads += [layout.estimated("before"), layout.estimated("after")]
        return Table(title, heads, rows, [style(self.state(change)) for change in changes])

    def circumstances(self) -> Table:
        """Where and with what both were made; rows that differ are marked."""
        facts = provenance.facts(self.before), provenance.facts(self.after)
        rows, styles = [], []
        for heading in facts[0]:
            for name in dict.fromkeys([*facts[0][heading], *facts[1][heading]]):
                values = [each[heading].get(name, "–") for each in facts]
                differs = values[0] != values[1]
                mark = Cell("≠ differs" if differs else "", "mark")
                rows.append([Cell(name, "head"), mark, *(Cell(value, "fact") for value in values)])
                styles.append("differs" if differs else "")
        return Table("Where and with what", layout.head("", "", "before", "after"), rows, styles)


def style(state: str) -> str:
    """The class of rows in a state."""
    return "better" if state in GOOD else "worse" if state in SIGNS else "only" if state.startswith("only") else ""


def _figures(change: Change) -> list[Cell]:
    """Before and after; the reason where the later file has no figure."""
    if change.after is None and (change.record.refused or change.record.missing):
        reason = Cell(text.why(change.record), "reason", columns=2 if change.before else 4)
        return [*(_figure(change, change.before) if change.before else []), reason]
    return [*_figure(change, change.before), *_figure(change, change.after)]


def _figure(change: Change, estimate: Estimate | None) -> list[Cell]:
    if change.quantity == "ratio":
        return layout.estimate(text.ratios(estimate))
    return layout.estimate(text.quantities(estimate, change.record.unit))
