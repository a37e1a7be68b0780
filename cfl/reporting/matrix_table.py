"""An accuracy matrix in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from torch import Tensor

from cfl.data.report import evenly
from cfl.metrics.measure import ACCURACY, Measure
from cfl.metrics.transfer import average_accuracy
from cfl.reporting.rounding import rounded

MOST_TASKS = 20
"""Most tasks in the table: as many as fit into the width of printed tables."""


def matrix_table(matrix: Tensor, measure: Measure = ACCURACY, means: Sequence[float] | None = None) -> Table:
    """Return an accuracy matrix for the terminal, with cells coloured by accuracy and ACC in the last column.

    Of more than :data:`MOST_TASKS` tasks, evenly spaced ones are shown, as rows and as columns; the title says so.
    Cells of tasks not learned yet are lighter; cells that were not evaluated are empty. Accuracies have one decimal,
    with more than ten tasks none; other measures have so many that the largest value has three digits, or two.

    Args:
        matrix: ``[T, T]`` in percent.
        measure: what the values are.
        means: ACC after each task, NaN where unknown; None computes it from the matrix
            (:func:`cfl.federation.matrix_rows.means`).

    Raises:
        ValueError: ``matrix`` is not ``[T, T]``.
    """
    from cfl.reporting.figures import cell_colours, cell_decimals, colour_scale, require_square  # slow to import

    require_square(matrix, f"{measure.label} on each task")
    tasks = len(matrix)
    exact = cell_decimals(measure, [matrix])
    decimals = exact if tasks <= 10 else exact - 1
    scale = colour_scale(measure, [matrix])
    shown = evenly(tasks, MOST_TASKS)
    title = (
        f"{measure.label} on each task" if len(shown) == tasks else f"{measure.label} on {len(shown)} of {tasks} tasks"
    )
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("after task", justify="right", no_wrap=True)
    for i in shown:
        table.add_column(str(i), justify="right", no_wrap=True)
    table.add_column(measure.mean_label, justify="right", no_wrap=True, style="bold")
    for t in shown:
        cells = []
        for i, accuracy in zip(shown, matrix[t, shown].tolist(), strict=True):
            background, ink = cell_colours(accuracy, i <= t, scale) if not math.isnan(accuracy) else ("", "")
            cells.append(Text(rounded(accuracy, decimals), f"{ink} on {background}") if background else Text(""))
        average = average_accuracy(matrix, after=t).item() if means is None else means[t]
        table.add_row(str(t), *cells, "" if math.isnan(average) else rounded(average, exact + 1))
    return table
