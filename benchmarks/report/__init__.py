"""The pages: one or several runs on one, and two runs side by side on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from benchmarks.compare import Change
from benchmarks.report import compared, memory, optim, overview, problems, provenance, speed, step, text
from benchmarks.report.layout import Section
from benchmarks.results import Results

__all__ = ["comparison", "page"]

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Run:
    """What the page says of one file of results."""

    name: str
    results: Results
    tiles: list[overview.Tile] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    problems: list[problems.Problem] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, results: Results) -> Run:
        sections = [suite.section(results) for suite in (speed, memory, step, optim)]
        return cls(
            name,
            results,
            overview.tiles(results),
            [section for section in sections if section],
            problems.problems(results.records),
        )


def page(results: Sequence[Results]) -> str:
    """One self-contained HTML document: a summary of all runs, then each run with charts and every figure.

    Raises:
        ValueError: there is no run.
    """
    if not results:
        raise ValueError("no results were given; pass at least one file that `python -m benchmarks` wrote.")
    runs = [Run.of(name, each) for name, each in zip(text.labels(results), results, strict=True)]
    return TEMPLATES.get_template("page.html.j2").render(
        runs=runs,
        tables=overview.tables([(run.name, run.results) for run in runs]),
        alarming=problems.alarming,
        provenance=provenance,
        text=text,
    )


def comparison(before: Results, after: Results, changes: Sequence[Change]) -> str:
    """One self-contained HTML document: what changed from one run to another beyond noise, and all figures of both."""
    return TEMPLATES.get_template("comparison.html.j2").render(
        compared=compared.Comparison(before, after, changes), text=text
    )
