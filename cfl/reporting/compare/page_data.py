"""The content of a comparison's page as plain JSON, thinned if there is too much."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cfl.data.report import evenly
from cfl.metrics.measure import ACCURACY, MEASURES
from cfl.reporting.compare.partition_file import read_partition
from cfl.reporting.compare.reading import LeftOut, Reading
from cfl.reporting.compare.rows import Compared, Comparison, Row, figure_of, own_measures, styles_of
from cfl.reporting.compare.settings import differing, shown
from cfl.reporting.compare.statistics import LEVEL, Spread
from cfl.reporting.compare.tables import figures_of, numbers_of
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.measures import CURVES, RunMatrix, figures_with, matrices_with
from cfl.runtime.run_files import PARTITION

# Numbers in a page by kind, over all rows together; a comparison with more is thinned evenly.
_MATRIX_CELLS = 250_000
_CURVE_POINTS = 60_000
_PARTITION_CELLS = 150_000
_CLIENTS = 50_000
_PICTURE_BYTES = 1_500_000


def page_data(
    comparisons: Compared,
    left_out: Sequence[LeftOut] = (),
    warnings: Sequence[str] = (),
    share: float = 1.0,
) -> dict[str, Any]:
    """Everything a page shows.

    Args:
        comparisons: the tables, each with the row against which its differences are taken.
        left_out: folders that are not compared.
        warnings: lines about parts of runs that could not be read.
        share: fraction of the usual limits on numbers that this page may use.

    Returns:
        Dictionaries, lists, texts and finite numbers; None is an undefined value.
    """
    rows = [row for comparison, _ in comparisons for row in comparison.rows]
    labels = list(dict.fromkeys(row.label for row in rows))
    styles = styles_of(comparison for comparison, _ in comparisons)
    own = own_measures(comparison for comparison, _ in comparisons)
    # Also those of which no row has a mean matrix, as its runs have different numbers of tasks.
    measured = {key for row in rows for reading in row.readings for key in reading.matrices}
    measures = [measure for measure in matrices_with(own) if measure.key in measured]
    place = {label: k for k, label in enumerate(labels)}
    room = _Room.of(len(rows), len(measures), len(comparisons), share)
    return {
        "labels": labels,
        "styles": [[styles[label].colour, styles[label].dash, styles[label].marker] for label in labels],
        "level": LEVEL,
        "measures": [
            {"key": m.key, "name": m.name, "unit": m.unit, "better": m.better, "percent": m.unit == "%"}
            for m in measures
        ],
        "curves": [{"key": of.figure, "measure": of.name, "unit": of.unit} for of in MEASURES],
        "figures": [
            {"key": f.key, "heading": f.heading, "meaning": f.meaning, "better": f.better}
            | {"decimals": f.decimals, "signed": f.signed, "divisor": f.divisor}
            for f in figures_with(own)
            if any(row.figure(f) for row in rows)
        ],
        "tables": [_table(comparison, baseline, place, measures, room) for comparison, baseline in comparisons],
        "left_out": [
            {"folder": str(one.folder), "reason": one.reason, "unfinished": one.unfinished} for one in left_out
        ],
        "warnings": list(warnings),
    }


class _Room(NamedTuple):
    """How much of each kind a page may hold.

    Attributes:
        side: tasks of a matrix, as rows and as columns.
        points: points of a curve.
        clients: clients of a row.
        cells: cells of a table's partition.
        picture_bytes: bytes of a table's pictures of samples, in base64.
    """

    side: int
    points: int
    clients: int
    cells: int
    picture_bytes: int

    @classmethod
    def of(cls, rows: int, measures: int, tables: int, share: float) -> _Room:
        """Divide a share of the limits among a page's rows, measures and tables."""
        rows, measures, tables = max(1, rows), max(1, measures), max(1, tables)
        return cls(
            side=int(min(100, max(5, math.sqrt(share * _MATRIX_CELLS / (rows * measures))))),
            points=int(min(400, max(10, share * _CURVE_POINTS / (4 * rows)))),
            clients=int(max(10, share * _CLIENTS / rows)),
            cells=int(share * _PARTITION_CELLS / tables),
            picture_bytes=int(share * _PICTURE_BYTES / tables),
        )


