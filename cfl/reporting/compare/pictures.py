"""A comparison's curves and heatmaps as PNG, for texts; the page draws its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from cfl.metrics.measure import ACCURACY, NLL, Measure
from cfl.reporting.compare.groups import Comparison
from cfl.reporting.compare.tables import targets
from cfl.reporting.figures import accuracy_curve, accuracy_heatmaps, learning_curves, save

ROWS_AT_MOST = 24
"""More rows than these make no picture that anybody can read."""


def write_pictures(folder: Path, comparisons: Sequence[Comparison]) -> list[str]:
    """Draw every table's rows, means over seeds.

    Args:
        folder: where ``accuracy_curve.png`` and ``accuracy_heatmaps.png`` go and, of runs that were evaluated between
            task ends, ``accuracy_rounds.png``; of runs that estimate a density ``nll_curve.png`` and so on; beyond the
            first table with its number, ``accuracy_curve_2.png``.
        comparisons: the tables; of each the first :data:`ROWS_AT_MOST` rows of a measure.

    Returns:
        The file names.
    """
    names = []
    for k, comparison in enumerate(comparisons):
        end = "" if k == 0 else f"_{k + 1}"
        for measure in (ACCURACY, NLL):
            names += _draw(folder, comparison, measure, end)
    return names


def _draw(folder: Path, comparison: Comparison, measure: Measure, end: str) -> list[str]:
    """The pictures of one table and of the runs whose own measure it is; their names."""
    rows = [own for row in comparison.rows if (own := row.of_measure(measure.name))][:ROWS_AT_MOST]
    pictures: dict[str, Figure] = {}
    means = {row.label: np.mean(found, axis=0) for row in rows if (found := row.matrices(measure.name))}
    if means:
        matrices = {label: torch.from_numpy(mean) for label, mean in means.items()}
        known = {row.label: np.mean(row.seen(measure.name), axis=0).tolist() for row in rows if row.label in means}
        pictures["curve"] = accuracy_curve(matrices, measure, known)
        pictures["heatmaps"] = accuracy_heatmaps(matrices, measure=measure)
    curves = {row.label: row.curves(measure.name).mean(axis=0) for row in rows if row.with_curves(measure.name)}
    curves = {label: curve for label, curve in curves.items() if np.isfinite(curve).any()}
    if curves:
        aims = [float(name) for name in targets(comparison)] if measure is ACCURACY else []
        shown = {label: [None if math.isnan(v) else v for v in curve.tolist()] for label, curve in curves.items()}
        pictures["rounds"] = learning_curves(shown, aims, measure)
    return [save(picture, folder / f"{measure.name}_{kind}{end}.png").name for kind, picture in pictures.items()]
