"""Pictures of accuracy matrices and learning curves, as matplotlib figures that need no display.

Widths and letters are those of an article: a column is 3.3 inches wide, a page 6.9, letters have 7 and 8 points.

Colours are told apart by readers with any form of colour blindness and in grey: the scale is cividis, lines have
markers and dashes beside their colours (:mod:`cfl.reporting.line_styles`). Every matrix is ``[T, T]`` in percent with
``a[t, i]`` the accuracy on task i after learning task t, NaN where not evaluated (:mod:`cfl.metrics.transfer`); or
whatever else a :class:`cfl.metrics.measure.Measure` says.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cfl.metrics.measure import ACCURACY, Measure
from cfl.metrics.transfer import average_accuracy
from cfl.reporting.attention import read_attention
from cfl.reporting.line_styles import COLOURS, LineStyle, line_styles
from cfl.reporting.rounding import rounded, significant
from cfl.runtime.atomic_write import replacing

NUMBERS_UP_TO = 12
"""Largest number of tasks for which a heatmap prints the accuracies into its cells."""

COLUMN_WIDTH, PAGE_WIDTH = 3.3, 6.9
"""Inches."""
PRINT: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.handlelength": 2.4,
}
"""Settings of matplotlib while a picture is made."""
_FIRST_TASK: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.7}
_TARGET: dict[str, Any] = {"color": "#555555", "linewidth": 0.7, "linestyle": (0, (4, 2))}
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = (("o", 4.0), ("s", 4.0), ("D", 3.8), ("^", 4.6), ("v", 4.6), ("P", 5.0), ("X", 5.0), ("*", 7.0))  # sizes
_ATTENTION = "PuOr"
_LIGHTER = 0.4  # share of the colour that cells of tasks not yet learned keep; the rest is white
_UNSEEN_HATCH: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "#7f7f7f",
    "hatch": "////",
    "linewidth": 0.0,
    "alpha": 0.4,
}


def _figure(figsize: tuple[float, float], layout: Literal["constrained", "compressed"]) -> Figure:
    """An empty figure that a notebook shows, also where pyplot is not imported.

    Not of a class of its own: loggers know matplotlib's figures by the name of their class.
    """
    figure = Figure(figsize=figsize, layout=layout)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    return file.getvalue()


def colour_scale(measure: Measure, matrices: Iterable[Tensor] = ()) -> ScalarMappable:
    """Values to colours, bright ones for what is good.

    Args:
        measure: says how far the scale goes; if it does not, the values do.
        matrices: all values to be shown, NaN for none.
    """
    bounds = measure.bounds
    if bounds is None:
        values = torch.cat([matrix.flatten() for matrix in matrices])
        values = values[~torch.isnan(values)]
        bounds = (values.min().item(), values.max().item()) if len(values) else (0.0, 1.0)
    return ScalarMappable(
        Normalize(*bounds, clip=True), colormaps["cividis_r" if measure.lower_is_better else "cividis"]
    )


def cell_colours(value: float, seen: bool = True, scale: ScalarMappable | None = None) -> tuple[str, str]:
    """Background and text colour, as ``#rrggbb``, of a table cell showing ``value``.

    Args:
        value: an accuracy in percent if no scale is given; values beyond the scale take the colour of the nearer end.
        seen: False for a task that was not learned yet, whose cell is lighter.
        scale: as :func:`colour_scale` gives it.
    """
    scale = colour_scale(ACCURACY) if scale is None else scale
    red, green, blue, _ = scale.to_rgba(value)  # type: ignore[arg-type]
    share = 1.0 if seen else _LIGHTER
    rgb = (red * share + 1.0 - share, green * share + 1.0 - share, blue * share + 1.0 - share)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # WCAG 2 contrast is (lighter + 0.05) / (darker + 0.05): black is the better one above sqrt(1.05 * 0.05) - 0.05.
    return to_hex(rgb), "#000000" if luminance > 0.179 else "#ffffff"


def accuracy_heatmap(
    matrix: Tensor, title: str, task_names: Sequence[str] | None = None, measure: Measure = ACCURACY
) -> Figure:
    """One accuracy matrix as a picture: a row per task learned, a column per task measured.

    Tasks not learned yet (above the diagonal) are lighter and hatched; cells that were not evaluated are blank. Up
    to :data:`NUMBERS_UP_TO` tasks the accuracies are printed.

    Args:
        matrix: ``[T, T]`` in percent.
        title: printed above, taken literally.
        task_names: T names for the columns; None numbers them.
        measure: what the values are.

    Raises:
        ValueError: ``matrix`` is not ``[T, T]``, or there are not T names.
    """
    return accuracy_heatmaps({title: matrix}, task_names, measure)


@rc_context(PRINT)
def accuracy_heatmaps(
    matrices: Mapping[str, Tensor], task_names: Sequence[str] | None = None, measure: Measure = ACCURACY
) -> Figure:
    """Several accuracy matrices side by side on one colour scale, at most three to a line.

    Args:
        matrices: title to ``[T, T]`` in percent; T may differ where there are no ``task_names``.
        task_names: T names for the columns of each; None numbers them.
        measure: what the values are.

    Raises:
        ValueError: nothing to draw, a matrix that is not ``[T, T]``, or not T names.
    """
    if not matrices:
        raise ValueError("there is no accuracy matrix to draw")
    for title, matrix in matrices.items():
        require_square(matrix, title)
        if task_names is not None and len(task_names) != len(matrix):
            raise ValueError(f"{title}: {len(task_names)} task names for {len(matrix)} tasks")
    tasks, count = max(len(matrix) for matrix in matrices.values()), len(matrices)
    # Numbers of up to six tasks fit into a third of a page, those of up to twelve into a half.
    columns = min(2 if 6 < tasks <= NUMBERS_UP_TO else 3, count)
    side = (PAGE_WIDTH - 0.9) / columns if count > 1 else min(PAGE_WIDTH - 0.9, max(COLUMN_WIDTH - 0.9, 0.42 * tasks))
    lines = math.ceil(count / columns)
    figure = _figure(figsize=(columns * side + 0.9, lines * (side + 0.22) + 0.35), layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    scale = colour_scale(measure, matrices.values())
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        wrapped = fill(title, int(14 * side))  # about 14 letters to the inch
        _draw_heatmap(axes, matrix, wrapped, task_names, measure, scale)
    for axes in grid.flat[len(matrices) :]:
        axes.set_axis_off()
    figure.colorbar(scale, ax=grid, label=measure.label, aspect=30, pad=0.02)
    if any(bool((~torch.isnan(matrix)).triu(1).any()) for matrix in matrices.values()):
        figure.legend(
            handles=[Patch(label="task not learned yet", **(_UNSEEN_HATCH | {"facecolor": "#f2f2f2"}))],
            loc="outside lower center",
            frameon=False,
        )
    return figure


def _draw_heatmap(
    axes: Axes,
    matrix: Tensor,
    title: str,
    task_names: Sequence[str] | None,
    measure: Measure,
    scale: ScalarMappable,
) -> None:
    tasks = len(matrix)
    size = 7 if tasks <= 6 else 6
    cells: list[Rectangle] = []
    colours: list[str] = []
    unseen: list[Rectangle] = []
    for t, row in enumerate(matrix.tolist()):
        for i, accuracy in enumerate(row):
            if math.isnan(accuracy):
                continue
            background, ink = cell_colours(accuracy, i <= t, scale)
            cells.append(Rectangle((i - 0.5, t - 0.5), 1, 1))
            colours.append(background)
            if i > t:
                unseen.append(cells[-1])
            if tasks <= NUMBERS_UP_TO:
                axes.text(i, t, rounded(accuracy, 1), ha="center", va="center", color=ink, fontsize=size)
    axes.add_collection(PatchCollection(cells, facecolor=colours, edgecolor="white", linewidth=0.8))
    axes.add_collection(PatchCollection(unseen, **_UNSEEN_HATCH))
    axes.set(xlim=(-0.5, tasks - 0.5), ylim=(tasks - 0.5, -0.5), aspect="equal", ylabel="after learning task")
    axes.set_title(title, parse_math=False)
    axes.tick_params(length=0)
    axes.set_yticks(range(0, tasks, math.ceil(tasks / 20)))
    if task_names is None:
        axes.set_xlabel(measure.task_label)
        axes.set_xticks(axes.get_yticks())
    else:
        axes.set_xticks(range(tasks), list(task_names), rotation=40, ha="right", rotation_mode="anchor")
        for label in axes.get_xticklabels():
            label.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")


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
        means: name of the run to ACC after each task, NaN where unknown, of runs whose ACC is not that of the matrix
            (:meth:`cfl.federation.federation.Federation.means`).
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

    Points are drawn where the model was evaluated, and nowhere else; runs may be of different length.

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
        # A dozen markers or two tell lines apart without hiding them; the line itself has every point.
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


def attention_heatmap(rows: Iterable[Mapping[str, Any]], layer: str) -> Figure:
    """How much clients borrow of each other in one layer: FedWeIT's attention to the knowledge base (its Figure 5b).

    A panel per task, on one colour scale; see :func:`draw_attention`.

    Args:
        rows: those of a run's ``fedweit.csv`` (:func:`cfl.reporting.attention.read_attention`).
        layer: the layer's name there, such as the first fully connected one.

    Raises:
        ValueError: nobody borrows anything in that layer; the message names the layers in which somebody does.
    """
    found = read_attention(rows)
    if layer not in found:
        raise ValueError(f"no attention in layer {layer!r}: one of {sorted(found)}")
    tasks = dict(sorted(found[layer].items()))
    most = max(attention_bound(of.values) for of in tasks.values())
    widths = [1.6 + 0.55 * len(of.lenders) for of in tasks.values()]
    tallest = max(len(of.borrowers) for of in tasks.values())
    figure = _figure(figsize=(1.2 + sum(widths), 2.0 + 0.3 * tallest), layout="constrained")
    grid = figure.subplots(1, len(tasks), squeeze=False, gridspec_kw={"width_ratios": widths})
    for axes, (task, of) in zip(grid.flat, tasks.items(), strict=True):
        borrowers = [f"client {client}" for client in of.borrowers]
        lenders = [f"client {client}, task {learned}" for client, learned in of.lenders]
        draw_attention(axes, of.values, borrowers, lenders, most)
        axes.set_title(f"task {task}", fontsize=11)
    figure.suptitle(f"attention, {layer}", fontsize=11, parse_math=False)
    figure.colorbar(attention_scale(most), ax=grid, label="attention", aspect=30)
    return figure


def attention_bound(values: Sequence[Sequence[float | None]]) -> float:
    """The largest magnitude, for a colour scale that is symmetric about 0."""
    return max([abs(value) for row in values for value in row if value is not None], default=0.0) or 1e-12


def attention_scale(most: float) -> ScalarMappable:
    """Attention to colours, white at 0.

    Args:
        most: magnitude at the ends.
    """
    return ScalarMappable(Normalize(-most, most), colormaps[_ATTENTION])


def draw_attention(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    borrowers: Sequence[str],
    lenders: Sequence[str],
    most: float,
) -> None:
    """Attention as colours: a row per borrowing client, a column per client and task whose knowledge is borrowed.

    Cells are blank for a client's own knowledge. Up to :data:`NUMBERS_UP_TO` columns the values are printed.

    Args:
        axes: where to.
        values: ``[borrowers][lenders]``, of either sign and without bounds.
        borrowers: names of the rows.
        lenders: names of the columns.
        most: magnitude at the ends of the colour scale.
    """
    shown = torch.tensor([[math.nan if value is None else value for value in row] for row in values])
    axes.imshow(shown.numpy(), cmap=_ATTENTION, vmin=-most, vmax=most, aspect="auto")
    if len(lenders) <= NUMBERS_UP_TO:
        for line, column in (~shown.isnan()).nonzero().tolist():
            value = shown[line, column].item()
            ink = "#ffffff" if abs(value) > 0.7 * most else "#000000"
            axes.text(column, line, significant(value, 2), ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks(range(len(lenders)), list(lenders), rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(range(len(borrowers)), list(borrowers), fontsize=8)
    axes.set_xlabel("knowledge of", fontsize=8)
    axes.set_ylabel("borrower", fontsize=8)
    axes.tick_params(length=0)


def sample_grid(images: Tensor, title: str, row_names: Sequence[str] | None = None, inches: float = 0.6) -> Figure:
    """Images in rows, a frame of grey around each.

    Args:
        images: ``[R, N, C, H, W]`` in 0 .. 1; one channel is shown as grey, three as colours. NaN leaves a place empty.
        title: printed above, taken literally.
        row_names: one per row; None names none.
        inches: width of an image, less where there are many in a row.

    Raises:
        ValueError: another number of channels, or not R names.
    """
    rows, columns, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images to draw have 1 or 3 channels, got {channels}")
    if row_names is not None and len(row_names) != rows:
        raise ValueError(f"{len(row_names)} row names for {rows} rows")
    frame = max(1, min(height, width) // 14)
    framed = torch.full((rows, columns, 3, height + frame, width + frame), 0.6)
    framed[..., :height, :width] = images.float().nan_to_num(nan=0.6).expand(-1, -1, 3, -1, -1)
    raster = framed.permute(0, 3, 1, 4, 2).reshape(rows * (height + frame), columns * (width + frame), 3)
    raster = torch.nn.functional.pad(raster, (0, 0, frame, 0, frame, 0), value=0.6)
    side = min(inches, 9.0 / columns)
    figure = _figure(figsize=(max(3.2, columns * side + 1.0), rows * side * height / width + 0.7), layout="constrained")
    axes = figure.subplots()
    axes.imshow(raster.numpy(), interpolation="nearest")
    axes.set_xticks([])
    middles = [frame + (row + 0.5) * (height + frame) - frame / 2 - 0.5 for row in range(rows)]
    axes.set_yticks([] if row_names is None else middles, [] if row_names is None else list(row_names), fontsize=9)
    axes.tick_params(length=0)
    axes.set_title(fill(title, max(36, int(12 * (columns * side + 1)))), fontsize=10, parse_math=False)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


_LINE_WIDTH = 1.3


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
    figure = _figure(figsize=(width, height + 0.4 + 0.14 * lines), layout="constrained")
    return figure, figure.subplots()


def legend_columns(names: Iterable[str], width: float) -> int:
    """How many names of lines stand beside each other below a picture of some inches."""
    return max(1, int(width / (0.55 + 0.056 * max(map(len, names)))))


def _name_lines(figure: Figure, handles: Mapping[str, Line2D], width: float) -> None:
    # The names are set afterwards: matplotlib leaves out labels that begin with an underscore.
    numbers = [str(k) for k in range(len(handles))]
    columns = legend_columns(handles, width)
    legend = figure.legend([*handles.values()], numbers, loc="outside lower center", ncols=columns, frameon=False)
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set(text=name, parse_math=False)


def _set_view(axes: Axes, measure: Measure) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.margins(x=0.03, y=0.06)
    low, high = axes.get_ylim()
    centre, half = (low + high) / 2, max(high - low, 10.0) / 2  # a span below ten points would magnify noise
    if measure.bounds is None:
        axes.set_ylim(centre - half, centre + half)
    else:
        axes.set_ylim(max(measure.bounds[0] - 1.0, centre - half), min(measure.bounds[1] + 1.0, centre + half))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


_UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


@rc_context({"pdf.fonttype": 42, "svg.hashsalt": "cfl"})  # outline fonts, for which publishers ask
def save(figure: Figure, path: Path, dots_per_inch: int = 150) -> Path:
    """Write ``figure`` to ``path`` in the format of its suffix, without a date; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".")
    with replacing(path) as file:
        figure.savefig(file, dpi=dots_per_inch, format=kind, metadata=_UNDATED.get(kind))
    return path


def _evaluated(values: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(t, value) for t, value in enumerate(values) if not math.isnan(value)]
    return [t for t, _ in kept], [value for _, value in kept]


def require_square(matrix: Tensor, title: str) -> None:
    """Refuse what is no accuracy matrix."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"{title}: an accuracy matrix to draw is [T, T], got {list(matrix.shape)}")
