"""Accuracy matrices as pictures: a row per task learned, a column per task measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from cfl.data.report import runs_of_neighbours
from cfl.metrics.measure import ACCURACY, Measure
from cfl.reporting.figures.base import COLUMN_WIDTH, NUMBERS_UP_TO, PAGE_WIDTH, PRINT, new_figure, require_square
from cfl.reporting.rounding import rounded

_LIGHTER = 0.4  # share of the colour that cells of tasks not yet learned keep; the rest is white
_BORDERS_UP_TO = 20  # tasks; between smaller cells, borders would take as much room as the colours
_UNSEEN_HATCH: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "#7f7f7f",
    "hatch": "////",
    "linewidth": 0.0,
    "alpha": 0.4,
}


def colour_scale(measure: Measure, matrices: Iterable[Tensor] = ()) -> ScalarMappable:
    """Return a colour scale on which better values are brighter.

    Args:
        measure: its bounds are the ends of the scale. Without bounds, the ends are the extreme values of ``matrices``.
        matrices: all values to be shown; NaN is ignored.
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
    rgb = _shades(scale, np.array([value]), np.array([seen]))[0].tolist()
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # WCAG 2 contrast is (lighter + 0.05) / (darker + 0.05): black is the better one above sqrt(1.05 * 0.05) - 0.05.
    return to_hex(rgb), "#000000" if luminance > 0.179 else "#ffffff"


def _shades(scale: ScalarMappable, values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Background colours ``[..., 3]`` of cells with ``values [...]``, lighter where not ``seen [...]``."""
    share = np.where(seen, 1.0, _LIGHTER)[..., None]
    return scale.to_rgba(values)[..., :3] * share + 1.0 - share


def cell_decimals(measure: Measure, matrices: Iterable[Tensor]) -> int:
    """Return the decimals of the values in cells: one in percent, otherwise three digits of the largest value.

    Args:
        measure: what the values are.
        matrices: all values to be shown; NaN and infinity are ignored.
    """
    if measure.bounds is not None:
        return 1
    values = torch.cat([matrix.flatten() for matrix in matrices]).abs()
    largest = max(values[torch.isfinite(values)].tolist(), default=0.0)
    return min(4, max(1, 2 - math.floor(math.log10(largest)))) if largest else 1


def accuracy_heatmap(matrix: Tensor, title: str, measure: Measure = ACCURACY) -> Figure:
    """One accuracy matrix as a picture: a row per task learned, a column per task measured.

    Tasks not learned yet (above the diagonal) are lighter and hatched; cells that were not evaluated are blank. Up
    to :data:`NUMBERS_UP_TO` tasks the values are printed.

    Args:
        matrix: ``[T, T]`` in percent.
        title: printed above, taken literally.
        measure: what the values are.

    Raises:
        ValueError: ``matrix`` is not ``[T, T]``.
    """
    return accuracy_heatmaps({title: matrix}, measure)


@rc_context(PRINT)
def accuracy_heatmaps(matrices: Mapping[str, Tensor], measure: Measure = ACCURACY) -> Figure:
    """Several accuracy matrices side by side on one colour scale, at most three to a line.

    Args:
        matrices: title to ``[T, T]`` in percent; T may differ.
        measure: what the values are.

    Raises:
        ValueError: nothing to draw, or a matrix that is not ``[T, T]``.
    """
    if not matrices:
        raise ValueError("there is no accuracy matrix to draw")
    for title, matrix in matrices.items():
        require_square(matrix, title)
    tasks, count = max(len(matrix) for matrix in matrices.values()), len(matrices)
    # Numbers of up to six tasks fit into a third of a page, those of up to twelve into a half.
    columns = min(2 if 6 < tasks <= NUMBERS_UP_TO else 3, count)
    side = (PAGE_WIDTH - 0.9) / columns if count > 1 else min(PAGE_WIDTH - 0.9, max(COLUMN_WIDTH - 0.9, 0.42 * tasks))
    lines = math.ceil(count / columns)
    figure = new_figure(figsize=(columns * side + 0.9, lines * (side + 0.22) + 0.35), layout="compressed")
    grid = figure.subplots(lines, columns, squeeze=False)
    scale = colour_scale(measure, matrices.values())
    decimals = cell_decimals(measure, matrices.values())
    for axes, (title, matrix) in zip(grid.flat, matrices.items(), strict=False):
        wrapped = fill(title, int(14 * side))  # about 14 letters to the inch
        _draw_heatmap(axes, matrix, wrapped, measure, scale, decimals)
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
    axes: Axes, matrix: Tensor, title: str, measure: Measure, scale: ScalarMappable, decimals: int
) -> None:
    tasks = len(matrix)
    size = 7 if tasks <= 6 else 6
    evaluated, seen = ~np.isnan(matrix.numpy()), np.tri(tasks, dtype=bool)
    shades = np.dstack([_shades(scale, np.nan_to_num(matrix.numpy()), seen), evaluated])
    borders = tasks <= _BORDERS_UP_TO
    line: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.8, "antialiased": True} if borders else {}
    axes.pcolormesh(np.arange(tasks + 1) - 0.5, np.arange(tasks + 1) - 0.5, shades, **line)
    unseen: list[Rectangle] = []
    for t, row in enumerate(evaluated & ~seen):
        for first, last in runs_of_neighbours(np.flatnonzero(row)):
            unseen.append(Rectangle((first - 0.5, t - 0.5), last - first + 1, 1))
    if tasks <= NUMBERS_UP_TO:
        for t, i in zip(*np.nonzero(evaluated), strict=True):
            value = matrix[t, i].item()
            _, ink = cell_colours(value, i <= t, scale)
            axes.text(i, t, rounded(value, decimals), ha="center", va="center", color=ink, fontsize=size)
    axes.add_collection(PatchCollection(unseen, **_UNSEEN_HATCH))
    axes.set(xlim=(-0.5, tasks - 0.5), ylim=(tasks - 0.5, -0.5), aspect="equal", ylabel="after learning task")
    axes.set_title(title, parse_math=False)
    axes.tick_params(length=0)
    axes.set_yticks(range(0, tasks, math.ceil(tasks / 20)))
    axes.set_xlabel(measure.task_label)
    axes.set_xticks(axes.get_yticks())
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")
