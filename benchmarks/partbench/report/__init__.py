"""An HTML page that shows one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from partbench.report import provenance, readme, text
from partbench.report.sections import problems, sections
from partbench.report.tables import Table
from partbench.results import Results

__all__ = ["page"]

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
    runs = [
        {
            "results": run,
            "tables": [_plain(*table) for table in readme.summaries(run.records)],
            "sections": sections(run),
            "alarming": problems(run.records, "refused", "failed"),
            "missing": problems(run.records, "missing"),
        }
        for run in results
    ]
    return TEMPLATES.get_template("page.html.j2").render(runs=runs, provenance=provenance, text=text)


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of the documentation without Markdown's marks of code."""
    head, *rows = ([cell.replace("`", "") for cell in row] for row in (head, *rows))
    return Table("Summary", head, rows)
