"""What the kernels for GPUs are held to.

Ratios are of times (below 1 is faster), for the live subnetwork that costs most. The best plan is the fastest of those
that were measured, for each subnetwork its own; the fused kernel alone is held to less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from benchmarks.bars.bar import Bar
from benchmarks.estimates import Estimate
from benchmarks.figures import Figure, by_case
from benchmarks.operators import PLANS
from benchmarks.results import Record, Results
from partkernels.formats import packed_map

OURS = "partkernels triton"
BEST = (OURS, *(f"{OURS} {plan}" for plan in PLANS))
FUSED = (f"{OURS} fused",)
# At so few rows of x the time is that of reading the weight.
FEW_ROWS = 16

# Of one case: the figure of each peer that was to be measured, None where there is none.
Case = dict[str, Figure | None]


def measured(run: Results) -> list[Bar]:
    """The rows for which a run has cases; a bar whose peers have no figure is missed."""
    return [*_layers(run), *_optimizers(run.records), *_peaks(run.records)]


def _layers(run: Results) -> Iterable[Bar]:
    groups: dict[tuple, list[Case]] = {}
    for facts, case in _cases(run.records, "speed"):
        names = "operator", "work", "dtype", "bits", "defaults", "shape"
        groups.setdefault(tuple(facts[name] for name in names), []).append(case)
    for (operator, work, dtype, bits, defaults, shape), cases in groups.items():
        if dtype != "bfloat16" or work == "training":
            continue
        name = f"{operator} {work}, {defaults}, {shape}"
        if operator == "conv2d":
            yield from _worst(f"{name}, best plan", BEST, cases, 1 / 0.95)
            continue
        rows, outputs, inputs = map(int, shape.split("×"))
        if work != "forward":
            if rows == outputs == inputs:
                yield from _worst(f"{name}, best plan", BEST, cases, 1 / 0.92)
        elif rows > FEW_ROWS:
            if defaults == "uniform":
                yield from _worst(f"{name}, best plan", BEST, cases, 1 / 0.95)
            if share := {"uniform": 0.70, "zeros": 0.85}.get(defaults):
                yield from _worst(f"{name}, fused", FUSED, cases, 1 / share, least=1.0)
        elif defaults == "uniform":
            map_bytes = outputs * packed_map.row_bytes(inputs, bits)
            yield from _bandwidth(f"{name}, over moving its bytes", cases, map_bytes, run.rooflines["copy"])


def _cases(records: Sequence[Record], suite: str) -> list[tuple[dict, Case]]:
    """What each case is, and its figures."""
    figures = {tuple(next(iter(case.values())).case.items()): case for case in by_case(records, suite)}
    cases: dict[tuple, Case] = {}
    for record in records:
        if record.suite == suite:
            key = tuple(record.case.items())
            cases.setdefault(key, {})[record.peer] = figures.get(key, {}).get(record.peer)
    return [(dict(key), case) for key, case in cases.items()]


def _fastest(case: Case, peers: Sequence[str]) -> Figure | None:
    found = [case[peer] for peer in peers if case.get(peer) is not None and case[peer].ratio is not None]
    return min(found, key=lambda figure: figure.ratio.value, default=None)


def _worst(
    work: str, peers: Sequence[str], cases: Sequence[Case], most: float, *, least: float = math.nan
) -> Iterable[Bar]:
    """Of the cases in which one of the peers was to be measured, the one in which the fastest of them costs most."""
    measured = [(case, _fastest(case, peers)) for case in cases if any(peer in case for peer in peers)]
    if any(figure is None for _, figure in measured):
        yield Bar(work, None, most, least=least)
    elif measured:
        _, figure = max(measured, key=lambda pair: pair[1].ratio.value)
        rate = figure.record.facts["flops"] / figure.value.value
        bar = Bar(work, figure.ratio, most, rate=rate, plan=_plan(figure) if len(peers) > 1 else "")
        yield bar if math.isnan(least) else _beside_where(bar, measured, least)


def _beside_where(bar: Bar, measured: Sequence[tuple[Case, Figure]], least: float) -> Bar:
    """The bar, held to be so many times faster than eager torch.where too, in every case."""
    beside = [case["where"].over(figure) for case, figure in measured if case.get("where") is not None]
    known = [faster for faster in beside if faster is not None]
    return dataclasses.replace(bar, faster=min(known, key=lambda faster: faster.value, default=None), least=least)


def _plan(figure: Figure) -> str:
    return figure.peer.removeprefix(OURS).strip() or "automatic"


def _bandwidth(work: str, cases: Sequence[Case], map_bytes: int, copy: float) -> Iterable[Bar]:
    """Beside the time in which weight, map, x and y pass at the rate at which this GPU copies."""
    measured = [(case, _fastest(case, BEST)) for case in cases if OURS in case]
    if any(figure is None for _, figure in measured):
        yield Bar(work, None, 1 / 0.85, least=2.5)
        return
    over = []
    for case, figure in measured:
        # Plans are measured only where there is something to rebuild; where all is live, nobody reads the map.
        reads_map = FUSED[0] in case
        seconds = (figure.record.facts["bytes"] + map_bytes * reads_map) / copy
        over.append((_scaled(figure.value, 1 / seconds), figure))
    if over:
        ratio, figure = max(over, key=lambda pair: pair[0].value)
        yield _beside_where(Bar(work, ratio, 1 / 0.85, plan=_plan(figure)), measured, 2.5)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    value, low, high = (factor * number for number in (estimate.value, estimate.low, estimate.high))
    return dataclasses.replace(estimate, value=value, low=low, high=high)


def _optimizers(records: Sequence[Record]) -> Iterable[Bar]:
    """Adam's step over a partition, over torch's fused one over all weights."""
    shares = {record.case["update"]: record.facts["share"] for record in records if record.suite == "optim"}
    for facts, case in _cases(records, "optim"):
        share = shares[facts["update"]]
        most = {0.8: 1.0, 0.1: 0.7}.get(share)
        if facts["model"] == "Linear 4096×4096" and facts["optimizer"] == "adam" and most is not None:
            ours, theirs = case.get("partnets"), case.get("torch, fused")
            ratio = ours.over(theirs) if ours is not None and theirs is not None else None
            yield Bar(f"Adam's step, {facts['model']}, {share:.0%} of the weights, over torch's fused", ratio, most)


def _peaks(records: Sequence[Record]) -> Iterable[Bar]:
    """The peak of forward and backward with the fused plan, over the dense layer's and the map."""
    models: dict[str, dict[str, dict[str, float]]] = {}
    for record in records:
        if record.suite == "memory" and record.case["model"] == "Linear 8192×8192, bfloat16":
            figures = models.setdefault(record.case["model"], {}).setdefault(record.peer, {})
            if record.samples:
                figures[record.case["figure"]] = record.samples[0][0]
    for model, peers in models.items():
        ratio, ours, dense = None, peers.get(FUSED[0], {}), peers.get("dense", {})
        phases = [f"peak of {phase}, by allocator" for phase in ("forward", "backward")]
        if {"map", *phases} <= ours.keys() and {*phases} <= dense.keys():
            allowed = max(dense[phase] for phase in phases) + ours["map"]
            ratio = Estimate.of([max(ours[phase] for phase in phases) / allowed])
        yield Bar(f"peak memory of forward and backward, {model}, fused, over dense and map", ratio, 1.01)
