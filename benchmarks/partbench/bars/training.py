"""Targets of training steps on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partbench import summary
from partbench.bars.bar import Bar
from partbench.figures import over
from partbench.results import Record

NESTED = "partkernels nested"
# The largest ratio of an iteration with nested partitions to a dense step.
MOST_NESTED = 1.25
# Steps, as they end the names of ours, and the dense peers that they are compared with.
STEPS = {
    "parameters": ("a step of the weights", "dense"),
    "hyperparameters": ("a step of the hyperparameters", "dense, hyperparameters"),
    "Trainer, iteration": ("an iteration of a Trainer", "dense, iteration"),
}


def measured(records: Sequence[Record], ours: str, most: float) -> Iterable[Bar]:
    """Yield a bar for each model and kind of step, over the dense step of this kind, for the slowest subnetwork.

    Args:
        ours: the peer with a backend of ours, such as "partkernels cpu".
        most: the largest ratio.
    """
    cases: dict[tuple, dict[str, Record]] = {}
    for record in records:
        if record.suite == "step":
            cases.setdefault(tuple(record.case.items()), {})[record.peer] = record
    for kind, (what, base) in STEPS.items():
        mine = f"{ours} {kind}" if kind.startswith("Trainer") else f"{ours}, {kind}"
        found = {}
        for case, peers in cases.items():
            if ratio := over(peers.get(mine), peers.get(base)):
                facts = dict(case)
                found.setdefault((facts["model"], facts["batch"], facts["samples"]), []).append(ratio)
        for (model, batch, samples), ratios in found.items():
            worst = max(ratios, key=lambda ratio: ratio.value)
            yield Bar(f"{what} over a dense one, {model}, batch {batch}×{samples}", worst, most)
    yield from _nested(records)


def _nested(records: Sequence[Record]) -> Iterable[Bar]:
    """Yield a bar for each model; each update is the mean over subnetworks as training draws them."""
    found = [record for record in records if record.suite == "step" and record.peer.startswith((NESTED, "dense"))]
    if not any(record.peer.startswith(NESTED) for record in found):
        return
    for row in summary.step(found).itertuples():
        if row.scheme == NESTED and row.iteration:
            case = f"{row.model}, batch {row.batch}×{row.samples}"
            work = f"an iteration with nested partitions over a dense step, {case}"
            yield Bar(work, row.iteration, MOST_NESTED)
