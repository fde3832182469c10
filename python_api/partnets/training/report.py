"""A History as one HTML page: a summary, plots and the matrix of losses, without requests or scripts."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from html import escape
from os import PathLike
from typing import TYPE_CHECKING

from partnets.training import plots
from partnets.utils.files import replacing

if TYPE_CHECKING:
    from partnets.training.records import Records

# A colour that nothing else uses, replaced by the page's text colour after drawing.
INK = "#010203"
INK_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("savefig.facecolor", "axes.facecolor", "legend.facecolor"), "none"),
    "svg.fonttype": "none",
    "svg.hashsalt": "partnets",  # the same history gives the same bytes
}

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --quiet: #5b6570; --rule: #dde2e7; --box: #c04e00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e4e7eb; --quiet: #9aa5b1; --rule: #363e47; --box: #f28e4c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { color: var(--quiet); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child { text-align: left; min-width: 11rem; font-weight: 400; overflow-wrap: anywhere; }
thead th { color: var(--quiet); font-weight: 400; vertical-align: bottom; }
.matrix td, .matrix th { min-width: 0; padding: 0.35rem 0.6rem; white-space: nowrap; }
.matrix .lml { outline: 2px solid var(--box); outline-offset: -2px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
"""


def write(history: Records, path: str | PathLike) -> None:
    """Write the page atomically; raise ImportError and ValueError as documented in History.report."""
    if not history.steps["step"]:
        raise ValueError("the history has no step yet, so there is nothing to report; call Trainer.fit first.")
    contents = page(history)
    with replacing(path) as file:
        file.write(contents)


def page(history: Records) -> str:
    """Return the HTML page of a history with at least one step."""
    title = f"Training of {history.steps['step'][-1]} steps"
    sections = [_summary(history), _results(history), _values(history), _matrix(history)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{''.join(sections)}</body>\n</html>\n"
    )


def _summary(history: Records) -> str:
    rows = [("steps", len(history.steps["step"]), "")]
    if history.lml["lml"]:
        rows.append(("final L_ML [nats]", history.lml["lml"][-1], f"at step {history.lml['step'][-1]}"))
    if best := history.best_lml():
        rows.append(("best L_ML [nats]", best[1], f"at step {best[0]}"))
    return _table((), rows)


def _results(history: Records) -> str:
    table = ""
    if history.metrics:
        rows = [(name, record["value"][-1], record["step"][-1]) for name, record in history.metrics.items()]
        table = _table(("metric", "latest", "at step"), rows)
    return f"<h2>Over the steps</h2>\n{_plots(plots.result_panels(history))}{table}"


def _values(history: Records) -> str:
    if not history.values:
        return ""
    steps = history.steps["step"]
    head = ("hyperparameter", f"after step {steps[0]}", f"after step {steps[-1]}")
    table = _table(head, [(name, values[0], values[-1]) for name, values in history.values.items()])
    if len(history.values) > plots.MOST_PANELS:  # the probabilities of a mask can be hundreds
        table = f"<details><summary>all {len(history.values)}</summary>\n{table}</details>\n"
    return f"<h2>Hyperparameters</h2>\n{_plots(plots.value_panels(history))}{table}"


def _plots(panels: list[plots.Panel]) -> str:
    figures = "".join(f"<figure>{_svg(panel)}</figure>\n" for panel in panels)
    return f'<div class="plots">\n{figures}</div>\n'


def _matrix(history: Records) -> str:
    """Return the matrix of losses as a table and heat map; higher losses are a stronger blue."""
    if not history.matrices["matrix"]:
        return ""
    matrix = history.matrices["matrix"][-1]
    finite = [loss for row in matrix for loss in row if math.isfinite(loss)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    numbers = range(1, len(matrix) + 1)
    lines = []
    for k, row in zip(numbers, matrix, strict=True):
        cells = []
        for j, loss in zip(numbers, row, strict=True):
            share = (loss - low) / (high - low) if math.isfinite(loss) and high > low else 0.0
            kind = ' class="lml"' if j == k + 1 else ""
            cells.append(f'<td{kind} style="background: rgb(31 119 180 / {0.5 * share:.2f})">{_text(loss)}</td>')
        lines.append(f'<tr><th scope="row">subnetwork {k}</th>{"".join(cells)}</tr>\n')
    head = "".join(f'<th scope="col">chunk {j}</th>' for j in numbers)
    return (
        "<h2>Loss of each subnetwork on each chunk</h2>\n"
        f"<p>Mean, in nats per example, at step {history.matrices['step'][-1]}. Subnetwork k has seen chunks 1 to k."
        " L_ML is minus the sum of the boxed losses over their examples.</p>\n"
        f'<div class="wide"><table class="matrix">\n<thead><tr><td></td>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(lines)}</tbody>\n</table></div>\n"
    )


def _table(head: Iterable[str], rows: Iterable[tuple]) -> str:
    """Return an HTML table; the first cell of a row is its name."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>\n'
        for name, *cells in rows
    ]
    head = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    return f'<div class="wide"><table>\n{head}<tbody>\n{"".join(lines)}</tbody>\n</table></div>\n'


def _text(cell: str | float | None) -> str:
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else escape(str(cell))


def _svg(panel: plots.Panel) -> str:
    figure = plots.new_figure()  # raises an error that names the remedy if matplotlib is missing
    import matplotlib

    with matplotlib.rc_context(INK_STYLE):
        plots.add(figure, panel)
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", dpi=200, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'<g id="[^"]*">', "<g>", svg)  # matplotlib's ids of groups are the same in all plots
