"""Figures that are not there, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import text
from benchmarks.results import Record


@dataclass(frozen=True)
class Problem:
    """Of a peer in one or several cases of a suite.

    Attributes:
        kind: "refused", "failed" or "missing".
        cases: each in words, and its reason in the words of whoever found it.
    """

    kind: str
    suite: str
    peer: str
    cases: list[tuple[str, str]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """That of all cases, or empty if they differ."""
        reasons = {reason for _, reason in self.cases}
        return reasons.pop() if len(reasons) == 1 else ""


def problems(records: Sequence[Record]) -> list[Problem]:
    """In the order of records; those of a peer together."""
    suites = dict.fromkeys(record.suite for record in records)
    names = {suite: text.varying([record.case for record in records if record.suite == suite]) for suite in suites}
    found: dict[tuple, Problem] = {}
    for record in records:
        if record.samples and not record.refused:
            continue
        kind = kind_of(record)
        reason = record.refused or record.missing.removeprefix("failed: ") or "no samples were taken"
        problem = found.setdefault((kind, record.suite, record.peer), Problem(kind, record.suite, record.peer))
        problem.cases.append((text.phrases(record.case, names[record.suite] or None), reason))
    return list(found.values())


def kind_of(record: Record) -> str:
    """Of a record without a figure."""
    return "refused" if record.refused else "failed" if record.missing.startswith("failed") else "missing"


def alarming(found: Iterable[Problem]) -> list[Problem]:
    """Those that a reader must know before any figure."""
    return [problem for problem in found if problem.kind != "missing"]
