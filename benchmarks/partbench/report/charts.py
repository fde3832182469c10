"""Charts: matplotlib's SVG in the page's colours, light or dark; tooltips of marks show their figures."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from partbench.figures import ours
from partbench.measuring.estimates import Estimate
from partbench.report import text

# Each colour stands for the variable of the same name in style.css.
COLOURS = {
    "text": "#1b1f24",
    "quiet": "#5b6570",
    "rule": "#e2e6ea",
    "page": "#fefefe",
    "ours-1": "#0063a8",
    "ours-2": "#5b3fb5",
    "ours-3": "#37727f",
    "other-1": "#c04e00",
    "other-2": "#8a6a00",
    "other-3": "#a83a86",
    "other-4": "#007a5a",
    "state": "#b7c2cc",
}
OURS, MARKERS = ("ours-1", "ours-2", "ours-3"), ("o", "s", "D", "^", "v")
OTHERS = (("other-1", "o"), ("other-2", "s"), ("other-3", "^"), ("other-4", "D"))
# Signs in the legend; ours are filled.
SIGNS = {"o": "○●", "s": "□■", "^": "△▲", "v": "▽▼", "D": "◇◆", "|": "❘❘", "x": "✕✕"}
PIECES = {"parameters": "ours-1", "map": "other-1", "defaults": "other-2", "state": "state"}
PUBLISHED = "paper, as published"
# Inches: a chart's width, the heights of a text line and of a lane, and a letter's width.
WIDTH, LINE, LANE, LETTER = 3.7, 0.21, 0.115, 0.076
RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "partkernels",
    "font.size": 8.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "xtick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["quiet"],
    "axes.edgecolor": COLOURS["rule"],
    "ytick.color": COLOURS["rule"],
    "ytick.labelcolor": COLOURS["quiet"],
    "text.color": COLOURS["quiet"],
}
_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """A line of a dot plot: its label, our figure in words, and an estimate and a tooltip for each peer."""

    label: str
    value: str
    dots: Mapping[str, tuple[Estimate, str]]

    @classmethod
    def of(cls, label: str, found: Mapping[str, Estimate], said: Mapping[str, str] | None = None, no: str = "") -> Row:
        """Build a row from the ratios of peers and further text on each; `no` says why there is no ratio of ours."""
        dots = {peer: (ratio, tip(peer, ratio, (said or {}).get(peer, ""))) for peer, ratio in found.items()}
        mine = {peer.removeprefix("partkernels "): text.ratio(found[peer].value) for peer in ours(found)}
        named = (value if len(mine) == 1 else f"{name} {value}" for name, value in mine.items())
        return cls(label, " · ".join(named) or no or "no figure", dots)


def tip(peer: str, ratio: Estimate, more: str = "") -> str:
    """Return the tooltip of a mark."""
    value, interval = text.ratios(ratio)
    return f"{peer}: {value}" + (f" [{interval}]" if interval else "") + (f", {more}" if more else "")


@dataclass(frozen=True)
class Styles:
    """Colours and markers of peers, ours first; lanes have the same order from the top."""

    peers: Sequence[str]

    @classmethod
    def of(cls, peers: Iterable[str]) -> Styles:
        names = [peer for peer in dict.fromkeys(peers) if peer != "dense"]
        mine = ours(names)
        return cls([*mine, *(peer for peer in names if peer not in mine)])

    def __getitem__(self, peer: str) -> tuple[str, str]:
        """Return colour and marker."""
        mine = ours(self.peers)
        if peer in mine:
            return OURS[mine.index(peer) % len(OURS)], MARKERS[mine.index(peer) % len(MARKERS)]
        if peer in ("floor", PUBLISHED):
            return "text", "|" if peer == "floor" else "x"
        known = [name for name in text.ABOUT_PEERS if name != "dense"]
        return OTHERS[(known.index(peer) if peer in known else len(peer)) % len(OTHERS)]

    def legend(self) -> list[tuple[str, str, str]]:
        """Return colour, sign and name of each peer."""
        found = ((peer, *self[peer]) for peer in self.peers)
        return [(colour, SIGNS[marker][colour in OURS], peer) for peer, colour, marker in found]


def span(estimates: Iterable[Estimate | None]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis that shows all estimates and 1; a small range would magnify noise."""
    ends = [end for each in estimates if each for end in (each.low, each.value, each.high) if 0 < end < math.inf]
    low, high = math.log(min([1.0, *ends])), math.log(max([1.0, *ends]))
    spare = max(0.0, math.log(1.6) - (high - low)) / 2
    margin = 0.06 * (high - low + 2 * spare)
    return math.exp(low - spare - margin), math.exp(high + spare + margin)


