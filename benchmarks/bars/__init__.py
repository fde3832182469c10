"""bars: what the kernels are held to, beside what runs of the suite measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.bars import cpu, gpu
from benchmarks.bars.bar import Bar
from benchmarks.results import Results

__all__ = ["Bar", "measured", "table"]


def measured(run: Results) -> list[Bar]:
    """The rows of the device that a run is of; a CPU's are those for which it has figures."""
    return gpu.measured(run) if run.settings["device"] == "cuda" else cpu.measured(run.records)


def table(runs: Sequence[Results]) -> str:
    """Markdown: a row for each bar, a pair of columns for each run."""
    found = [{bar.work: bar for bar in measured(run)} for run in runs]
    works = dict.fromkeys(work for bars in found for work in bars)
    head = ["work", "at most"]
    for number in range(1, len(runs) + 1):
        run = f"run {number}: " if len(runs) > 1 else ""
        head += [f"{run}over dense", "faster than `where`", "GFLOP/s"]
    lines = [head, ["---"] * len(head)]
    for work in works:
        row = [work]
        for bars in found:
            if work not in bars:
                row += ["", "", ""]
                continue
            bar = bars[work]
            if len(row) == 1:
                row.append(f"{bar.most:.2f}" + ("" if math.isnan(bar.least) else f", {bar.least:g}×"))
            row += _cells(bar)
        lines.append(row)
    how = [f"Run {n}: `{run.command}`, commit {run.commit[:9]}, {run.date}." for n, run in enumerate(runs, 1)]
    return "\n".join([_machine(runs[0]), *how, "", *("| " + " | ".join(line) + " |" for line in lines)])


def _cells(bar: Bar) -> list[str]:
    ratio = "no figure" if bar.ratio is None else f"{bar.ratio:.2f}"
    plan = f", {bar.plan}" if bar.plan else ""
    faster = "" if bar.faster is None else f"{bar.faster.value:.2f}×"
    rate = "" if math.isnan(bar.rate) else f"{bar.rate / 1e9:.0f}"
    return [ratio + plan + ("" if bar.is_met else " **missed**"), faster, rate]


def _machine(run: Results) -> str:
    peaks = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in run.rooflines.items())
    device = run.machine.get("gpu") or f"{run.machine['processor']}, {run.settings['threads']} threads"
    return f"{device}; in G/s, {peaks}."
