"""ACC over tasks and over communication rounds: a line per run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cfl.metrics.measure import ACCURACY, Measure
from cfl.metrics.transfer import average_accuracy
from cfl.reporting.figures.base import PAGE_WIDTH, PRINT, new_figure, require_square
from cfl.reporting.line_styles import COLOURS, LineStyle, line_styles

_LINE_WIDTH = 1.3
_FIRST_TASK: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.7}
_TARGET: dict[str, Any] = {"color": "#555555", "linewidth": 0.7, "linestyle": (0, (4, 2))}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = (("o", 4.0), ("s", 4.0), ("D", 3.8), ("^", 4.6), ("v", 4.6), ("P", 5.0), ("X", 5.0), ("*", 7.0))  # and sizes


@rc_context(PRINT)
def accuracy_curve(
    matrices: Mapping[str, Tensor],
    measure: Measure = ACCURACY,
    means: Mapping[str, Sequence[float]] | None = None,
    *,
    deviations: Mapping[str, Sequence[float]] | None = None,
    styles: Mapping[str, LineStyle] | None = None,
    width: float = PAGE_WIDTH,
) -> Figure:
    """ACC over the tasks seen so far after each task, one line per run, and the accuracy on task 0 as a thin line.

    Rows that were not evaluated are skipped.

    Args:
        matrices: name of the run to ``[T, T]`` in percent; T may differ.
        measure: what the values are.
        means: name of the run to ACC after each task, NaN where unknown, for runs whose ACC is not the mean of their
            matrix (:func:`cfl.federation.matrix_rows.means`).
        deviations: name of the run to the standard deviation of ACC after each task, drawn as a band.
        styles: name of the run to the look of its line; None gives the method of that name its own.
        width: in inches.

    Raises:
        ValueError: nothing to draw, or a matrix that is not ``[T, T]``.
    """
    if not matrices:
        raise ValueError("there is no accuracy matrix to draw")
    means, deviations = means or {}, deviations or {}
    figure, axes = _line_picture([*matrices], width)
    styles = styles or line_styles({name: name for name in matrices})
    for name, matrix in matrices.items():
        require_square(matrix, name)
        look = line_look(styles[name])
        average = means.get(name) or [average_accuracy(matrix, after=t).item() for t in range(len(matrix))]
        first_task = {key: look[key] for key in ("color", "linestyle")} | _FIRST_TASK
        axes.plot(*_evaluated(matrix[:, 0].tolist()), **first_task)
        axes.plot(*_evaluated(average), **look, zorder=3)
        if name in deviations:
            draw_band(axes, range(len(matrix)), average, deviations[name], look["color"])
    _name_lines(figure, {name: Line2D([], [], **line_look(styles[name])) for name in matrices}, width)
    thin = {"color": "#555555"} | _FIRST_TASK
    kinds = [Line2D([], [], color="#555555", linewidth=_LINE_WIDTH), Line2D([], [], **thin)]
    names = [f"{measure.mean_label} over tasks seen", f"{measure.task_label} 0"]
    figure.legend(kinds, names, loc="outside upper center", ncols=2, frameon=False)
    axes.set(xlabel="after learning task", ylabel=measure.label)
    _set_view(axes, measure)
    return figure


@rc_context(PRINT)
def learning_curves(
    curves: Mapping[str, Sequence[float | None]],
    targets: Sequence[float] = (),
    measure: Measure = ACCURACY,
    *,
    deviations: Mapping[str, Sequence[float | None]] | None = None,
    styles: Mapping[str, LineStyle] | None = None,
    width: float = PAGE_WIDTH,
) -> Figure:
    """ACC after each communication round, from round 0, one line per run, with targets as thin horizontal lines.

    Points are drawn only for rounds with an evaluation. Runs may be of different length.

    Args:
        curves: name of the run to ACC in percent after each round, None where not evaluated.
        targets: in percent.
        measure: what the values are.
        deviations: name of the run to the standard deviation after each round, drawn as a band.
        styles: name of the run to the look of its line; None gives the method of that name its own.
        width: in inches.

    Raises:
        ValueError: nothing to draw, or a run that was never evaluated.
    """
    if not curves:
        raise ValueError("there is no learning curve to draw")
    aims = [f"targets: {', '.join(f'{target:.10g}' for target in targets)} %"] if targets else []
    figure, axes = _line_picture([*curves, *aims], width)
    styles = styles or line_styles({name: name for name in curves})
    for target in targets:
        axes.axhline(target, **_TARGET)
    for name, curve in curves.items():
        points = [(r, acc) for r, acc in enumerate(curve) if acc is not None]
        if not points:
            raise ValueError(f"{name}: a learning curve to draw has at least one evaluation")
        look = line_look(styles[name])
        # At most 12 or 24 markers: more would hide the line, which has every point.
        every = math.ceil(len(points) / (12 if width < PAGE_WIDTH else 24))
        axes.plot(*zip(*points, strict=True), **look, markevery=every, zorder=3)
        if deviations and name in deviations:
            draw_band(axes, range(len(curve)), curve, deviations[name], look["color"])
    handles = {name: Line2D([], [], **line_look(styles[name])) for name in curves}
    _name_lines(figure, handles | {name: Line2D([], [], **_TARGET) for name in aims}, width)
    unit = f"({measure.unit})"
    axes.set(xlabel="communication round", ylabel=f"{measure.mean_label} {unit}")
    _set_view(axes, measure)
    return figure


def line_look(style: LineStyle) -> dict[str, Any]:
    """A style as options of matplotlib's lines."""
    marker, size = _MARKERS[style.marker]
    return {
        "color": COLOURS[style.colour],
        "linestyle": _DASHES[style.dash],
        "marker": marker,
        "linewidth": _LINE_WIDTH,
        "markersize": size,
        "markeredgewidth": 0.5,
        "markeredgecolor": "white",
    }


