"""The page's head: a few numbers for each run, tables of them over all runs, and the missing figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from partbench import summary
from partbench.figures import ours
from partbench.report import text
from partbench.report.sections import by_model, partition, title
from partbench.report.tables import Table, number, styled
from partbench.report.tables import estimate as cell
from partbench.results import Record, Results

# A row of a table: its subject and its cells.
Row = tuple[str, Mapping[str, str]]


# A range with its mean, and a mark at 1.
STRIP = Markup(
    '<td class="strip"><svg class="range" aria-hidden="true"><line class="one" x1="{one}" x2="{one}" y2="100%"/>'
    '<line x1="{low}" x2="{high}" y1="50%" y2="50%"/><circle cx="{mean}" cy="50%" r="4"/></svg>'
)


@dataclass(frozen=True)
class Tile:
    """A number that answers a question, with further details."""

    question: str
    number: str
    more: str


def tiles(records: Sequence[Record]) -> list[Tile]:
    """Return the answers, in a line each, as far as they were measured."""
    found, rows = [], summary.speed(records)
    training = rows[rows.work == "training"]
    for operator, mine in training.groupby("operator", sort=False):
        # A user takes the fastest backend, but not always the fastest dtype or map.
        fastest = mine.loc[mine.groupby(summary.KIND, sort=False)["mean"].idxmin()]
        best = fastest.loc[fastest["mean"].idxmax()]
        more = f"{text.span(best.low, best.high)} over {_shapes(best)} shapes" if best.shapes > 1 else "of one shape"
        question = f"{text.first_upper(operator)} in training, over dense"
        found.append(Tile(question, text.ratio(best["mean"]), "; ".join(filter(None, (more, faster(best["where"]))))))
    rows = summary.memory(records)
    mine = rows[rows.peer.isin(ours(rows.peer))]
    if len(mine):
        worst = mine.loc[mine.scheme.idxmax()]
        same = rows[(rows[summary.MODEL] == worst[summary.MODEL]).all(axis=1)].set_index("peer").scheme
        others = ", ".join(f"{peer} {same[peer]:.2f}" for peer in ("dense", "floor", "paper") if peer in same)
        found.append(Tile("Bytes a parameter, at most", f"{worst.scheme:.2f}", f"{worst.model}; {others}"))
    rows = summary.step(records)
    rows = rows[rows.series == ""]
    for update in summary.UPDATES:
        costs = {s: [cost.value for cost in some[update] if cost] for s, some in rows.groupby("scheme")}
        if mine := [summary.mean(costs[scheme]) for scheme in ours(costs) if costs[scheme]]:
            more = f"the paper's scheme here {text.ratio(summary.mean(costs['paper']))}" if costs.get("paper") else ""
            found.append(Tile(f"Update of the {update}, over dense", text.ratio(min(mine)), more))
    return found


def _shapes(row) -> str:
    """Return the number of shapes in a mean, and the number of all shapes if some have no figure."""
    return f"{row.shapes}" if row.shapes == row["of"] else f"{row.shapes} of {row['of']}"


def faster(times: float) -> str:
    """Describe the speed relative to torch.where."""
    if math.isnan(times):
        return ""
    return f"{text.ratio(times)} {'the speed of' if times < 1 else 'faster than'} torch.where"


def tables(runs: Sequence[tuple[str, Results]]) -> list[Table]:
    """Return a table for each suite that any run measured; rows with the same label are together, across runs."""
    found = []
    for head, (about, summarised, rows_of) in _TABLES.items():
        frames = [(name, rows) for name, results in runs if len(rows := summarised(results.records))]
        every = pd.concat([frame for _, frame in frames]) if frames else None
        rows = [(label, name, cells) for name, frame in frames for label, cells in rows_of(frame, every)]
        labels = list(dict.fromkeys(label for label, _, _ in rows))
        rows.sort(key=lambda row: labels.index(row[0]))
        several = len(runs) > 1
        shown = [
            {head: label} | ({"run": styled("run", name)} if several else {}) | cells for label, name, cells in rows
        ]
        found += [Table(about, shown)] if shown else []
    return found


def _speed(rows: pd.DataFrame, every: pd.DataFrame) -> Iterable[Row]:
    apart = text.varying(every[["dtype", "bits", "defaults"]].to_dict("records"))
    low, high = math.log(min(1.0, every.low.min())), math.log(max(1.0, every.high.max()))

    def at(value: float) -> str:
        return f"{4 + 92 * (math.log(value) - low) / ((high - low) or 1):.1f}%"

    for _, row in rows.iterrows():
        words = [f"{text.first_upper(row.operator)}, {text.phrase('work', row.work)}"]
        words += [text.phrase(each, row[each]) for each in apart]
        words += [row.peer.removeprefix("partkernels ")] * (every.peer.nunique() > 1)
        strip = STRIP.format(one=at(1.0), low=at(row.low), high=at(row.high), mean=at(row["mean"]))
        range_ = styled("interval", text.span(row.low, row.high) if row.shapes > 1 else "")
        cells = {"over dense": number(text.ratio(row["mean"]), strong=True), " ": strip, "range": range_}
        cells |= {"shapes": number(_shapes(row)), "torch.where over ours": number(text.ratio(row["where"]))}
        yield ", ".join(words), cells


def _memory(rows: pd.DataFrame, every: pd.DataFrame) -> Iterable[Row]:
    for _, group in rows.groupby(summary.MODEL, sort=False):
        by_peer = {row.peer: row for row in group.itertuples()}
        for mine in [by_peer[peer] for peer in ours(by_peer)][:1]:  # backends keep the same bytes
            peak = mine.peak.get("process", mine.peak.get("allocator", math.nan))
            cells = {"ours": number(f"{mine.scheme:.2f}", strong=True)}
            for peer in ("floor", "paper", "dense"):
                cells[peer] = number(f"{by_peer[peer].scheme:.2f}" if peer in by_peer else "–")
            yield title(mine), cells | {"map bits": number(f"{mine.map_bits:.2f}"), "peak": number(text.ratio(peak))}


def _step(rows: pd.DataFrame, every: pd.DataFrame) -> Iterable[Row]:
    for model, schemes in by_model(rows[rows.series == ""]):
        for mine in ours(schemes):
            cells = {}
            for which, update in enumerate(summary.UPDATES):
                paper, space = getattr(schemes.get("paper"), update, None), " " * which
                published = schemes[mine].paper[which] if schemes[mine].paper else math.nan
                cells[("weights", "ψ")[which]] = number(text.ratios(getattr(schemes[mine], update))[0], strong=True)
                cells[f"paper{space}"] = number(text.ratios(paper)[0])
                cells[f"published{space}"] = number(text.ratio(published))
            yield model, cells


def _optim(rows: pd.DataFrame, every: pd.DataFrame) -> Iterable[Row]:
    for (optimizer, _, _), group in rows[rows.ratio.notna()].groupby(["optimizer", "update", "share"], sort=False):
        values = [ratio.value for ratio in group.ratio]
        found = text.ratio(summary.mean(values)), text.span(min(values), max(values)) if len(values) > 1 else ""
        label = f"{text.OPTIMIZERS.get(optimizer, optimizer)}, {partition(next(group.itertuples()))}"
        yield label, {"ours over torch": cell(found, strong=True)}


# For each suite: a description of its figures, summary's rows, and a function of a run's rows and those of all runs.
_TABLES = {
    "speed": (
        "Geometric mean and range over shapes, at the slowest active subnetwork; below 1 is faster than dense",
        summary.speed,
        _speed,
    ),
    "memory": (
        "Bytes a parameter, without the optimiser's state; bits of our map a weight; our peak in a step over dense",
        summary.memory,
        _memory,
    ),
    "training step": (
        "Table 8: updates over a dense step. “Paper” is its scheme on this machine, “published” its own figures",
        summary.step,
        _step,
    ),
    "optimiser": (
        "A step over one partition, over torch.optim's faster one over all weights; mean and range over models",
        summary.optim,
        _optim,
    ),
}


@dataclass(frozen=True)
class Problem:
    """Missing figures of a peer in a suite, and the kind: refused, failed or missing; each case in words."""

    kind: str
    suite: str
    peer: str
    cases: list[tuple[str, str]]

    @property
    def reason(self) -> str:
        """Return the reason for all cases; an empty string if reasons differ."""
        reasons = {reason for _, reason in self.cases}
        return reasons.pop() if len(reasons) == 1 else ""


def problems(records: Sequence[Record]) -> list[Problem]:
    """Return problems in the order of records, those of a peer together."""
    found: dict[tuple, Problem] = {}
    for record in records:
        if record.problem:
            names = text.varying([other.case for other in records if other.suite == record.suite])
            reason = record.refused or record.missing.removeprefix("failed: ") or "no samples were taken"
            problem = found.setdefault(key := (record.problem, record.suite, record.peer), Problem(*key, []))
            problem.cases.append((text.phrases(record.case, names or None), reason))
    return list(found.values())