def dots(title: str, rows: Sequence[Row], styles: Styles, limits: tuple[float, float]) -> Markup:
    """Plot a line of text for each case above its marks, one peer below the other; rules are only beside the marks."""
    lanes = max(1, len(styles.peers))
    pitch = LINE + LANE * lanes + 0.06
    letters = max((len(row.label) + len(row.value) for row in rows), default=0)
    with matplotlib.rc_context(RC):
        figure, axes = _axes(title, pitch * len(rows) + 0.05, left=0.03, width=max(WIDTH, LETTER * letters + 0.3))
        axes.set(xscale="log", xlim=limits, ylim=(pitch * len(rows) + 0.05, 0), yticks=[])
        ticks = _ticks(axes.xaxis, limits)
        for number, row in enumerate(rows):
            top = pitch * number + LINE
            for tick in ticks:
                style = {"color": COLOURS["quiet"], "lw": 1} if tick == 1 else {"color": COLOURS["rule"], "lw": 0.7}
                axes.vlines(tick, top - 0.02, top + LANE * lanes, **style, zorder=0)
            axes.text(0, top - 0.06, row.label, transform=axes.get_yaxis_transform(), color=COLOURS["quiet"])
            bold = {"ha": "right", "weight": "bold", "color": COLOURS["ours-1"]}
            axes.text(1, top - 0.06, row.value, transform=axes.get_yaxis_transform(), **bold)
            for lane, peer in enumerate(styles.peers):
                if peer in row.dots:
                    estimate, said = row.dots[peer]
                    y = top + LANE * (lane + 0.5)
                    if estimate.confidence:
                        _line(axes, [estimate.low, estimate.high], [y, y], styles[peer][0])
                    _mark(axes, estimate.value, y, *styles[peer], said)
        said = (f"{row.label}: {'; '.join(said for _, said in row.dots.values())}" for row in rows)
        return _svg(figure, title, ". ".join(said))


def bars(title: str, rows: Mapping[str, Mapping[str, float]], most: float) -> Markup:
    """Plot a bar for each peer, of pieces in bytes a parameter; charts with the same `most` have one scale."""
    with matplotlib.rc_context(RC):
        figure, axes = _axes(title, 0.2 * len(rows), left=0.3, bottom=0.04)
        axes.set(xlim=(0, 1.35 * most), ylim=(len(rows) - 0.4, -0.6), xticks=[])
        axes.set_yticks(range(len(rows)), [_words(name) for name in rows], color=COLOURS["quiet"])
        axes.tick_params(length=0)
        said = []
        for y, (peer, pieces) in enumerate(rows.items()):
            start = 0.0
            for name, value in pieces.items():
                if value:
                    words = f"{peer}, {name}: {text.significant(value)} B"
                    colours = {"color": COLOURS[PIECES[name]], "edgecolor": COLOURS["page"]}
                    axes.barh(y, value, 0.75, left=start, gid=_id(words), **colours)
                    start += value
                    said.append(words)
            axes.text(1, y, f"{start:.2f} B", ha="right", va="center", transform=axes.get_yaxis_transform())
        return _svg(figure, title, "; ".join(said))


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, Estimate, str]]],
    styles: Styles,
    limits: tuple[float, float],
) -> Markup:
    """Plot the growth of a ratio: a line for each peer, with place, estimate and tooltip of each point."""
    with matplotlib.rc_context(RC):
        figure, axes = _axes(title, 1.35, left=0.1, width=2.7)
        axes.set(xscale="log", yscale="log", ylim=limits)
        places = sorted({place for points in series.values() for place, _, _ in points})
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        for tick in _ticks(axes.yaxis, limits):
            axes.axhline(tick, color=COLOURS["quiet" if tick == 1 else "rule"], lw=1 if tick == 1 else 0.7, zorder=0)
        for peer, points in series.items():
            _line(axes, [x for x, _, _ in points], [y.value for _, y, _ in points], styles[peer][0])
            for x, estimate, said in points:
                if estimate.confidence:
                    _line(axes, [x, x], [estimate.low, estimate.high], styles[peer][0])
                _mark(axes, x, estimate.value, *styles[peer], said)
        return _svg(figure, title, "; ".join(said for points in series.values() for _, _, said in points))


