"""The summary: a few numbers for each suite, of which the page's head and the README's tables are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.estimates import Estimate, ratios
from benchmarks.figures import Figure, by_case
from benchmarks.operators import PLANS
from benchmarks.results import Record
from benchmarks.step import PAPER, UPDATES


def ours(peers: Iterable[str]) -> list[str]:
    """Those of the peers that are ours."""
    return [peer for peer in peers if peer.startswith(("partkernels", "partnets"))]


def unforced(peers: Iterable[str]) -> list[str]:
    """Those of ours that compute by the plan that they choose: what a user gets who asks for nothing."""
    return [peer for peer in ours(peers) if not peer.endswith(PLANS)]


@dataclass(frozen=True)
class SpeedRow:
    """One kind of work, over all shapes; for each shape the live subnetwork that costs most.

    Attributes:
        operator, work, dtype, bits, defaults, peer: what, with which map and defaults, on which backend of ours.
        dense: ours over dense: geometric mean over shapes, least and greatest.
        where: times faster than eager torch.where: geometric mean; NaN if it was not measured.
        shapes: how many.
    """

    operator: str
    work: str
    dtype: str
    bits: int
    defaults: str
    peer: str
    dense: tuple[float, float, float]
    where: float
    shapes: int


def speed(records: Sequence[Record]) -> list[SpeedRow]:
    """A row for each operator, work, dtype, map, kind of defaults and backend."""
    groups: dict[tuple, dict[str, list[dict[str, Figure]]]] = {}
    for case in by_case(records, "speed"):
        first = next(iter(case.values())).case
        for peer in ours(case):
            key = *(first[name] for name in ("operator", "work", "dtype", "bits", "defaults")), peer
            groups.setdefault(key, {}).setdefault(first["shape"], []).append(case)
    rows = []
    for key, by_shape in groups.items():
        peer = key[-1]
        worst = []
        for cases in by_shape.values():
            known = [case for case in cases if case[peer].ratio is not None]
            if known:
                worst.append(max(known, key=lambda case: case[peer].ratio.value))
        if not worst:
            continue
        dense = [case[peer].ratio.value for case in worst]
        over = [case["where"].over(case[peer]) for case in worst if "where" in case]
        where = mean([ratio.value for ratio in over if ratio])
        rows.append(SpeedRow(*key, (mean(dense), min(dense), max(dense)), where, len(worst)))
    return rows


def mean(values: Sequence[float]) -> float:
    """The geometric mean, that of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


@dataclass(frozen=True)
class MemoryRow:
    """What a peer keeps for a model, and its peak.

    Attributes:
        model, batch, optimizer, peer: of the measurement.
        bytes: a parameter of the ordinary model: "parameters", "map", "defaults", "state".
        map_bits: a weight that is partitioned; peak: of the whole step, in bytes, by "allocator" and "process"
            where they were measured.
        peak_of_dense: the same over the dense model's.
        partitioned: the share of parameters that are partitioned; dense_layers: kinds of layer that are not.
        by_arithmetic: nothing was allocated.
    """

    model: str
    batch: int
    optimizer: str
    peer: str
    bytes: dict[str, float]
    map_bits: float
    peak: dict[str, float]
    peak_of_dense: dict[str, float]
    partitioned: float
    dense_layers: str
    by_arithmetic: bool


