"""Figures: what records say, as estimates, beside the peer that everything is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from benchmarks.estimates import Estimate, passes, ratios
from benchmarks.results import Record


@dataclass(frozen=True)
class Figure:
    """One peer's figure in a case, and its base's: that of the case's first peer, which a user has today."""

    record: Record
    base: Record | None = None

    @property
    def case(self) -> dict[str, str | int | float]:
        return self.record.case

    @property
    def peer(self) -> str:
        return self.record.peer

    @cached_property
    def value(self) -> Estimate:
        """Seconds a call, or bytes."""
        return Estimate.of(passes(self.record.samples))

    @cached_property
    def ratio(self) -> Estimate | None:
        """To the base; None for the base itself, and where it has no figure."""
        return None if self.base is None else self.over(self.base)

    def over(self, other: Record | Figure) -> Estimate | None:
        """The ratio to another peer of the same case, from samples taken side by side; None if there are none."""
        other = other.record if isinstance(other, Figure) else other
        if len(other.samples) != len(self.record.samples):
            return None
        if self.record.unit == "B" and not other.samples[0][0]:
            return None
        return Estimate.of(ratios(self.record.samples, other.samples))


def by_case(records: Iterable[Record], suite: str) -> list[dict[str, Figure]]:
    """For each case of a suite, the figures of its peers by name; those without samples are left out."""
    cases: dict[tuple, list[Record]] = {}
    for record in records:
        if record.suite == suite:
            cases.setdefault(tuple(record.case.items()), []).append(record)
    found = []
    for group in cases.values():
        base = group[0] if group[0].samples else None
        found.append({r.peer: Figure(r, None if r is base else base) for r in group if r.samples})
    return [figures for figures in found if figures]
