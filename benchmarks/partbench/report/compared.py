"""The comparison of two runs: counts, changes, and every figure of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partbench.compare import Change
from partbench.measuring.estimates import Estimate
from partbench.report import provenance, text
from partbench.report.sections import SUITES
from partbench.report.tables import Cells, Table, estimate, number, reason, styled
from partbench.results import Results

# The states that readers should see first come first.
SIGNS = {"refused": "✕", "failed": "✕", "slower": "▲", "larger": "▲", "faster": "▼", "smaller": "▼"}
STATES = (*SIGNS, "within noise", "only before", "only after", "not compared", "no figure")


@dataclass(frozen=True)
class Comparison:
    """Two runs and the change of each figure."""

    before: Results
    after: Results
    changes: Sequence[Change]

    def counts(self) -> list[tuple[str, int, str]]:
        """Return style, number and name of each state that occurs, and always of "within noise"."""
        states = [state(change) for change in self.changes]
        found = [(style(name), states.count(name), name) for name in STATES]
        return [each for each in found if each[1] or each[2] == "within noise"]

    def changed(self) -> Table:
        """Return the marked changes, the worst and the largest first."""
        order = {"slower": 2, "larger": 2, "faster": 3, "smaller": 3}
        marked = [change for change in self.changes if change.mark]
        marked.sort(key=lambda change: (order.get(change.mark, 1), -abs(change.relative or 0)))
        return self._table("Changed beyond noise", marked, with_suite=True)

    def by_suite(self) -> list[Table]:
        """Return tables with every figure of either file."""
        suites = {suite: [c for c in self.changes if c.record.suite == suite] for suite in SUITES}
        return [self._table(f"{SUITES[suite]}: every figure", found) for suite, found in suites.items() if found]

    def _table(self, title: str, changes: Sequence[Change], *, with_suite: bool = False) -> Table:
        names = {}
        for suite in {change.record.suite for change in changes}:
            cases = [change.record.case for change in self.changes if change.record.suite == suite]
            names[suite] = text.varying(cases) or list(cases[0])
        rows: list[Cells] = []
        for change in changes:
            record, what = change.record, state(change)
            percent = "" if change.relative is None else f"{100 * change.relative:+.0f} %".replace("-", "\u2212")
            row = {" ": styled("mark", f"{SIGNS.get(what, '')} {what}".strip()), "": number(percent, strong=True)}
            row |= {"suite": record.suite} if with_suite else {}
            row |= {"case": styled("case", text.phrases(record.case, names[record.suite]))}
            is_over_dense = change.quantity == "ratio" and record.suite != "optim"
            row |= {"peer": styled("peer", record.peer), "quantity": "over dense" if is_over_dense else change.quantity}
            gone = change.after is None and record.problem
            row |= {"before": reason(record) if gone and not change.before else _figure(change, change.before)}
            rows.append(row | {"after": reason(record) if gone else _figure(change, change.after)})
        return Table(title, rows, leading=0, styles=[style(state(change)) for change in changes])

    def circumstances(self) -> Table:
        """Return the circumstances of both runs; rows that differ are marked."""
        before, after = provenance.facts(self.before), provenance.facts(self.after)
        rows, styles = [], []
        for heading in before:
            for name in dict.fromkeys([*before[heading], *after[heading]]):
                both = [each[heading].get(name, "–") for each in (before, after)]
                styles.append("differs" if both[0] != both[1] else "")
                row = {"": name, " ": styled("mark", "≠ differs" if styles[-1] else "")}
                rows.append(row | {"before": styled("fact", both[0]), "after": styled("fact", both[1])})
        return Table("Where and with what", rows, styles=styles)


def state(change: Change) -> str:
    """Return one of STATES."""
    if change.mark:
        return change.mark
    if change.before is None or change.after is None:
        return "only after" if change.after else "only before" if change.before else "no figure"
    return "within noise" if change.comparable else "not compared"


def style(state: str) -> str:
    """Return the CSS class of rows in a state."""
    known = {"faster": "better", "smaller": "better", "only before": "only", "only after": "only"}
    return known.get(state, "worse" if state in SIGNS else "")


def _figure(change: Change, found: Estimate | None) -> str:
    return estimate(text.ratios(found) if change.quantity == "ratio" else text.quantities(found, change.record.unit))