def _axes(title: str, height: float, *, left: float, bottom: float = 0.24, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Create axes of this height in inches below their title."""
    whole = height + bottom + 0.26
    figure = Figure(figsize=(width, whole))
    axes = figure.add_axes((left, bottom / whole, 0.97 - left, height / whole))
    figure.text(0.03, 1 - 0.14 / whole, _words(title), size=9.5, weight="bold", color=COLOURS["text"])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2)
    return figure, axes


def _ticks(axis, limits: tuple[float, float]) -> list[float]:
    """Set as many ticks at round numbers as fit, with 1 among them in bold, and return them."""
    fine = [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]
    for steps in (fine, [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]):
        found = [
            tick for tick in LogLocator(subs=steps, numticks=99).tick_values(*limits) if limits[0] < tick < limits[1]
        ]
        if len(found) <= 6:
            break
    found = sorted({round(float(tick), 9) for tick in found} | {1.0})
    axis.set_major_locator(FixedLocator(found))
    axis.set_minor_locator(NullLocator())
    axis.set_ticklabels([f"{tick:g}" for tick in found])
    for tick, label in zip(found, axis.get_ticklabels(), strict=True):
        if tick == 1:
            label.set(weight="bold", color=COLOURS["text"])
    return found


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    axes.plot(x, y, color=COLOURS[colour], alpha=0.6, lw=1.4, solid_capstyle="butt", zorder=1)


def _mark(axes: Axes, x: float, y: float, colour: str, marker: str, said: str) -> None:
    face = COLOURS[colour if colour in OURS else "page"]
    style = {"color": COLOURS[colour], "markerfacecolor": face, "markersize": 5, "markeredgewidth": 1.3}
    axes.plot([x], [y], marker, gid=_id(said), clip_on=False, zorder=3, **style)


def _id(said: str) -> str:
    return f"tip {said}"


def _words(said: str) -> str:
    """Escape dollars, between which matplotlib expects mathematics."""
    return said.replace("$", r"\$")


def _svg(figure: Figure, title: str, said: str) -> Markup:
    """Render the figure for a page: without a file's header, with unique ids, in the page's colours."""
    for each in figure.findobj(matplotlib.text.Text):
        each.set_parse_math(False)
    file, number = io.StringIO(), next(_numbers)
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = file.getvalue()
    drawn = re.sub(r'<g id="tip (.*?)">', r"<g><title>\1</title>", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", re.sub(r"<!--.*?-->\s*", "", drawn, flags=re.DOTALL))
    drawn = re.sub(r'(id="|"#|url\(#)(\w+)', rf"\g<1>c{number}-\2", re.sub(r"xlink:href", "href", drawn))
    drawn = re.sub(r"<style.*?</style>", "", re.sub(r"\s*\n\s*", " ", drawn))
    for name, colour in COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    width = float(figure.get_figwidth()) * 100
    head = f'<svg class="chart" style="width: {width:.0f}px" role="img" aria-label="{html.escape(said)}"'
    box = re.search(r'viewBox="[^"]*"', drawn)[0]
    return Markup(f"{head} {box}>{drawn[drawn.index('>') + 1 :].strip()}")