def memory(records: Sequence[Record]) -> list[MemoryRow]:
    """A row for each model and peer."""
    groups: dict[tuple, dict[str, dict[str, Record]]] = {}
    for record in records:
        if record.suite == "memory" and record.samples:
            key = tuple((name, value) for name, value in record.case.items() if name != "figure")
            groups.setdefault(key, {}).setdefault(record.peer, {})[record.case["figure"]] = record
    rows = []
    for key, peers in groups.items():
        case = dict(key)
        peaks = {peer: _peaks(figures) for peer, figures in peers.items()}
        dense = peaks.get("dense", {})
        for peer, figures in peers.items():
            facts = next(iter(figures.values())).facts
            kept = {name: figures[name].samples[0][0] for name in ("parameters", "map", "defaults", "state")}
            rows.append(
                MemoryRow(
                    model=case["model"],
                    batch=case["batch"],
                    optimizer=case["optimizer"],
                    peer=peer,
                    bytes={name: value / facts["parameters"] for name, value in kept.items()},
                    map_bits=8 * kept["map"] / facts["weights"],
                    peak=peaks[peer],
                    peak_of_dense={how: peak / dense[how] for how, peak in peaks[peer].items() if how in dense},
                    partitioned=facts["weights"] / facts["parameters"],
                    dense_layers=facts.get("dense layers", ""),
                    by_arithmetic=facts.get("how") == "by arithmetic",
                )
            )
    return rows


def _peaks(figures: dict[str, Record]) -> dict[str, float]:
    """Over all phases, by how it was measured."""
    found: dict[str, float] = {}
    for figure, record in figures.items():
        if figure.startswith("peak"):
            how = figure.rpartition("by ")[2]
            found[how] = max(found.get(how, 0.0), record.samples[0][0])
    return found


@dataclass(frozen=True)
class StepRow:
    """A row of Table 8: what the two updates cost, over a dense update; as often as training draws each subnetwork.

    Attributes:
        case: model, batch, samples, optimizer, device, partitions, bits, ...; "series" for points of a series.
        scheme: who.
        parameters, hyperparameters: None if not measured.
        paper: the paper's, for this model, in the same order.
        place: of a point, on its series.
    """

    case: dict[str, str | int | float]
    scheme: str
    parameters: Estimate | None
    hyperparameters: Estimate | None
    paper: tuple[float, float] | None
    place: float = 0


def step(records: Sequence[Record]) -> list[StepRow]:
    """A row for each model (or point of a series) and scheme."""
    groups: dict[tuple, list[dict[str, Figure]]] = {}
    for case in by_case(records, "step"):
        first = next(iter(case.values())).case
        key = tuple((name, value) for name, value in first.items() if name != "active")
        groups.setdefault(key, []).append(case)
    rows = []
    for key, cases in groups.items():
        schemes = dict.fromkeys(peer.rpartition(", ")[0] for case in cases for peer in case if peer != "dense")
        for scheme in schemes:
            costs = [_expected(cases, f"{scheme}, {update}", f"share of {update}") for update in UPDATES]
            place = next(iter(cases[0].values())).record.facts.get("place", 0)
            rows.append(StepRow(dict(key), scheme, *costs, PAPER.get(dict(key)["model"]), place))
    return rows


def _expected(cases: Sequence[dict[str, Figure]], peer: str, share: str) -> Estimate | None:
    """The mean over the live subnetworks that were measured, weighted by how often training draws them."""
    measured = [case for case in cases if peer in case and case[peer].ratio is not None]
    shares = [case[peer].record.facts[share] for case in measured]
    if not measured or not sum(shares):
        return None
    by_pass = [ratios(case[peer].record.samples, case[peer].base.samples) for case in measured]
    return Estimate.of(
        [
            sum(s * ratio for s, ratio in zip(shares, one_pass, strict=True)) / sum(shares)
            for one_pass in zip(*by_pass, strict=True)
        ]
    )


@dataclass(frozen=True)
class OptimRow:
    """An optimiser's step over one partition, over torch's fastest over all weights."""

    model: str
    optimizer: str
    update: int
    share: float
    peer: str
    ratio: Estimate


def optim(records: Sequence[Record]) -> list[OptimRow]:
    """A row for each model, optimiser and partition."""
    rows = []
    for case in by_case(records, "optim"):
        theirs = [figure for peer, figure in case.items() if peer.startswith("torch")]
        for peer in ours(case):
            figure = case[peer]
            if theirs:
                fastest = min(theirs, key=lambda figure: figure.value.value)
                c = figure.case
                share = figure.record.facts["share"]
                rows.append(OptimRow(c["model"], c["optimizer"], c["update"], share, peer, figure.over(fastest)))
    return rows
