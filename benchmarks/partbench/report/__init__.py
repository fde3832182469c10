"""Two HTML pages: one shows one or several runs, the other compares two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from partbench.compare import Change
from partbench.report import compared, overview, provenance, sections, text
from partbench.results import Results

__all__ = ["comparison", "page"]

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(results: Sequence[Results]) -> str:
    """Return a self-contained HTML document: a summary of all runs, then each run with charts and every figure.

    Raises:
        ValueError: results is empty.
    """
    if not results:
        raise ValueError("no results were given; pass at least one file that `python -m partbench` wrote.")
    names = text.labels(results)
    runs = [
        {
            "name": name,
            "results": run,
            "tiles": overview.tiles(run.records),
            "sections": sections.sections(run),
            "problems": overview.problems(run.records),
        }
        for name, run in zip(names, results, strict=True)
    ]
    tables = overview.tables(list(zip(names, results, strict=True)))
    return TEMPLATES.get_template("page.html.j2").render(runs=runs, tables=tables, provenance=provenance, text=text)


def comparison(before: Results, after: Results, changes: Sequence[Change]) -> str:
    """Return a self-contained HTML document: changes beyond noise between two runs, and all figures of both."""
    found = compared.Comparison(before, after, changes)
    return TEMPLATES.get_template("comparison.html.j2").render(compared=found, text=text)
