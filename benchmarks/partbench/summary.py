"""The summary: a few numbers for each suite, for the page's head and for the tables of docs/benchmarks.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from partbench.figures import figures, ours, over, table
from partbench.measuring.estimates import Estimate, ratios
from partbench.results import Record

# The paper's Table 8, on an RTX 3080: updates of the weights and of the hyperparameters over a dense update.
PAPER = {"MNIST CNN": (1.08, 1.08), "ResNet-8": (1.17, 1.08), "ResNet-14": (1.21, 1.09)}
UPDATES = ("parameters", "hyperparameters")
# The columns that identify a kind of work on layers.
KIND = ["operator", "work", "dtype", "bits", "defaults"]
KEPT = ["parameters", "map", "defaults", "state"]
MODEL = ["model", "batch", "optimizer", "device", "proportions", "kind"]


def speed(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row for each KIND and backend of ours, over all shapes, each with its slowest active subnetwork.

    Columns: KIND, `peer`; `mean` (geometric), `low` and `high` of ours over dense; `where`, the speed-up over eager
    torch.where, NaN if unknown; `shapes`, the number of shapes with a figure, and `of`, the number of all shapes.
    """
    found = figures(records, "speed")
    mine = found[found.peer.isin(ours(found.peer)) & found.ratio.notna()]
    if mine.empty:
        return table([], [*KIND, "peer", "mean", "low", "high", "where", "shapes", "of"])
    mine = mine.assign(over=[r.value for r in mine.ratio], times=[f.value if f else math.nan for f in mine.faster])
    by = [*KIND, "peer"]
    worst = mine.loc[mine.groupby([*by, "shape"], sort=False).over.idxmax()]
    aggregates = {"mean": ("over", mean), "low": ("over", "min"), "high": ("over", "max")}
    rows = worst.groupby(by, sort=False).agg(**aggregates, where=("times", mean), shapes=("over", "size"))
    every = pd.DataFrame([r.case for r in records if r.suite == "speed"]).groupby(KIND, sort=False)["shape"].nunique()
    return rows.join(every.rename("of"), on=KIND).reset_index()


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean, which suits ratios, of all values that are not NaN; NaN without any."""
    logs = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def memory(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row for each model and peer.

    Columns: `model`, `batch`, `optimizer`, `peer`; KEPT in bytes a parameter of the dense model; `map_bits` a
    partitioned weight; `peak` of the whole step over the dense model's, by "allocator" and "process" if measured;
    `partitioned`, the share of partitioned parameters; `by_arithmetic`.
    """
    found = figures(records, "memory")
    found = found.assign(kind=found.defaults, bytes=[value.value for value in found.value])
    rows, peaks = [], {}
    for (*model, peer), group in found.groupby([*MODEL, "peer"], sort=False):
        figure, facts = dict(zip(group.figure, group.bytes, strict=True)), group.record.iloc[0].facts
        kept = {name: figure[name] / facts["parameters"] for name in KEPT}
        mine = peaks.setdefault(tuple(model), {}).setdefault(peer, {})
        for how in ("allocator", "process"):
            if phases := [value for name, value in figure.items() if name.endswith(f"by {how}")]:
                mine[how] = max(phases)
        dense = peaks[tuple(model)].get("dense", {})
        row = dict(zip(MODEL, model, strict=True)) | {"peer": peer, **kept}
        row |= {"map_bits": 8 * figure["map"] / facts["weights"], "partitioned": facts["weights"] / facts["parameters"]}
        row |= {"peak": {how: peak / dense[how] for how, peak in mine.items() if how in dense}}
        rows.append({**row, "by_arithmetic": facts.get("how") == "by arithmetic"})
    return table(rows, [*MODEL, "peer", *KEPT, "map_bits", "peak"])


def step(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row of Table 8 for each scheme and each model.

    Columns: the entries of the case but `active`; `scheme`; `parameters` and `hyperparameters`, an update of them over
    a dense one: the mean over active subnetworks, weighted by how often training draws each, as Estimates or None;
    `iteration`, both together, or an iteration in one pass; `paper`, the paper's figures for both, or None.
    """
    found = figures(records, "step")
    found = found[(found.peer != "dense") & found.ratio.notna()]
    groups: dict[tuple, dict[str, list[Record]]] = {}
    for record in found.record:
        scheme, _, update = record.peer.rpartition(", ")
        case = tuple((name, value) for name, value in record.case.items() if name != "active")
        groups.setdefault((case, scheme), {}).setdefault(update, []).append(record)
    bases = {tuple(r.case.items()): r for r in records if r.suite == "step" and r.peer == "dense"}
    rows = []
    for (case, scheme), updates in groups.items():
        costs = {update: _expected(updates.get(update, ()), update, bases) for update in (*UPDATES, "iteration")}
        if costs["parameters"] and costs["hyperparameters"]:
            costs["iteration"] = costs["parameters"] + costs["hyperparameters"]
        rows.append({**dict(case), "scheme": scheme, "paper": PAPER.get(dict(case)["model"]), **costs})
    columns = ["model", "batch", "scheme", "paper", *UPDATES, "iteration"]
    return table(rows, columns).astype(dict.fromkeys([*UPDATES, "iteration", "paper"], object))


def _expected(measured: Sequence[Record], update: str, bases: dict[tuple, Record]) -> Estimate | None:
    """Return the weighted mean over the measured active subnetworks."""
    shares = [record.facts[f"share of {update}"] for record in measured]
    if not sum(shares):
        return None
    found = (ratios(record.samples, bases[tuple(record.case.items())].samples) for record in measured)
    by_pass = zip(*found, strict=False)  # an interrupted run has more passes of its first cases
    return Estimate.of([sum(s * r for s, r in zip(shares, each, strict=True)) / sum(shares) for each in by_pass])


def optim(records: Sequence[Record]) -> pd.DataFrame:
    """Return the time of our optimisers' steps, divided by that of torch's fastest step in the same case.

    Columns: `model`, `optimizer`, `update`, the partition that our step updates, and the other entries of the case;
    `share`, this partition's share of the weights; `peer`, our implementation; `ratio`, an Estimate. torch's step
    updates all weights.
    """
    found, rows = figures(records, "optim"), []
    for _, case in found.groupby("key", sort=False):
        theirs = case[case.peer.str.startswith("torch")]
        mine = case[case.peer.isin(ours(case.peer))]
        if len(theirs):
            fastest = min(zip(theirs.value, theirs.record, strict=True), key=lambda pair: pair[0].value)[1]
            for record in mine.record:
                row = {"share": record.facts["share"], "peer": record.peer, "ratio": over(record, fastest)}
                rows.append({**record.case, **row})
    return table(rows, ["model", "optimizer", "update", "share", "peer", "ratio"])
