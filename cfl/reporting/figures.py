"""Pictures of accuracy matrices and learning curves, as matplotlib figures that need no display.

Colours are told apart by readers with any form of colour blindness and in grey: the scale is cividis, the lines use
the palette of Okabe and Ito together with markers and dashes. Every matrix is ``[T, T]`` in percent with ``a[t, i]``
the accuracy on task i after learning task t, NaN where not evaluated (:mod:`cfl.metrics.accuracy`); or whatever else a
:class:`cfl.metrics.measure.Measure` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from cfl.metrics.accuracy import average_accuracy
from cfl.metrics.measure import ACCURACY, Measure
from cfl.reporting.attention import read_attention
from cfl.reporting.rounding import rounded, significant
from cfl.runtime.atomic_write import replacing

NUMBERS_UP_TO = 12
"""Largest number of tasks for which a heatmap prints the accuracies into its cells."""

# Yellow, too light for a line on white, is replaced by brown.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_ATTENTION = "PuOr"
_LIGHTER = 0.4  # share of the colour that cells of tasks not yet learned keep; the rest is white
_UNSEEN_HATCH: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "#7f7f7f",
    "hatch": "////",
    "linewidth": 0.0,
    "alpha": 0.4,
}


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
    columns = min(3, len(matrices))
    lines = math.ceil(len(matrices) / columns)
    side = min(7.0, max(3.6, 0.52 * max(len(matrix) for matrix in matrices.values())))
    figure = Figure(figsize=(columns * side + 1.1, lines * (side + 0.55) + 0.4), layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    scale = colour_scale(measure, matrices.values())
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        wrapped = fill(title, int(11 * side))  # about 11 letters to the inch
        _draw_heatmap(axes, matrix, wrapped, task_names, measure, scale)
    for axes in grid.flat[len(matrices) :]:
        axes.set_axis_off()
    figure.colorbar(scale, ax=grid, label=measure.label, aspect=30, pad=0.02)
    if any(len(matrix) > 1 and bool((~torch.isnan(matrix).tril()).triu(1).any()) for matrix in matrices.values()):
        figure.legend(
            handles=[Patch(label="task not learned yet", **(_UNSEEN_HATCH | {"facecolor": "#f2f2f2"}))],
            loc="outside lower center",
            frameon=False,
            fontsize=9,
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
    size = 10 if tasks <= 6 else 8
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
    axes.set_title(title, fontsize=11, parse_math=False)
    axes.tick_params(length=0)
    axes.set_yticks(range(0, tasks, math.ceil(tasks / 20)))
    if task_names is None:
        axes.set_xlabel(measure.task_label)
        axes.set_xticks(axes.get_yticks())
    else:
        axes.set_xticks(range(tasks), list(task_names), rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
        for label in axes.get_xticklabels():
            label.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")


def accuracy_curve(
    matrices: Mapping[str, Tensor], measure: Measure = ACCURACY, means: Mapping[str, Sequence[float]] | None = None
) -> Figure:
    """ACC over the tasks seen so far after each task, one line per run, and the accuracy on task 0 as a thin line.

    Rows that were not evaluated are skipped.

    Args:
        matrices: name of the run to ``[T, T]`` in percent; T may differ.
        measure: what the values are.
        means: name of a run to ACC after each task, NaN where unknown, if it is not that of its matrix
            (:meth:`cfl.federation.federation.Federation.means`).

    Raises:
        ValueError: nothing to draw or a matrix that is not ``[T, T]``.
    """
    if not matrices:
        raise ValueError("there is no accuracy matrix to draw")
    means = means or {}
    width = 7.6 + 0.07 * max(0, max(map(len, matrices)) - 24)  # names stand beside the axes, not at their cost
    figure = Figure(figsize=(width, 4.4 + 0.16 * max(0, len(matrices) - 12)), layout="constrained")
    axes = figure.subplots()
    handles = []
    for k, (name, matrix) in enumerate(matrices.items()):
        require_square(matrix, name)
        style = _line_style(k)
        average = means.get(name) or [average_accuracy(matrix, after=t).item() for t in range(len(matrix))]
        first_task = matrix[:, 0].tolist()
        axes.plot(*_evaluated(first_task), color=style["color"], linewidth=0.9, linestyle=(0, (4, 2)), alpha=0.8)
        axes.plot(*_evaluated(average), **style, markersize=5.5, zorder=3)
        handles.append(Line2D([], [], **style))
    handles += [
        Line2D([], [], linestyle="none"),
        Line2D([], [], color="#555555", linewidth=2.0),
        Line2D([], [], color="#555555", linewidth=0.9, linestyle=(0, (4, 2))),
    ]
    _name_lines(
        figure, handles, [*matrices, "", f"{measure.mean_label}: mean over tasks seen", f"{measure.task_label} 0"]
    )
    axes.set(xlabel="after learning task", ylabel=measure.label)
    _set_view(axes, measure)
    return figure


def learning_curves(
    curves: Mapping[str, Sequence[float | None]], targets: Sequence[float] = (), measure: Measure = ACCURACY
) -> Figure:
    """ACC after each communication round, from round 0, one line per run, with targets as thin horizontal lines.

    Points are drawn where the model was evaluated, and nowhere else; runs may be of different length.

    Args:
        curves: name of the run to ACC in percent after each round, None where not evaluated.
        targets: in percent.
        measure: what the values are.

    Raises:
        ValueError: nothing to draw, or a run that was never evaluated.
    """
    if not curves:
        raise ValueError("there is no learning curve to draw")
    figure = Figure(figsize=(7.6, 4.4 + 0.16 * max(0, len(curves) - 12)), layout="constrained")
    axes = figure.subplots()
    handles = []
    for target in targets:
        axes.axhline(target, color="#555555", linewidth=0.9, linestyle=(0, (4, 2)))
    for k, (name, curve) in enumerate(curves.items()):
        points = [(r, acc) for r, acc in enumerate(curve) if acc is not None]
        if not points:
            raise ValueError(f"{name}: a learning curve to draw has at least one evaluation")
        style = _line_style(k)
        # Two dozen markers at most tell lines apart without hiding them; the line itself has every point.
        every = math.ceil(len(points) / 24)
        axes.plot(*zip(*points, strict=True), **style, markersize=5.5, markevery=every, zorder=3)
        handles.append(Line2D([], [], **style))
    if targets:
        handles += [Line2D([], [], linestyle="none"), Line2D([], [], color="#555555", linewidth=0.9, linestyle="--")]
    shown = ", ".join(f"{target:.10g}" for target in targets)
    _name_lines(figure, handles, [*curves, *(["", f"targets: {shown} %"] if targets else [])])
    unit = measure.label[measure.label.index("(") :]
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
    figure = Figure(figsize=(1.2 + sum(widths), 2.0 + 0.3 * tallest), layout="constrained")
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


def sample_grid(images: Tensor, title: str, row_names: Sequence[str] | None = None) -> Figure:
    """Images in rows, a frame of grey around each.

    Args:
        images: ``[R, N, C, H, W]`` in 0 .. 1; one channel is shown as grey, three as colours. NaN leaves a place empty.
        title: printed above, taken literally.
        row_names: one per row; None names none.

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
    side = min(0.6, 9.0 / columns)
    figure = Figure(figsize=(max(3.2, columns * side + 1.0), rows * side * height / width + 0.7), layout="constrained")
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


def _line_style(k: int) -> dict[str, Any]:
    """Of the k-th line; beyond eight, colours return with hollow markers."""
    colour = PALETTE[k % len(PALETTE)]
    face = colour if k // len(PALETTE) % 2 == 0 else "white"
    return {"color": colour, "linewidth": 2.0, "marker": MARKERS[k % len(MARKERS)], "markerfacecolor": face}


def _name_lines(figure: Figure, handles: Sequence[Line2D], names: Sequence[str]) -> None:
    # The names are set afterwards: matplotlib leaves out labels that begin with an underscore.
    legend = figure.legend(
        handles, [str(k) for k in range(len(names))], loc="outside right upper", frameon=False, fontsize=9
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
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
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` to ``path`` in the format of its suffix, 150 dots per inch; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix.removeprefix("."))
    return path


def _evaluated(values: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(t, value) for t, value in enumerate(values) if not math.isnan(value)]
    return [t for t, _ in kept], [value for _, value in kept]


def require_square(matrix: Tensor, title: str) -> None:
    """Refuse what is no accuracy matrix."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"{title}: an accuracy matrix to draw is [T, T], got {list(matrix.shape)}")
