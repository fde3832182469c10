"""What the kernels for CPUs are held to.

Ratios are to the dense layer (below 1 is faster), for the live subnetwork that costs most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import summary
from benchmarks.bars.bar import Bar
from benchmarks.estimates import Estimate
from benchmarks.figures import Figure, by_case
from benchmarks.results import Record

OURS = "partkernels cpu"


def measured(records: Sequence[Record]) -> list[Bar]:
    """The rows for which a run has figures."""
    return [*_layers(records), *_optimizers(records), *_iterations(records)]


def _layers(records: Sequence[Record]) -> Iterable[Bar]:
    worst: dict[tuple, dict[str, Figure]] = {}
    for case in by_case(records, "speed"):
        if OURS not in case or case[OURS].ratio is None or case[OURS].case["work"] == "training":
            continue
        facts = case[OURS].case
        key = tuple(facts[name] for name in ("operator", "dtype", "work", "shape"))
        if key not in worst or case[OURS].ratio.value > worst[key][OURS].ratio.value:
            worst[key] = case
    for (operator, dtype, work, shape), case in worst.items():
        figure = case[OURS]
        faster = case["where"].over(figure) if "where" in case else None
        bar = _bar_of_layer(operator, dtype, work, shape)
        if bar is not None:
            most, least = bar
            rate = figure.record.facts["flops"] / figure.value.value
            yield Bar(f"{operator} {work}, {dtype}, {shape}", figure.ratio, most, faster, least, rate)


def _bar_of_layer(operator: str, dtype: str, work: str, shape: str) -> tuple[float, float] | None:
    """The greatest ratio to the dense layer, and how many times faster than torch.where; None: held to nothing."""
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
    for row in summary.optim(records):
        most = {0.8: 1.05, 0.1: 0.85}.get(row.share)
        if row.model == "Linear 2048×2048" and row.optimizer == "adam" and most is not None:
            yield Bar(f"Adam's step, {row.model}, {row.share:.0%} of the weights", row.ratio, most)


def _iterations(records: Sequence[Record]) -> Iterable[Bar]:
    """An update of the weights and one of the hyperparameters, each by the subnetwork that costs most."""
    sums: dict[tuple, dict[str, list[Figure]]] = {}
    for case in by_case(records, "step"):
        for peer, figure in case.items():
            if peer.startswith(OURS) and figure.ratio is not None and "series" not in figure.case:
                key = figure.case["model"], figure.case["batch"]
                sums.setdefault(key, {}).setdefault(peer, []).append(figure)
    for (model, batch), updates in sums.items():
        if (model, batch) == ("MNIST CNN", 200) and len(updates) == 2:
            worst = [max(figures, key=lambda figure: figure.ratio.value) for figures in updates.values()]
            low, value, high = (
                sum(getattr(figure.ratio, name) for figure in worst) for name in ("low", "value", "high")
            )
            confidence = min(figure.ratio.confidence for figure in worst)
            name = f"updates of weights and hyperparameters over a dense step, {model}, batch {batch}"
            yield Bar(name, Estimate(value, low, high, confidence), 1.75)
