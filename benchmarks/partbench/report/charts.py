"""Charts: matplotlib's SVG inside a page."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from partbench.measuring.estimates import Estimate

# Inches: a chart's width, the height of all that is not a row, and the height of a mark.
WIDTH, FRAME, LANE = 8.0, 1.0, 0.13
_numbers = itertools.count()


def dots(title: str, rows: Mapping[str, Mapping[str, Estimate]]) -> Markup:
    """Plot ratios and their intervals on a logarithmic axis: a row for each case, with a colour for each peer.

    Args:
        title: of the chart.
        rows: for each case, a ratio for each peer.
    """
    peers = list(dict.fromkeys(peer for row in rows.values() for peer in row))
    figure = Figure(figsize=(WIDTH, FRAME + LANE * len(rows) * (len(peers) + 1)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1)
    for lane, peer in enumerate(peers):
        offset = (lane + 1) / (len(peers) + 1) - 0.5
        places = [y + offset for y, row in enumerate(rows.values()) if peer in row]
        found = [row[peer] for row in rows.values() if peer in row]
        ends = [each.value - each.low for each in found], [each.high - each.value for each in found]
        axes.errorbar([each.value for each in found], places, xerr=ends, fmt=".", label=peer)
    axes.set(title=title, xscale="log", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", linewidth=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return _svg(figure)


def _svg(figure: Figure) -> Markup:
    """Render the figure for a page: without a file's header, and with ids that no other chart has."""
    for each in figure.findobj(matplotlib.text.Text):
        each.set_parse_math(False)  # otherwise dollars enclose mathematics
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    drawn = re.sub(r'\sxmlns(:\w+)?="[^"]*"|<!--.*?-->', "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    return Markup(re.sub(r'( id="|"#|url\(#)', rf"\g<1>c{next(_numbers)}-", drawn))