def _table(
    comparison: Comparison,
    baseline: Row | None,
    place: Mapping[str, int],
    measures: Sequence[RunMatrix],
    room: _Room,
) -> dict[str, Any]:
    """Return one table; ``place`` is label -> its index in the page's labels."""
    rows = [
        {
            "label": place[row.label],
            "seeds": row.seeds,
            **figures,
            "measures": {m.key: found for m in measures if (found := _measured(row, m, room.side, room.points))},
            "rounds": _rounds(row, room.points),
            "space": _space(row, room.points),
            "clients": _thinned(sorted(x for r in row.readings for x in r.clients), room.clients),
        }
        for row, figures in zip(comparison.rows, _figures(comparison, baseline), strict=True)
    ]
    return {
        "title": comparison.title,
        "notes": list(comparison.notes),
        "baseline": None if baseline is None else place[baseline.label],
        "rows": rows,
        "settings": _settings(comparison),
        "partition": _partition(comparison, room.cells),
        "samples": _samples(comparison, room.picture_bytes),
        "runs": _runs(comparison),
    }


def _exact(value: float | None) -> float | None:
    """Round to the digits that :func:`cfl.reporting.rounding.rounded` uses; with fewer the page would round twice."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.12g}")


def _all(values: Iterable[float | None]) -> list[float | None]:
    return [_exact(value) for value in values]


def _thinned(values: Sequence[float], most: int) -> list[float | None]:
    return _all(values[k] for k in evenly(len(values), most))


def _figures(comparison: Comparison, baseline: Row | None) -> list[dict[str, dict[str, list[float | int | None]]]]:
    """Return ``figures`` and ``differences`` of each row.

    ``figures`` is key -> mean, standard deviation, number of seeds, mean rank. ``differences`` is key -> mean
    difference to the baseline, lower and upper end of its interval, number of seeds.
    """
    found: list[dict[str, dict[str, list[float | int | None]]]]
    found = [{"figures": {}, "differences": {}} for _ in comparison.rows]
    for row, figure, spread, rank, difference in numbers_of(comparison, baseline):
        found[row]["figures"][figure.key] = [*_all([spread.mean, spread.std]), spread.count, rank]
        if difference is not None:
            ends = _all([difference.mean, difference.low, difference.high])
            found[row]["differences"][figure.key] = [*ends, difference.count]
    return found


def _runs(comparison: Comparison) -> list[dict[str, Any]]:
    keys = [figure.key for figure in figures_of(comparison)]
    return [
        {
            "row": k,
            "seed": reading.run.seed,
            "rounds": reading.run.rounds,
            "hash": reading.run.config_hash,
            "folder": str(reading.run.folder),
            "figures": {key: _exact(figure_of(reading, key)) for key in keys},
        }
        for k, row in enumerate(comparison.rows)
        for reading in row.readings
    ]


def _mean_and_std(values: np.ndarray) -> tuple[list[float | None], list[float | None] | None]:
    """Return mean and standard deviation over the first axis; no deviation for a single value."""
    return _all(values.mean(0)), _all(values.std(0, ddof=1)) if len(values) > 1 else None


def _measured(row: Row, measure: RunMatrix, side: int, points: int) -> dict[str, Any] | None:
    matrices = row.matrices(measure.key)
    if not matrices:
        return None
    stacked = np.stack(matrices)  # [seeds, T, T]
    tasks = stacked.shape[-1]
    at, places = evenly(tasks, points), evenly(tasks, side)
    seen, seen_std = _mean_and_std(np.stack(row.means_over_tasks_seen(measure.key))[:, at])
    first, first_std = _mean_and_std(stacked[:, at, 0])
    mean = stacked.mean(0)
    return {
        "tasks": tasks,
        "after": at,
        "seen": seen,
        "seen_std": seen_std,
        "first": first,
        "first_std": first_std,
        "places": places,
        "matrix": [_all(mean[t, places]) for t in places],
    }


def _rounds(row: Row, points: int) -> dict[str, Any] | None:
    """Return the mean learning curve at the rounds in which all seeds with a curve were evaluated, None without any.

    The values are under the key of the measure's figure, such as ``acc``. If the runs of a row have several measures,
    only the first one with a curve is used.
    """
    measure = next((measure for measure in CURVES if row.with_curves(measure)), ACCURACY.name)
    curves = row.curves(measure)
    at = [r for r in range(curves.shape[1]) if np.isfinite(curves[:, r]).all()] if len(curves) else []
    if not at:
        return None
    at = [at[k] for k in evenly(len(at), points)]
    mean, std = _mean_and_std(curves[:, at])
    shown: dict[str, Any] = {"round": at, CURVES[measure]: mean, "std": std}
    runs = row.with_curves(measure)
    for name in ("uplink_bytes", "seconds"):
        columns = {id(run): run.progress.get(name, ()) for run in runs}
        if all(len(column) > at[-1] and all(column[r] is not None for r in at) for column in columns.values()):
            shown[name] = _all(_mean_over_seeds(row, partial(_in_round, columns, r)) for r in at)
    return shown


def _in_round(columns: Mapping[int, Sequence[float | None]], round: int, reading: Reading) -> float | None:
    """Return the value of a run's column after a round, None for a run without a column."""
    column = columns.get(id(reading.run))
    return None if column is None else column[round]


