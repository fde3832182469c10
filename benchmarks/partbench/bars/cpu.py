"""Targets of the CPU kernels.

Ratios are to the dense layer (below 1 is faster), for the slowest active subnetwork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partbench import summary
from partbench.bars import training
from partbench.bars.bar import Bar
from partbench.figures import figures
from partbench.results import Record

OURS = "partkernels cpu"
# The largest ratio of a training step to a dense one.
MOST_OF_STEPS = 1.08


def measured(records: Sequence[Record]) -> list[Bar]:
    """Return the bars for which a run has figures."""
    steps = training.measured(records, OURS, MOST_OF_STEPS)
    return [*_layers(records), *_optimizers(records), *steps]


def _layers(records: Sequence[Record]) -> Iterable[Bar]:
    found = figures(records, "speed")
    mine = found[(found.peer == OURS) & found.ratio.notna() & (found.work != "training")]
    for key, cases in mine.groupby(["operator", "dtype", "work", "shape"], sort=False):
        worst = max(cases.itertuples(), key=lambda row: row.ratio.value)
        if bar := bar_of_layer(*key):
            rate = worst.record.facts["flops"] / worst.value.value
            name = f"{worst.operator} {worst.work}, {worst.dtype}, {worst.shape}"
            yield Bar(name, worst.ratio, bar[0], worst.faster, bar[1], rate)


def bar_of_layer(operator: str, dtype: str, work: str, shape: str) -> tuple[float, float] | None:
    """Return the largest ratio to the dense layer and the smallest speed-up over torch.where; None without a target."""
    if operator == "conv2d":
        return (1.05, 1.0) if dtype == "float32" else None
    rows = int(shape.partition("×")[0])
    if dtype == "bfloat16":
        return (1.05, 1.3) if work == "forward" else None
    if dtype != "float32":
        return None
    if work == "forward":
        return (1.10 if rows <= 8 else 0.95), (1.3 if rows >= 256 else 3.0)
    return (1.00, 1.3) if rows >= 32 else None


def _optimizers(records: Sequence[Record]) -> Iterable[Bar]:
    for row in summary.optim(records).itertuples():
        most = {0.8: 1.05, 0.1: 0.85}.get(row.share)
        if row.model == "Linear 2048×2048" and row.optimizer == "adam" and most is not None:
            yield Bar(f"Adam's step, {row.model}, {row.share:.0%} of the weights", row.ratio, most)
