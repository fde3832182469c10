"""compare: two files of results side by side; what changed beyond noise is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.estimates import SMALLEST_CHANGE, Estimate, change
from benchmarks.figures import Figure, by_case
from benchmarks.results import Record, Results

SMALLEST_BYTES = 0.01


@dataclass(frozen=True)
class Change:
    """A figure in two files.

    Attributes:
        record: of the later file; of the earlier one if only that has it.
        quantity: "ratio" to the case's first peer, which cancels how fast the machine was at the time; "seconds" for
            that peer itself; "bytes".
        before, after: None where a file has no such figure.
        relative: by how much it changed, as 0.2 for 20 % more, if that is beyond noise; None otherwise.
        comparable: whether a change would say something of the code.
    """

    record: Record
    quantity: str
    before: Estimate | None
    after: Estimate | None
    relative: float | None = None
    comparable: bool = True

    @property
    def worse(self) -> bool:
        """Whether whoever changed the code should look at it."""
        return self.mark in ("slower", "larger", "refused", "failed")

    @property
    def mark(self) -> str:
        """What a reader should look at: slower, larger, faster, smaller, refused, failed; or empty."""
        if self.record.refused:
            return "refused"
        if self.record.missing.startswith("failed"):
            return "failed"
        if self.relative is None:
            return ""
        words = ("larger", "smaller") if self.quantity == "bytes" else ("slower", "faster")
        return words[self.relative < 0]


def changes(before: Results, after: Results, smallest: float = SMALLEST_CHANGE) -> list[Change]:
    """Every figure of either file, in the order of the later one.

    Ratios and bytes are compared. The seconds of a case's first peer are not: they tell how fast the machine was at the
    time. Nor is a ratio after one pass, which has no interval, or one of a case whose first peer has a figure in one
    file only. Bytes have no noise but the pages of a process.

    Args:
        before, after: two runs.
        smallest: the least relative change of a ratio that is reported.
    """
    old, new = _figures(before), _figures(after)
    records = {record.key: record for record in before.records} | {record.key: record for record in after.records}
    found = []
    for key in dict.fromkeys([*(r.key for r in after.records), *(r.key for r in before.records)]):
        (old_quantity, was), (quantity, now) = old.get(key, ("", None)), new.get(key, ("", None))
        comparable = quantity == old_quantity and (
            quantity == "bytes" or (quantity == "ratio" and was.confidence > 0 and now.confidence > 0)
        )
        relative = change(was, now, SMALLEST_BYTES if quantity == "bytes" else smallest) if comparable else None
        found.append(Change(records[key], quantity or old_quantity, was, now, relative, comparable))
    return found


def _figures(results: Results) -> dict[tuple, tuple[str, Estimate]]:
    suites = dict.fromkeys(record.suite for record in results.records)
    cases = [case for suite in suites for case in by_case(results.records, suite)]
    return {figure.record.key: _quantity(figure) for case in cases for figure in case.values()}


def _quantity(figure: Figure) -> tuple[str, Estimate]:
    if figure.record.unit == "B":
        return "bytes", figure.value
    return ("seconds", figure.value) if figure.ratio is None else ("ratio", figure.ratio)


def text(before: Results, after: Results, found: Sequence[Change]) -> str:
    """What changed, a line for each figure that did."""
    compared = sum(change.comparable for change in found)
    lines = [f"{_title(before)}  →  {_title(after)}: {compared} figures compared"]
    marked = [change for change in found if change.mark]
    for each in marked:
        both = f": {each.quantity} {each.before:.3g} to {each.after:.3g}" if each.before and each.after else ""
        lines.append(f"{each.mark:>8} {_percent(each.relative)}  {each.record.label}{both}")
    lines.append(f"{len(marked)} changed beyond noise." if marked else "Nothing changed beyond noise.")
    return "\n".join(lines)


def _title(results: Results) -> str:
    device = results.machine.get("gpu") or results.machine["processor"]
    return f"{results.commit[:9]}{'+' if results.modified else ''} on {device}"


def _percent(relative: float | None) -> str:
    return "      " if relative is None else f"{100 * relative:+5.0f}%"