def _mean_over_seeds(row: Row, value: Callable[[Reading], float | None]) -> float | None:
    """Return the mean over seeds of a value, each seed with the mean of its runs; None if no run has the value."""
    spread = Spread.of([*row.by_seed(value).values()])
    return None if spread is None else spread.mean


def _space(row: Row, points: int) -> dict[str, dict[str, Any]]:
    """Return layer -> tasks, and the mean percent of used space after each over seeds."""
    found: dict[str, set[int]] = {}
    for reading in row.readings:
        for layer, used in reading.space.items():
            found.setdefault(layer, set()).update(used)
    thinned = {}
    for layer, after in found.items():
        tasks = sorted(after)
        tasks = [tasks[k] for k in evenly(len(tasks), points)]
        means = [_mean_over_seeds(row, partial(_used_space, layer, task)) for task in tasks]
        thinned[layer] = {"task": tasks, "used": _all(means)}
    return thinned


def _used_space(layer: str, task: int, reading: Reading) -> float | None:
    return reading.space.get(layer, {}).get(task)


def _settings(comparison: Comparison) -> dict[str, Any]:
    """The settings in which rows differ, and those that only some rows have."""
    several = [reading.settings for row in comparison.rows for reading in row.readings]
    differ = differing(several)
    keys = sorted({key for settings in several for key in settings})
    kept = [key for key in keys if key in differ or not all(key in settings for settings in several if settings)]
    values = []
    for row in comparison.rows:
        texts = {key: dict.fromkeys(shown(r.settings[key]) for r in row.readings if key in r.settings) for key in kept}
        values.append([" | ".join(text)[:200] for text in texts.values()])
    return {"keys": kept, "differ": [key in differ for key in kept], "values": values}


def _partition(comparison: Comparison, cells: int) -> dict[str, Any] | None:
    """Return the partition of the first run with a readable table, None if there is none."""
    for row in comparison.rows:
        for reading in row.readings:
            if not reading.partition:
                continue
            try:
                found = read_partition(reading.run.folder / PARTITION)
            except RunFolderError:
                continue
            tasks, classes, clients = found.counts.shape
            clients = min(clients, max(10, cells // max(1, tasks * classes)))
            return {
                "seed": reading.run.seed,
                "row": row.label,
                "tasks": list(found.tasks),
                "total_clients": found.total_clients,
                "total_tasks": found.total_tasks,
                "counts": found.counts[:, :, :clients].tolist(),
            }
    return None


def _samples(comparison: Comparison, room: int) -> dict[str, Any]:
    """Return pictures of samples, from the first run of each row that has one, as long as there is room.

    Args:
        comparison: the table.
        room: bytes for all pictures together, in base64.
    """
    shown, left_out = [], 0
    for k, row in enumerate(comparison.rows):
        reading = next((reading for reading in row.readings if reading.samples), None)
        if reading is None:
            continue
        png = base64.b64encode(reading.samples).decode()
        if len(png) > room:
            left_out += 1
            continue
        room -= len(png)
        shown.append({"row": k, "seed": reading.run.seed, "png": png})
    return {"shown": shown, "left_out": left_out}
