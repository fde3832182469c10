"""compare: two files of results side by side, with changes beyond noise marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partbench.figures import figures
from partbench.measuring.estimates import SMALLEST_CHANGE, Estimate, change
from partbench.results import Record, Results

SMALLEST_BYTES = 0.01


@dataclass(frozen=True)
class Change:
    """A figure in two files.

    Attributes:
        record: from the later file, or from the earlier one if only that has it.
        quantity: "ratio" to the case's first peer, which cancels the machine's speed at the time; "seconds" for that
            peer itself; "bytes".
        before, after: None if the file has no such figure.
        relative: the relative change (0.2 for 20 % more) if it is beyond noise; None otherwise.
        comparable: whether a change would say something about the code.
    """

    record: Record
    quantity: str
    before: Estimate | None
    after: Estimate | None
    relative: float | None = None
    comparable: bool = True

    @property
    def mark(self) -> str:
        """Return the mark for readers: slower, larger, faster, smaller, refused, failed; or an empty string."""
        if self.record.problem in ("refused", "failed"):
            return self.record.problem
        words = ("larger", "smaller") if self.quantity == "bytes" else ("slower", "faster")
        return "" if self.relative is None else words[self.relative < 0]

    @property
    def worse(self) -> bool:
        """Return whether the change is for the worse, so that its author should look at it."""
        return self.mark in ("slower", "larger", "refused", "failed")


def changes(before: Results, after: Results, smallest: float = SMALLEST_CHANGE) -> list[Change]:
    """Compare every figure of either file, in the order of the later one.

    Only ratios and bytes are compared. The seconds of a case's first peer depend on the machine's speed at the time.
    Ratios are not compared after a single pass, which gives no interval, or if the case's first peer has a figure in
    one file only. The only noise in bytes is the page size of a process.

    Args:
        before, after: two runs.
        smallest: the least relative change of a ratio that is reported.
    """
    old, new = _figures(before), _figures(after)
    records, found = {record.key: record for record in after.records}, []
    for key, record in (records | {r.key: r for r in before.records if r.key not in records}).items():
        (old_quantity, was), (quantity, now) = old.get(key, ("", None)), new.get(key, ("", None))
        comparable = quantity == old_quantity and (
            quantity == "bytes" or (quantity == "ratio" and was.confidence > 0 and now.confidence > 0)
        )
        relative = change(was, now, SMALLEST_BYTES if quantity == "bytes" else smallest) if comparable else None
        found.append(Change(record, quantity or old_quantity, was, now, relative, comparable))
    return found


def _figures(results: Results) -> dict[tuple, tuple[str, Estimate]]:
    found = {}
    for suite in dict.fromkeys(record.suite for record in results.records):
        for row in figures(results.records, suite).itertuples():
            ratio = ("ratio", row.ratio) if row.ratio else ("seconds", row.value)
            found[row.record.key] = ("bytes", row.value) if row.record.unit == "B" else ratio
    return found


def text(before: Results, after: Results, found: Sequence[Change]) -> str:
    """Return a line for each circumstance that differs and for each figure that changed, below a heading."""
    compared, marked = sum(change.comparable for change in found), [change for change in found if change.mark]
    lines = [f"{before.version} on {before.device}  →  {after.version} on {after.device}: {compared} figures compared"]
    old, new = ({**run.machine, **run.versions, **run.settings} for run in (before, after))
    differing = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    lines += [f"{name}: {old.get(name, 'unknown')}  →  {new.get(name, 'unknown')}" for name in differing]
    for each in marked:
        both = f": {each.quantity} {each.before:.3g} to {each.after:.3g}" if each.before and each.after else ""
        percent = "      " if each.relative is None else f"{100 * each.relative:+5.0f}%"
        lines.append(f"{each.mark:>8} {percent}  {each.record.label}{both}")
    lines.append(f"{len(marked)} changed beyond noise." if marked else "Nothing changed beyond noise.")
    return "\n".join(lines)