def draw_band(
    axes: Axes,
    places: Sequence[int],
    means: Sequence[float | None],
    deviations: Sequence[float | None],
    colour: str,
) -> None:
    """One standard deviation above and below a line, where both are known."""
    rows = zip(places, means, deviations, strict=True)
    known = [(x, mean, std) for x, mean, std in rows if mean is not None and std is not None]
    known = [(x, mean, std) for x, mean, std in known if math.isfinite(mean) and math.isfinite(std)]
    low, high = [mean - std for _, mean, std in known], [mean + std for _, mean, std in known]
    axes.fill_between([x for x, _, _ in known], low, high, color=colour, alpha=0.15, linewidth=0)


def _line_picture(names: Sequence[str], width: float) -> tuple[Figure, Axes]:
    height = 0.55 * width if width < PAGE_WIDTH else 0.42 * width
    lines = math.ceil(len(names) / legend_columns(names, width))
    figure = new_figure(figsize=(width, height + 0.4 + 0.14 * lines), layout="constrained")
    return figure, figure.subplots()


def legend_columns(names: Iterable[str], width: float) -> int:
    """Return the number of legend columns that fit below a picture of a width in inches."""
    return max(1, int(width / (0.55 + 0.056 * max(map(len, names)))))


def _name_lines(figure: Figure, handles: Mapping[str, Line2D], width: float) -> None:
    # Names are set after the legend is made: matplotlib leaves out labels that begin with an underscore.
    numbers = [str(k) for k in range(len(handles))]
    columns = legend_columns(handles, width)
    legend = figure.legend([*handles.values()], numbers, loc="outside lower center", ncols=columns, frameon=False)
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set(text=name, parse_math=False)


def _set_view(axes: Axes, measure: Measure) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.margins(x=0.03, y=0.06)
    low, high = axes.get_ylim()
    # A smaller span would magnify noise. Without bounds, values may be of any size.
    least = 10.0 if measure.bounds is not None else 0.1 * max(abs(low), abs(high))
    centre, half = (low + high) / 2, max(high - low, least) / 2
    if measure.bounds is None:
        axes.set_ylim(centre - half, centre + half)
    else:
        axes.set_ylim(max(measure.bounds[0] - 1.0, centre - half), min(measure.bounds[1] + 1.0, centre + half))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _evaluated(values: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(t, value) for t, value in enumerate(values) if not math.isnan(value)]
    return [t for t, _ in kept], [value for _, value in kept]
