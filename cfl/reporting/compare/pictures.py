"""Draw a comparison's curves and heatmaps into picture files, for use in texts; the page draws its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from cfl.metrics.measure import MEASURES, Measure
from cfl.reporting.compare.rows import Comparison, styles_of
from cfl.reporting.compare.tables import targets
from cfl.reporting.figures import (
    COLUMN_WIDTH,
    PAGE_WIDTH,
    accuracy_curve,
    accuracy_heatmaps,
    learning_curves,
    save,
)
from cfl.reporting.line_styles import LineStyle

ROWS_AT_MOST = 32
"""Largest number of rows in a picture; more would be unreadable."""
_ROWS_OF_A_COLUMN = 8  # pictures of more rows are as wide as a page
_DOTS_PER_INCH = 300


def write_pictures(folder: Path, comparisons: Sequence[Comparison], formats: Sequence[str] = ("png",)) -> list[str]:
    """Draw the means over seeds of every table's rows; curves have a band of one standard deviation.

    Args:
        folder: gets ``accuracy_curve.png`` and ``accuracy_heatmaps.png``, and ``accuracy_rounds.png`` if runs were
            evaluated between task ends. Files of another measure begin with its name, such as ``nll_curve.png``. From
            the second table on, the table's number follows, as in ``accuracy_curve_2.png``.
        comparisons: the tables; for each measure the first :data:`ROWS_AT_MOST` rows of a table are drawn.
        formats: endings of the files, such as ``pdf``.

    Returns:
        The file names.
    """
    styles = styles_of(comparisons)
    names = []
    for k, comparison in enumerate(comparisons):
        end = "" if k == 0 else f"_{k + 1}"
        for measure in MEASURES:
            for kind, picture in _drawn(comparison, measure, styles).items():
                paths = [folder / f"{measure.name}_{kind}{end}.{ending}" for ending in formats]
                names += [save(picture, path, _DOTS_PER_INCH).name for path in paths]
    return names


def _drawn(comparison: Comparison, measure: Measure, styles: Mapping[str, LineStyle]) -> dict[str, Figure]:
    """Return the pictures of one table by kind, for the runs with a given measure."""
    rows = [own for row in comparison.rows if (own := row.of_measure(measure.name))][:ROWS_AT_MOST]
    width = COLUMN_WIDTH if len(rows) <= _ROWS_OF_A_COLUMN else PAGE_WIDTH
    pictures: dict[str, Figure] = {}
    means = {row.label: np.mean(found, axis=0) for row in rows if (found := row.matrices(measure.name))}
    if means:
        matrices = {label: torch.from_numpy(mean) for label, mean in means.items()}
        seen = {row.label: np.stack(row.means_over_tasks_seen(measure.name)) for row in rows if row.label in means}
        known = {label: values.mean(axis=0).tolist() for label, values in seen.items()}
        spread = {label: values.std(axis=0, ddof=1).tolist() for label, values in seen.items() if len(values) > 1}
        pictures["curve"] = accuracy_curve(matrices, measure, known, deviations=spread, styles=styles, width=width)
        pictures["heatmaps"] = accuracy_heatmaps(matrices, measure=measure)
    curves = {row.label: row.curves(measure.name) for row in rows if row.with_curves(measure.name)}
    curves = {label: of for label, of in curves.items() if np.isfinite(of.mean(axis=0)).any()}
    if curves:
        aims = [float(name) for name in targets(comparison)] if measure.is_accuracy else []
        shown = {label: _or_none(of.mean(axis=0)) for label, of in curves.items()}
        spread = {label: of.std(axis=0, ddof=1).tolist() for label, of in curves.items() if len(of) > 1}
        pictures["rounds"] = learning_curves(shown, aims, measure, deviations=spread, styles=styles, width=width)
    return pictures


def _or_none(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
