"""bars: the kernels' targets, beside the measurements of benchmark runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partbench.bars import cpu, gpu
from partbench.bars.bar import Bar
from partbench.figures import markdown
from partbench.results import Results

__all__ = ["Bar", "measured", "table"]


def measured(run: Results) -> list[Bar]:
    """Return the bars of the run's device; for a CPU, only those for which the run has figures."""
    return gpu.measured(run) if run.settings["device"] == "cuda" else cpu.measured(run.records)


def table(runs: Sequence[Results]) -> str:
    """Return a Markdown table with a row for each bar and columns for each run."""
    found = [{bar.work: bar for bar in measured(run)} for run in runs]
    head, rows = ["work", "at most"], []
    for number in range(1, len(runs) + 1):
        run = f"run {number}: " if len(runs) > 1 else ""
        head += [f"{run}over dense", "faster than `where`", "GFLOP/s"]
    for work, bar in {work: bar for bars in reversed(found) for work, bar in bars.items()}.items():
        most = f"{bar.most:.2f}" + ("" if math.isnan(bar.least) else f", {bar.least:g}×")
        rows.append([work, most, *(cell for bars in found for cell in _cells(bars.get(work)))])
    order = list(dict.fromkeys(work for bars in found for work in bars))
    rows.sort(key=lambda row: order.index(row[0]))
    lines = []
    for number, run in enumerate(runs, 1):
        if number == 1 or run.device != runs[number - 2].device:
            lines.append(f"{_machine(run)}.")
        lines.append(f"Run {number}: `{run.command}`, commit {run.commit[:9]}, {run.date}.")
    return "\n".join([*lines, "", markdown(head, rows)])


def _machine(run: Results) -> str:
    peaks = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in run.rooflines.items())
    threads = "" if run.machine.get("gpu") else f", {run.settings['threads']} threads"
    return f"{run.device}{threads}; in G/s, {peaks}"


def _cells(bar: Bar | None) -> list[str]:
    if bar is None:
        return ["", "", ""]
    ratio = ("no figure" if bar.ratio is None else f"{bar.ratio:.2f}") + (f", {bar.plan}" if bar.plan else "")
    faster = "" if bar.faster is None else f"{bar.faster.value:.2f}×"
    rate = "" if math.isnan(bar.rate) else f"{bar.rate / 1e9:.0f}"
    return [ratio + ("" if bar.is_met else " **missed**"), faster, rate]
