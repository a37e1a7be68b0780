"""A comparison's curves and heatmaps as PNG, for texts; the page draws its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cfl.compare.groups import Comparison, Row
from cfl.compare.tables import targets
from cfl.figures import accuracy_curve, accuracy_heatmaps, learning_curves, save

ROWS_AT_MOST = 24
"""More rows than these make no picture that anybody can read."""
_OURS = re.compile(r"accuracy_(curve|heatmaps|rounds)(_[1-9]\d*)?\.png")


def write_pictures(folder: Path, comparisons: Sequence[Comparison]) -> list[str]:
    """Draw every table's rows, means over seeds.

    Args:
        folder: where ``accuracy_curve.png`` and ``accuracy_heatmaps.png`` go and, of runs that were evaluated between
            task ends, ``accuracy_rounds.png``; beyond the first table with its number, ``accuracy_curve_2.png``. Those
            of an earlier comparison are removed, and no others.
        comparisons: the tables; of each the first :data:`ROWS_AT_MOST` rows.

    Returns:
        The file names.
    """
    for old in [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]:
        old.unlink()
    names = []
    for k, comparison in enumerate(comparisons):
        end = "" if k == 0 else f"_{k + 1}"
        rows = comparison.rows[:ROWS_AT_MOST]
        means = {row.label: np.mean(found, axis=0) for row in rows if (found := row.matrices("accuracy"))}
        if means:
            matrices = {label: torch.from_numpy(mean) for label, mean in means.items()}
            save(accuracy_curve(matrices), folder / f"accuracy_curve{end}.png")
            save(accuracy_heatmaps(matrices), folder / f"accuracy_heatmaps{end}.png")
            names += [f"accuracy_curve{end}.png", f"accuracy_heatmaps{end}.png"]
        curves = {row.label: mean_curve(row) for row in rows}
        curves = {label: curve for label, curve in curves.items() if any(acc is not None for acc in curve)}
        if curves:
            aims = [float(name) for name in targets(comparison)]
            save(learning_curves(curves, aims), folder / f"accuracy_rounds{end}.png")
            names.append(f"accuracy_rounds{end}.png")
    return names


def mean_curve(row: Row) -> list[float | None]:
    """ACC after each round, mean over the runs that have a curve, up to the end of the shortest; None in gaps."""
    curves = [reading.run.curve for reading in row.readings if reading.run.curve]
    found: list[float | None] = []
    for values in zip(*curves, strict=False):
        known = [value for value in values if value is not None]
        found.append(sum(known) / len(known) if len(known) == len(values) else None)
    return found
