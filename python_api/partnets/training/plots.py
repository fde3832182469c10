"""Plots of a History: curves over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The number of columns, beyond which figures are unreadable; more than MOST_PANELS curves of a kind share one panel.
PANEL_COLUMNS = 3
MOST_PANELS = 9
PANEL_SIZE = (4.0, 2.6)  # inches

# A panel's title, and a function that draws it into axes.
Panel = tuple[str, "Callable[[Axes], None]"]


def overview(history: Any) -> Figure:
    """Return a figure of all panels, L_ML beside the losses; raise ImportError if matplotlib is not installed."""
    steps = history.steps["step"]
    panels: list[Panel | None] = []
    panels += _panels("hyperparameters", {name: (steps, values) for name, values in history.values.items()})
    if len(panels) % PANEL_COLUMNS == 2:  # otherwise L_ML would end a row and the losses begin the next
        panels.append(None)
    panels += [
        ("L_ML [nats]", partial(_draw_lml, history)),
        ("loss [nats per example]", partial(_draw_losses, history)),
    ]
    metrics = {name: (record["step"], record["value"]) for name, record in history.metrics.items()}
    panels += _panels("metrics", metrics)
    columns = min(len(panels), PANEL_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(columns, rows)
    for position, panel in enumerate(panels, start=1):
        if panel is not None:
            title, draw = panel
            axes = figure.add_subplot(rows, columns, position)
            axes.set_title(title, size="medium", parse_math=False)  # a name with two dollar signs is not a formula
            draw(axes)
            # The same range in all panels, so that they can be compared.
            axes.set(xlabel="step", xlim=(0, max(steps, default=1)))
    return figure


def new_figure(columns: int = 1, rows: int = 1) -> Figure:
    """Return an empty figure for this number of panels, without a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plots of a History need matplotlib; pip install matplotlib, or partkernels' extra 'plot'."
        ) from error
    return Figure(figsize=(PANEL_SIZE[0] * columns, PANEL_SIZE[1] * rows), layout="constrained")


def _panels(together: str, curves: dict[str, tuple[list, list]]) -> list[Panel]:
    """Return a panel for each curve, or one for all if there are more than MOST_PANELS."""
    if len(curves) > MOST_PANELS:
        return [(together, partial(_draw_curves, list(curves.values())))]
    return [(name, partial(_draw_curves, [curve])) for name, curve in curves.items()]


def _draw_curves(curves: list[tuple[list, list]], axes: Axes) -> None:
    for x, y in curves:
        _curve(axes, x, y)


def _draw_lml(history: Any, axes: Axes) -> None:
    _curve(axes, history.lml["step"], history.lml["lml"])
    _mark_best(axes, history)


def _draw_losses(history: Any, axes: Axes) -> None:
    steps = history.steps["step"]
    window = min(max(len(steps) // 20, 10), 500)
    losses = [("in chunks (w)", "C0", history.steps["loss"])]
    if any(loss is not None for loss in history.steps["hyper_loss"]):
        losses.append(("out of chunk (ψ)", "C1", history.steps["hyper_loss"]))
    for label, colour, loss in losses:
        _curve(axes, steps, loss, color=colour, linewidth=0.5, markersize=1.5, alpha=0.4)
        _curve(axes, steps, running_mean(loss, window), color=colour, label=f"{label}, mean of {window} steps")
    axes.legend(fontsize="small")
    _mark_best(axes, history)


def running_mean(values: Sequence[float | None], window: int) -> list[float]:
    """Return at each position the mean of the finite values among the last `window`, or NaN.

    Example:
        >>> running_mean([1.0, None, 3.0, 5.0], window=2)
        [1.0, 1.0, 3.0, 4.0]
    """
    import pandas

    finite = pandas.Series(values, dtype=float).where(lambda series: series.abs() < math.inf)
    return finite.rolling(window, min_periods=1).mean().tolist()


def _curve(axes: Axes, x: list, y: list, **style) -> None:
    """Draw a line with gaps at None, and points for single values between gaps."""
    import numpy

    y = numpy.array(y, dtype=float)
    finite = numpy.isfinite(numpy.pad(y, 1, constant_values=numpy.nan))
    alone = numpy.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    style = {"linewidth": 1.2, "markersize": 4} | style
    axes.plot(x, y, marker=".", markevery=alone.tolist(), **style)


def _mark_best(axes: Axes, history: Any) -> None:
    if (best := history.best_lml()) is not None:
        axes.axvline(best[0], color="C7", linestyle=":", linewidth=1)
