"""readme: the benchmark tables of a page of the documentation, made from files of results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from partbench import summary
from partbench.figures import markdown
from partbench.results import Record, Results

BEGIN, END = "<!-- benchmarks: made by `python -m partbench report`; edits are lost -->", "<!-- end of benchmarks -->"
# The models in the tables of memory.
SHOWN = ("MNIST CNN", "ResNet-14", "ViT-tiny", "1-billion transformer")


def write(path: Path, results: Sequence[Results]) -> None:
    """Replace the text between the markers of a file.

    Raises:
        ValueError: the markers are not there, once each and in order; the file is then unchanged.
    """
    text = path.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest:
        raise ValueError(f"{path} has no place for tables; write the lines {BEGIN!r} and {END!r} into it.")
    path.write_text(f"{head}{BEGIN}\n{tables(results)}\n{END}{tail}")


def tables(results: Sequence[Results]) -> str:
    """Return Markdown: for each file, its circumstances and a table for each suite."""
    return "\n\n".join(
        "\n\n".join([_how(each), *(markdown(*table) for table in summaries(each.records, SHOWN))]) for each in results
    )


def _how(results: Results) -> str:
    is_gpu = bool(results.machine.get("gpu"))
    threads = "1 thread" if results.settings["threads"] == 1 else f"{results.settings['threads']} threads"
    device = results.device if is_gpu else f"{results.device}, {threads}"
    instructions = "" if is_gpu else f", {results.machine['instructions']}"
    command = "; ".join(shlex.join(shlex.split(each)) for each in results.command.split("; "))
    commit = results.commit[:9] + (" with changes" if results.modified else "")
    return (
        f"**{device}{instructions}**, torch {results.versions['torch']}, commit {commit}, {results.date[:10]}:"
        f" `{command}`"
    )


def summaries(records: Sequence[Record], models: Sequence[str] = ()) -> Iterable[tuple[Sequence[str], list]]:
    """Yield head and rows of a table for each suite, of memory only for these models; for all if there are none."""
    rows = summary.speed(records)
    if len(rows):
        several = rows.defaults.nunique() > 1
        head = ("layer, slowest active subnetwork", "time over dense", "least to greatest", "faster than `torch.where`")
        yield head, [_speed(row, several) for _, row in rows.iterrows()]
    if rows := _steps(records):
        yield ("training step over a dense one (Table 8)", "weights", "ψ", "both", "the paper's on its GPU"), rows
    rows = summary.memory(records)
    rows = rows[(rows.peer != "dense") & (rows.model.isin(models) | (not models))]
    if len(rows):
        yield (
            ("bytes a parameter", "parameters", "map", "defaults", "optimiser", "peak over dense"),
            [
                (
                    f"{row.model}, {_scheme(row.peer)}",
                    *(f"{row[name]:.3g}" for name in summary.KEPT),
                    ", ".join(f"{ratio:.3f} by {how}" for how, ratio in row.peak.items()),
                )
                for _, row in rows.iterrows()
            ],
        )


def _speed(row: pd.Series, several: bool) -> tuple[str, ...]:
    defaults = f"{row.defaults}, " * several
    what = f"{row.operator} {row.work}, {row['dtype']}, {row.bits}-bit map, {defaults}`{row.peer}`, {row.shapes} shapes"
    where = "" if math.isnan(row["where"]) else f"{row['where']:.2f}×"
    return what, f"{row['mean']:.2f}", f"{row.low:.2f} to {row.high:.2f}", where


def _steps(records: Sequence[Record]) -> list[tuple[str, ...]]:
    lines = []
    for row in summary.step(records).itertuples():
        samples = f"{row.samples} sample{'s' * (row.samples > 1)}"
        costs = [f"{cost.value:.2f}" if cost else "" for cost in (row.parameters, row.hyperparameters, row.iteration)]
        paper = f"{row.paper[0]}, {row.paper[1]}" if row.paper and row.scheme.startswith("partkernels") else ""
        lines.append((f"{row.model}, batch {row.batch}, {samples}, {_scheme(row.scheme)}", *costs, paper))
    return lines


def _scheme(name: str) -> str:
    known = {"dense": "the dense network", "paper": "the paper's scheme", "floor": "the floor"}
    return known.get(name, f"`{name}`")
