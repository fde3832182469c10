"""Problems: the figures that a run does not have, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partbench.report import text
from partbench.results import Record


@dataclass(frozen=True)
class Problem:
    """Missing figures of a peer in a suite for one reason, and the kind: refused, failed or missing."""

    kind: str
    suite: str
    peer: str
    reason: str
    cases: list[str]


def problems(records: Sequence[Record]) -> list[Problem]:
    """Return problems in the order of records, those of a peer together."""
    found: dict[tuple, Problem] = {}
    for record in records:
        if record.problem:
            names = text.varying([other.case for other in records if other.suite == record.suite])
            reason = record.refused or record.missing.removeprefix("failed: ") or "no samples were taken"
            key = record.problem, record.suite, record.peer, reason
            found.setdefault(key, Problem(*key, [])).cases.append(text.phrases(record.case, names or None))
    return list(found.values())
