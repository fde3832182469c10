"""Plots of a History: curves over the steps, and the loss of each subnetwork on each chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from partnets.training.records import Records

# The number of columns, beyond which figures are unreadable; more than MOST_PANELS curves of a kind share one panel.
PANEL_COLUMNS = 3
MOST_PANELS = 9
PANEL_SIZE = (4.0, 2.6)  # inches
# Longer curves are rasterised in vector formats: as paths, a noisy loss takes some 20 bytes a step.
MOST_POINTS = 2000


class Panel(NamedTuple):
    """A plot: its title, and a function that draws it into axes."""

    title: str
    draw: Callable[[Axes], None]


def overview(history: Records) -> Figure:
    """Return a figure of all panels, L_ML beside the losses; raise ImportError if matplotlib is not installed."""
    values, others = value_panels(history), result_panels(history)
    if len(values) % PANEL_COLUMNS == 2:  # otherwise L_ML would end a row and the losses begin the next
        values.append(None)
    if history.matrices["matrix"]:
        others.append(matrix_panel(history))
    panels = values + others
    columns = min(len(panels), PANEL_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(columns, rows)
    for position, panel in enumerate(panels, start=1):
        if panel is not None:
            add(figure, panel, (rows, columns, position))
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


def add(figure: Figure, panel: Panel, position: tuple[int, int, int] = (1, 1, 1)) -> None:
    """Draw a panel into a figure, at a position (rows, columns, index from 1)."""
    axes = figure.add_subplot(*position)
    axes.set_title(panel.title, size="medium", parse_math=False)  # a name with two dollar signs is not a formula
    panel.draw(axes)


def value_panels(history: Records) -> list[Panel]:
    """Return panels of the hyperparameters over the steps, in their units."""
    curves = {name: (history.steps["step"], values) for name, values in history.values.items()}
    return _one_each(history, curves, "hyperparameters")


def result_panels(history: Records) -> list[Panel]:
    """Return panels of L_ML, the losses and the metrics over the steps."""

    def draw_lml(axes: Axes) -> None:
        _set_steps(axes, history)
        _curve(axes, history.lml["step"], history.lml["lml"])
        _mark_best(axes, history)

    def draw_losses(axes: Axes) -> None:
        _set_steps(axes, history)
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

    metrics = {name: (record["step"], record["value"]) for name, record in history.metrics.items()}
    return [
        Panel("L_ML [nats]", draw_lml),
        Panel("loss [nats per example]", draw_losses),
        *_one_each(history, metrics, "metrics"),
    ]


def matrix_panel(history: Records) -> Panel:
    """Return a panel of the latest losses of each subnetwork on each chunk, with boxes around those that L_ML sums."""
    step, matrix = history.matrices["step"][-1], history.matrices["matrix"][-1]
    count = len(matrix)

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        image = axes.imshow(matrix, cmap="Blues", aspect="auto")
        ticks = range(count)
        axes.set_xticks(ticks, [str(j + 1) for j in ticks])
        axes.set_yticks(ticks, [str(k + 1) for k in ticks])
        axes.set(xlabel="chunk (boxed: terms of L_ML)", ylabel="subnetwork")
        for k, row in enumerate(matrix):
            for j, loss in enumerate(row):
                colour = "white" if math.isfinite(loss) and image.norm(loss) > 0.6 else "black"
                axes.text(j, k, f"{loss:.3g}", color=colour, ha="center", va="center", size=min(9, 70 / count))
        for k in range(count - 1):
            axes.add_patch(Rectangle((k + 0.5, k - 0.5), 1, 1, fill=False, edgecolor="C1", linewidth=2))

    return Panel(f"loss by chunk, step {step}", draw)


def running_mean(values: Sequence[float | None], window: int) -> list[float]:
    """Return at each position the mean of the finite values among the last `window`, or NaN.

    Example:
        >>> running_mean([1.0, None, 3.0, 5.0], window=2)
        [1.0, 1.0, 3.0, 4.0]
    """
    import pandas

    finite = pandas.Series(values, dtype=float).where(lambda series: series.abs() < math.inf)
    return finite.rolling(window, min_periods=1).mean().tolist()


def _one_each(history: Records, curves: dict[str, tuple[list, list]], together: str) -> list[Panel]:
    """Return a panel for each curve, or one for all if there are more than MOST_PANELS."""

    def panel(title: str, shown: list[tuple[list, list]]) -> Panel:
        def draw(axes: Axes) -> None:
            _set_steps(axes, history)
            for x, y in shown:
                _curve(axes, x, y)

        return Panel(title, draw)

    if len(curves) > MOST_PANELS:
        return [panel(together, list(curves.values()))]
    return [panel(name, [curve]) for name, curve in curves.items()]


def _set_steps(axes: Axes, history: Records) -> None:
    """Set the same range of steps in all panels, so that they can be compared."""
    axes.set(xlabel="step", xlim=(0, max(history.steps["step"], default=1)))


def _curve(axes: Axes, x: list, y: list, **style) -> None:
    """Draw a line with gaps at None, and points for single values between gaps."""
    import numpy

    y = numpy.array(y, dtype=float)
    finite = numpy.isfinite(numpy.pad(y, 1, constant_values=numpy.nan))
    alone = numpy.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])
    style = {"linewidth": 1.2, "markersize": 4} | style
    axes.plot(x, y, marker=".", markevery=alone.tolist(), rasterized=len(y) > MOST_POINTS, **style)


def _mark_best(axes: Axes, history: Records) -> None:
    best = history.best_lml()
    if best is not None:
        axes.axvline(best[0], color="C7", linestyle=":", linewidth=1)
