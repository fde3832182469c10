"""The page's head: a few numbers for each run, tables of them over all runs, and the figures that are not there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from benchmarks import summary
from benchmarks.figures import ours
from benchmarks.report import text
from benchmarks.report.sections import by_model, partition, title
from benchmarks.report.tables import Table, number, styled
from benchmarks.report.tables import estimate as cell
from benchmarks.results import Record, Results

Runs = Sequence[tuple[str, Results]]
# A row of a table: what it is about, of which run, and its cells.
Row = tuple[str, str, Mapping[str, str]]


# A range with its mean, beside 1.
STRIP = Markup(
    '<td class="strip"><svg class="range" aria-hidden="true"><line class="one" x1="{one}" x2="{one}" y2="100%"/>'
    '<line x1="{low}" x2="{high}" y1="50%" y2="50%"/><circle cx="{mean}" cy="50%" r="4"/></svg>'
)


@dataclass(frozen=True)
class Tile:
    """A number that answers a question, and what else to know about it."""

    question: str
    number: str
    more: str


def tiles(records: Sequence[Record]) -> list[Tile]:
    """The answer in one line, as far as it was measured."""
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
    """How many shapes a mean is of, and of how many if some have no figure."""
    return f"{row.shapes}" if row.shapes == row["of"] else f"{row.shapes} of {row['of']}"


def faster(times: float) -> str:
    """Beside torch.where."""
    if math.isnan(times):
        return ""
    return f"{text.ratio(times)} {'the speed of' if times < 1 else 'faster than'} torch.where"


def tables(runs: Runs) -> list[Table]:
    """One for each suite that any run measured."""
    speed = "Geometric mean and range over shapes, at the dearest live subnetwork; below 1 is faster than dense"
    memory = "Bytes a parameter, without the optimiser's state; bits of our map a weight; our peak in a step over dense"
    step = "Table 8: updates over a dense step. “Paper” is its scheme on this machine, “published” its own figures"
    optim = "A step over one partition, over torch.optim's faster one over all weights; mean and range over models"
    found = [
        _grouped("speed", speed, runs, _speed(runs)),
        _grouped("memory", memory, runs, _memory(runs)),
        _grouped("training step", step, runs, _step(runs)),
        _grouped("optimiser", optim, runs, _optim(runs)),
    ]
    return [table for table in found if table.rows]


def _grouped(head: str, title: str, runs: Runs, found: Sequence[Row]) -> Table:
    """Rows with the same label together, whatever run they are of."""
    labels = list(dict.fromkeys(label for label, _, _ in found))
    rows = []
    for label, run, cells in sorted(found, key=lambda row: labels.index(row[0])):
        rows.append({head: label} | ({"run": styled("run", run)} if len(runs) > 1 else {}) | cells)
    return Table(title, rows)


def _speed(runs: Runs) -> list[Row]:
    frames = {name: summary.speed(results.records) for name, results in runs}
    rows = [(name, row) for name, frame in frames.items() for _, row in frame.iterrows()]
    kinds = [{name: row[name] for name in ("dtype", "bits", "defaults")} for _, row in rows]
    apart, backends = text.varying(kinds), {row.peer for _, row in rows}
    ends = [end for _, row in rows for end in (1.0, row.low, row.high)]
    low, high = (math.log(f(ends)) for f in (min, max)) if ends else (0.0, 0.0)

    def at(value: float) -> str:
        return f"{4 + 92 * (math.log(value) - low) / ((high - low) or 1):.1f}%"

    found = []
    for (name, row), kind in zip(rows, kinds, strict=True):
        words = [f"{text.first_upper(row.operator)}, {text.phrase('work', row.work)}"]
        words += [text.phrase(each, kind[each]) for each in apart]
        words += [row.peer.removeprefix("partkernels ")] * (len(backends) > 1)
        strip = STRIP.format(one=at(1.0), low=at(row.low), high=at(row.high), mean=at(row["mean"]))
        range_ = styled("interval", text.span(row.low, row.high) if row.shapes > 1 else "")
        cells = {"over dense": number(text.ratio(row["mean"]), strong=True), " ": strip, "range": range_}
        cells |= {"shapes": number(_shapes(row)), "torch.where over ours": number(text.ratio(row["where"]))}
        found.append((", ".join(words), name, cells))
    return found


def _memory(runs: Runs) -> list[Row]:
    found = []
    for name, results in runs:
        rows = summary.memory(results.records)
        for _, group in rows.groupby(summary.MODEL, sort=False):
            by_peer = {row.peer: row for row in group.itertuples()}
            for mine in [by_peer[peer] for peer in ours(by_peer)][:1]:  # backends keep the same bytes
                peak = mine.peak.get("process", mine.peak.get("allocator", math.nan))
                cells = {"ours": number(f"{mine.scheme:.2f}", strong=True)}
                for peer in ("floor", "paper", "dense"):
                    cells[peer] = number(f"{by_peer[peer].scheme:.2f}" if peer in by_peer else "–")
                cells |= {"map bits": number(f"{mine.map_bits:.2f}"), "peak": number(text.ratio(peak))}
                found.append((title(mine), name, cells))
    return found


def _step(runs: Runs) -> list[Row]:
    found = []
    for name, results in runs:
        rows = summary.step(results.records)
        for model, schemes in by_model(rows[rows.series == ""]):
            for mine in ours(schemes):
                cells = {}
                for which, update in enumerate(summary.UPDATES):
                    paper, space = getattr(schemes.get("paper"), update, None), " " * which
                    published = schemes[mine].paper[which] if schemes[mine].paper else math.nan
                    cells[("weights", "ψ")[which]] = number(text.ratios(getattr(schemes[mine], update))[0], strong=True)
                    cells[f"paper{space}"] = number(text.ratios(paper)[0])
                    cells[f"published{space}"] = number(text.ratio(published))
                found.append((model, name, cells))
    return found


def _optim(runs: Runs) -> list[Row]:
    found = []
    for name, results in runs:
        rows = summary.optim(results.records)
        rows = rows[rows.ratio.notna()]
        for (optimizer, _, _), group in rows.groupby(["optimizer", "update", "share"], sort=False):
            label = f"{text.OPTIMIZERS.get(optimizer, optimizer)}, {partition(next(group.itertuples()))}"
            values = [ratio.value for ratio in group.ratio]
            range_ = text.span(min(values), max(values)) if len(values) > 1 else ""
            found.append(
                (label, name, {"ours over torch": cell((text.ratio(summary.mean(values)), range_), strong=True)})
            )
    return found


@dataclass(frozen=True)
class Problem:
    """Figures of a peer in a suite that are not there, and why: refused, failed or missing; each case in words."""

    kind: str
    suite: str
    peer: str
    cases: list[tuple[str, str]]

    @property
    def reason(self) -> str:
        """That of all cases, or empty if they differ."""
        reasons = {reason for _, reason in self.cases}
        return reasons.pop() if len(reasons) == 1 else ""


def problems(records: Sequence[Record]) -> list[Problem]:
    """In the order of records; those of a peer together."""
    found: dict[tuple, Problem] = {}
    for record in records:
        if record.problem:
            names = text.varying([other.case for other in records if other.suite == record.suite])
            reason = record.refused or record.missing.removeprefix("failed: ") or "no samples were taken"
            problem = found.setdefault(key := (record.problem, record.suite, record.peer), Problem(*key, []))
            problem.cases.append((text.phrases(record.case, names or None), reason))
    return list(found.values())
