"""Targets of the GPU kernels.

Ratios are of times (below 1 is faster), for the slowest active subnetwork. The best plan is the fastest measured plan
for each subnetwork. The fused kernel by itself has looser targets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from partbench.bars import training
from partbench.bars.bar import Bar
from partbench.figures import figures, over
from partbench.measuring.estimates import Estimate
from partbench.peers.operators import PLANS
from partbench.results import Record, Results
from partkernels.arguments import row_bytes

OURS = "partkernels triton"
BEST = (OURS, *(f"{OURS} {plan}" for plan in PLANS))
FUSED = (f"{OURS} fused",)
# With at most this many rows of x, the time is that of reading the weight.
FEW_ROWS = 16
# The largest ratio of a training step to a dense one.
MOST_OF_STEPS = 1.05

# The figures of one case by peer; None for a peer without a figure.
Case = dict


def measured(run: Results) -> list[Bar]:
    """Return the bars for which a run has cases; a bar is missed if its peers have no figures."""
    steps = training.measured(run.records, OURS, MOST_OF_STEPS)
    return [*_layers(run), *_optimizers(run.records), *_peaks(run.records), *steps]


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
            map_bytes, copy = outputs * row_bytes(inputs, bits), run.rooflines["copy"]
            held = partial(_beside_copying, map_bytes, copy)
            yield from _worst(f"{name}, over moving its bytes", BEST, cases, 1 / 0.85, least=2.5, held=held)


def _beside_copying(map_bytes: int, copy: float, case: Case, figure) -> Estimate:
    """Return the time over that of moving weight, map, x and y at the GPU's measured copy rate."""
    # Plans are measured only if there are weights to rebuild; if all weights are active, the map is not read.
    seconds = (figure.record.facts["bytes"] + map_bytes * (FUSED[0] in case)) / copy
    scaled = {name: getattr(figure.value, name) / seconds for name in ("value", "low", "high")}
    return dataclasses.replace(figure.value, **scaled)


def _cases(records: Sequence[Record], suite: str) -> list[tuple[dict, Case]]:
    """Return each case with the figures of its peers."""
    known = {row.record.key: row for row in figures(records, suite).itertuples()}
    cases: dict[tuple, Case] = {}
    for record in records:
        if record.suite == suite:
            cases.setdefault(tuple(record.case.items()), {})[record.peer] = known.get(record.key)
    return [(dict(key), case) for key, case in cases.items()]


def _fastest(case: Case, peers: Sequence[str]):
    found = [case[peer] for peer in peers if case.get(peer) is not None and case[peer].ratio]
    return min(found, key=lambda figure: figure.ratio.value, default=None)


def _worst(
    work: str,
    peers: Sequence[str],
    cases: Sequence[Case],
    most: float,
    *,
    least: float = math.nan,
    held: Callable[[Case, object], Estimate] | None = None,
) -> Iterable[Bar]:
    """Yield the bar of the case in which the fastest of the peers is slowest, among cases that measure these peers.

    Args:
        least: the lower limit of the speed-up over eager torch.where, compared with the smallest one of all cases.
        held: returns the ratio of a figure; by default that to the dense layer.
    """
    measured = [(case, _fastest(case, peers)) for case in cases if any(peer in case for peer in peers)]
    fastest = [figure for _, figure in measured]
    if None in fastest:
        yield Bar(work, None, most, least=least)
    elif fastest:
        ratios = [held(case, figure) if held else figure.ratio for case, figure in measured]
        ratio, worst = max(zip(ratios, fastest, strict=True), key=lambda pair: pair[0].value)
        rate = math.nan if held else worst.record.facts["flops"] / worst.value.value
        plan = worst.peer.removeprefix(OURS).strip() or "automatic"
        times = () if math.isnan(least) else (figure.faster for figure in fastest if figure.faster)
        faster = min(times, key=lambda each: each.value, default=None)
        yield Bar(work, ratio, most, faster, least, rate, plan if len(peers) > 1 else "")


def _optimizers(records: Sequence[Record]) -> Iterable[Bar]:
    """Yield the time of Adam's step over a partition, relative to torch's fused step over all weights."""
    mine = [record for record in records if record.suite == "optim"]
    for record in mine:
        case, share = record.case, record.facts["share"]
        most = {0.8: 1.0, 0.1: 0.7}.get(share)
        is_held = case["model"] == "Linear 4096×4096" and case["optimizer"] == "adam" and most is not None
        if is_held and record.peer == "partnets":
            theirs = next((r for r in mine if r.case == case and r.peer == "torch, fused"), None)
            name = f"Adam's step, {case['model']}, {share:.0%} of the weights, over torch's fused"
            yield Bar(name, over(record, theirs), most)


def _peaks(records: Sequence[Record]) -> Iterable[Bar]:
    """Yield the peak memory of a training step, over the dense layer's plus the map and defaults.

    Subnetworks once had a weight of their own unless the fused plan computed; results of that time have it as a peer.
    """
    model, peers = "Linear 8192×8192, bfloat16", {}
    for record in records:
        if record.suite == "memory" and record.case["model"] == model:
            figures = peers.setdefault(record.peer, {})
            figures |= {record.case["figure"]: record.samples[0][0]} if record.samples else {}
    if peers:
        ratio, ours, dense = None, peers.get(FUSED[0], peers.get(OURS, {})), peers.get("dense", {})
        mine, theirs = ([n for name, n in each.items() if name.endswith("by allocator")] for each in (ours, dense))
        if "map" in ours and mine and theirs:
            ratio = Estimate.of([max(mine) / (max(theirs) + ours["map"] + ours.get("defaults", 0))])
        yield Bar(f"peak memory of a training step, {model}, over dense and map", ratio, 1.01)
