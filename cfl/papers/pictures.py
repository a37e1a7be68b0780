"""Draw tables: our numbers beside the published ones, curves over tasks or rounds, and heatmaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from cfl.papers.cells import Cell
from cfl.papers.definition import SCALE, Over, Table
from cfl.reporting.compare.statistics import Spread
from cfl.reporting.figures import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    PRINT,
    attention_bound,
    attention_scale,
    draw_attention,
    draw_band,
    legend_columns,
    line_look,
    save,
)
from cfl.reporting.line_styles import COLOURS, line_styles
from cfl.reporting.method_names import is_known

_COLUMNS = 3
_AXIS: dict[Over, str] = {"tasks": "tasks learned", "rounds": "communication rounds"}
_MARKS = 20  # a line has at most about twice as many markers


def spreads(cell: Cell) -> list[tuple[int | str | None, Spread | None]]:
    """Return our numbers in a cell, each with its place.

    A single number has the place None. A curve has a number per task learned or round, from 1, without empty entries. A
    grid has one per entry, whose place is the names of row and column. A curve over rounds ends with the shortest run,
    because beyond its end the mean would leave out runs that have stopped.
    """
    if cell.grid:
        of_seeds = [dict(value.entries()) for value in cell.seeds.values()]
        places = [place for place, _ in cell.grid.entries()]
        return [(" / ".join(place), Spread.of([of[place] for of in of_seeds if place in of])) for place in places]
    curves = [values for values in cell.seeds.values() if isinstance(values, list)]
    if not curves:
        return [(None, cell.ours)]
    return [
        (t + 1, Spread.of([value for value in values if value is not None]))
        for t, values in enumerate(zip(*curves, strict=cell.table.over == "tasks"))
        if any(value is not None for value in values)
    ]


@rc_context(PRINT)
def table_picture(table: Table, cells: Sequence[Cell], path: Path) -> Path | None:
    """Draw a table's cells into a file and return its path; None, and no file, if no cell has a value.

    Curves have a panel per figure and place, a line per value of the table's ``lines`` axis, and the deviation as a
    band. If the table has ``dotted``, the lines of all values of that axis share a panel, and those of the named value
    are dotted. Numbers have the same panels, with the paper's number hollow and ours filled. Grids have a panel per
    cell, on one colour scale.

    Args:
        table: the table.
        cells: its cells, all at one scale.
        path: the file to write.
    """
    if not any(cell.seeds for cell in cells):
        path.unlink(missing_ok=True)  # of an earlier report
        return None
    if any(cell.grid for cell in cells):
        return _heatmaps(table, cells, path)
    across = table.lines or (table.order.axis if table.order else list(table.axes)[-1])
    panels: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        place = [table.label(axis, cell.point[axis]) for axis in table.axes if axis not in (across, *table.dotted)]
        panels.setdefault((*place, cell.figure), []).append(cell)
    panels = {name: group for name, group in panels.items() if any(cell.seeds for cell in group)}
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    most = max(map(len, panels.values()))
    height = 1.7 if table.lines else max(1.2, 0.17 * most + 0.6)
    width = COLUMN_WIDTH if columns == 1 else PAGE_WIDTH
    figure = Figure(figsize=(width, height * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (name, group) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(", ".join(name[:-1]), parse_math=False)
        (axes.set_ylabel if table.lines else axes.set_xlabel)(name[-1], parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
        if table.lines:
            _curves(axes, table, group)
        else:
            _numbers(axes, table, group, across)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    handles = _line_handles(table, across) if table.lines else _number_handles(cells[0].point[SCALE])
    beside = legend_columns([str(handle.get_label()) for handle in handles], width)
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=beside, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return save(figure, path)


def _heatmaps(table: Table, cells: Sequence[Cell], path: Path) -> Path:
    drawn = [(cell, cell.grid) for cell in cells if cell.grid]
    columns = min(_COLUMNS, len({cell.figure for cell, _ in drawn}))
    rows = math.ceil(len(drawn) / columns)
    width = max(1.6 + 0.5 * len(grid.columns) for _, grid in drawn)
    height = max(1.8 + 0.3 * len(grid.rows) for _, grid in drawn)
    figure = Figure(figsize=(width * columns + 1.0, height * rows), layout="constrained")
    axes_grid = figure.subplots(rows, columns, squeeze=False)
    most = max(attention_bound(grid.values) for _, grid in drawn)
    for axes, (cell, grid) in zip(axes_grid.flat, drawn, strict=False):
        draw_attention(axes, grid.values, grid.rows, grid.columns, most)
        place = [table.label(axis, cell.point[axis]) for axis in table.axes]
        axes.set_title(", ".join([*place, cell.figure]), fontsize=9, parse_math=False)
    for axes in axes_grid.flat[len(drawn) :]:
        axes.set_axis_off()
    figure.colorbar(attention_scale(most), ax=axes_grid, aspect=30)
    return save(figure, path)


def _looks(table: Table, axis: str) -> dict[str, dict[str, Any]]:
    """Return how each value of an axis is drawn: methods as everywhere, but without dashes if the table has dots."""
    styles = line_styles({value: value if is_known(value) else "" for value in table.axes[axis]})
    looks = {value: line_look(style) for value, style in styles.items()}
    return {value: look | ({"linestyle": "-"} if table.dotted else {}) for value, look in looks.items()}


def _line_handles(table: Table, across: str) -> list[Line2D]:
    looks = _looks(table, across)
    handles = [Line2D([], [], label=table.label(across, value), **look) for value, look in looks.items()]
    for axis, value in table.dotted.items():
        for other in table.axes[axis]:
            look: Literal[":", "-"] = ":" if other == value else "-"
            handles.append(Line2D([], [], label=table.label(axis, other), color="#555555", linestyle=look))
    return handles


def _number_handles(scale: str) -> list[Line2D]:
    look: dict[str, Any] = {"linestyle": "none", "marker": "o"}
    return [
        Line2D([], [], label="paper", color=COLOURS[1], markerfacecolor="white", **look),
        Line2D([], [], label=f"ours, scale {scale}", color=COLOURS[0], **look),
    ]


def _curves(axes: Axes, table: Table, group: Sequence[Cell]) -> None:
    assert table.lines is not None
    looks = _looks(table, table.lines)
    for cell in group:
        points = [(x, spread) for x, spread in spreads(cell) if isinstance(x, int) and spread is not None]
        if not points:
            continue
        look = looks[cell.point[table.lines]]
        xs, means = [x for x, _ in points], [spread.mean for _, spread in points]
        if any(cell.point[axis] == value for axis, value in table.dotted.items()):
            look = look | {"linestyle": ":"}
        # A marker per round would hide the line.
        every = max(1, len(xs) // _MARKS)
        axes.plot(xs, means, markevery=every, **look)
        draw_band(axes, xs, means, [spread.std for _, spread in points], look["color"])
    axes.set_xlabel(_AXIS[table.over])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _numbers(axes: Axes, table: Table, group: Sequence[Cell], across: str) -> None:
    for y, cell in enumerate(group):
        published = cell.published.spread if cell.published else None
        common: dict[str, Any] = {"fmt": "o", "markersize": 3.5, "capsize": 1.5, "linewidth": 1}
        looks: list[tuple[Spread | None, float, dict[str, Any]]] = [
            (published, -0.12, common | {"color": COLOURS[1], "markerfacecolor": "white"}),
            (cell.ours, 0.12, common | {"color": COLOURS[0]}),
        ]
        for spread, shift, look in looks:
            if spread is not None:
                axes.errorbar(spread.mean, y + shift, xerr=spread.std, **look)
    axes.set_yticks(range(len(group)), [table.label(across, cell.point[across]) for cell in group])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(group) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
