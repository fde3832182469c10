"""Targets of nested partitions on every device: a step of the weights and one of ψ over a dense training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partbench import summary
from partbench.bars.bar import Bar
from partbench.results import Record

NESTED = "partkernels nested"
MOST = 1.25


def iterations(records: Sequence[Record]) -> Iterable[Bar]:
    """Yield a bar for each model; each update is the mean over subnetworks as training draws them."""
    found = [record for record in records if record.suite == "step" and record.peer.startswith((NESTED, "dense"))]
    if not any(record.peer.startswith(NESTED) for record in found):
        return
    for row in summary.step(found).itertuples():
        if row.scheme == NESTED and not row.series and row.iteration:
            work = f"an iteration with nested partitions over a dense step, {row.model}, batch {row.batch}"
            yield Bar(work, row.iteration, MOST)
