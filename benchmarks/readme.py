"""readme: the benchmark tables of the README, made from files of results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import summary
from benchmarks.results import Record, Results

BEGIN, END = "<!-- benchmarks: made by `python -m benchmarks report`; edits are lost -->", "<!-- end of benchmarks -->"
# Whose memory the README shows.
SHOWN = ("MNIST CNN", "ResNet-14", "ViT-tiny", "1-billion transformer")


def write(path: Path, results: Sequence[Results]) -> None:
    """Replaces what stands between the markers of a file.

    Raises:
        ValueError: the markers are not there, once each and in order; the file has not changed then.
    """
    text = path.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest:
        raise ValueError(f"{path} has no place for tables; write the lines {BEGIN!r} and {END!r} into it.")
    path.write_text(f"{head}{BEGIN}\n{tables(results)}\n{END}{tail}")


def tables(results: Sequence[Results]) -> str:
    """Markdown: for each file, where and how it was measured, and a table for each suite."""
    return "\n\n".join("\n\n".join([_how(each), *_tables(each)]) for each in results)


def _how(results: Results) -> str:
    device = results.machine.get("gpu") or f"{results.machine['processor']}, {results.settings['threads']} threads"
    instructions = "" if results.machine.get("gpu") else f", {results.machine['instructions']}"
    commit = results.commit[:9] + (" with changes" if results.modified else "")
    return (
        f"**{device}{instructions}**, torch {results.versions['torch']}, commit {commit}, {results.date[:10]}:"
        f" `{shlex.join(shlex.split(results.command))}`"
    )


def _tables(results: Results) -> Iterable[str]:
    records = results.records
    if rows := summary.speed(records):
        several = len({row.defaults for row in rows}) > 1
        yield _table(
            ("layer, worst live subnetwork", "time over dense", "least to greatest", "faster than `torch.where`"),
            [
                (
                    f"{row.operator} {row.work}, {row.dtype}, {row.bits}-bit map, "
                    f"{f'{row.defaults}, ' * several}`{row.peer}`, {row.shapes} shapes",
                    f"{row.dense[0]:.2f}",
                    f"{row.dense[1]:.2f} to {row.dense[2]:.2f}",
                    "" if math.isnan(row.where) else f"{row.where:.2f}×",
                )
                for row in rows
            ],
        )
    if rows := _steps(records):
        yield rows
    if rows := [row for row in summary.memory(records) if row.model in SHOWN and row.peer != "dense"]:
        yield _table(
            ("bytes a parameter", "parameters", "map", "defaults", "optimiser", "peak over dense"),
            [
                (
                    f"{row.model}, {_scheme(row.peer)}",
                    *(f"{row.bytes[name]:.3g}" for name in ("parameters", "map", "defaults", "state")),
                    ", ".join(f"{ratio:.3f} by {how}" for how, ratio in row.peak_of_dense.items()),
                )
                for row in rows
            ],
        )


def steps(results: Results) -> str:
    """How a file was measured, and its table of training steps (Table 8)."""
    return f"{_how(results)}\n\n{_steps(results.records)}"


def _steps(records: Sequence[Record]) -> str:
    rows = [row for row in summary.step(records) if "series" not in row.case]
    if not rows:
        return ""
    return _table(
        ("training step over a dense one (Table 8)", "weights", "ψ", "the paper's on its GPU"),
        [
            (
                f"{row.case['model']}, batch {row.case['batch']}, {row.case['samples']} sample"
                f"{'s' * (row.case['samples'] > 1)}, {_scheme(row.scheme)}",
                f"{row.parameters.value:.2f}" if row.parameters else "",
                f"{row.hyperparameters.value:.2f}" if row.hyperparameters else "",
                f"{row.paper[0]}, {row.paper[1]}" if row.paper and row.scheme != "paper" else "",
            )
            for row in rows
        ],
    )


def _scheme(name: str) -> str:
    return {"paper": "the paper's scheme", "floor": "the floor"}.get(name, f"`{name}`")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
