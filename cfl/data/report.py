"""The partition report: who holds what, as a table and as a picture."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cfl.data.types import Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_SMALLEST_DOT = 0.08  # inches, diameter of the largest dot below which cells are coloured instead
_PAGE = (15.0, 10.0)  # inches to fill with panels, as far as legibility allows


def class_counts(task: Task, indices: Mapping[int, np.ndarray]) -> np.ndarray:
    """Samples per client and class, ``[clients, task.num_classes]`` int64, rows in the order of ``indices``."""
    sizes = [len(index) for index in indices.values()]
    rows = np.repeat(np.arange(len(sizes)), sizes)
    samples = np.concatenate([np.empty(0, dtype=np.int64), *indices.values()])
    cells = rows * task.num_classes + task.train.labels.numpy()[samples]
    return np.bincount(cells, minlength=len(sizes) * task.num_classes).reshape(len(sizes), task.num_classes)


def partition_rows(tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]]) -> list[dict[str, Any]]:
    """One row per task and client that takes part in it.

    Args:
        tasks: the stream's tasks.
        indices: per task, client id to indices into ``task.train``.

    Returns:
        rows with ``task``, ``client``, ``samples``, ``classes`` (distinct classes held), ``class_00``, ``class_01``,
        ... (samples of each class, labels local to the task; 0 beyond the task's classes) and ``hash`` (16 hexadecimal
        digits of BLAKE2b over the ascending indices as little-endian int64: equal hashes mean equal samples).
    """
    width = max((task.num_classes for task in tasks), default=0)
    digits = max(2, len(str(width - 1)))
    columns = [f"class_{k:0{digits}d}" for k in range(width)]
    rows: list[dict[str, Any]] = []
    for t, (task, of_client) in enumerate(zip(tasks, indices, strict=True)):
        counts = np.zeros((len(of_client), width), dtype=np.int64)
        counts[:, : task.num_classes] = class_counts(task, of_client)
        for (client, index), per_class in zip(of_client.items(), counts.tolist(), strict=True):
            classes = sum(count > 0 for count in per_class)
            row = {"task": t, "client": client, "samples": len(index), "classes": classes}
            rows.append({**row, **dict(zip(columns, per_class, strict=True)), "hash": _fingerprint(index)})
    return rows


def write_partition_csv(path: Path, tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]]) -> None:
    """Write :func:`partition_rows` as CSV with a header line, creating ``path``'s folder."""
    rows = partition_rows(tasks, indices)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def partition_figure(
    tasks: Sequence[Task],
    indices: Sequence[Mapping[int, np.ndarray]],
    title: str = "",
    max_panels: int = 12,
    max_clients: int = 150,
) -> Figure:
    """Picture of the partition: a panel per task, with a mark for each client and class.

    The marks are dots, whose area and colour are the number of samples, or coloured cells where so many clients share a
    panel (from about 60) that dots would be too small. All panels share one scale. Clients that take no part in
    a task are hatched. Longer streams and larger federations are thinned to ``max_panels`` evenly spaced tasks and to
    the first ``max_clients`` clients, and the picture says so.

    Args:
        tasks: the stream's tasks, at least one.
        indices: per task, client id to indices into ``task.train``.
        title: heading.
        max_panels: most panels.
        max_clients: most clients in a panel.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    total_clients = 1 + max((client for of_client in indices for client in of_client), default=0)
    num_clients = min(total_clients, max_clients)
    chosen = np.unique(np.linspace(0, len(tasks) - 1, min(len(tasks), max_panels)).round().astype(int)).tolist()
    grids = [_grid(tasks[t], indices[t], num_clients) for t in chosen]
    largest = max(1.0, *(float(np.nanmax(grid, initial=0)) for grid in grids))

    num_classes = max(grid.shape[0] for grid in grids)
    columns, cell_width, cell_height = _layout(len(chosen), num_clients, num_classes)
    lines = -(-len(chosen) // columns)
    width = max(columns * (num_clients * cell_width + 0.3) + 1.5, 5.0)
    height = max(lines * (num_classes * cell_height + 0.35) + 0.9, 2.5)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
    norm = PowerNorm(0.5, 0, largest)  # shares are skewed: most of the contrast belongs to the small counts
    cell = min(cell_width, cell_height)
    dot = 72 * cell if cell >= _SMALLEST_DOT else None
    for panel, (ax, t, grid) in enumerate(zip(axes.flat, chosen, grids, strict=False)):
        _draw_panel(ax, grid, norm, dot)
        ax.set_title(f"task {t}: {tasks[t].name}", fontsize=9, loc="left", pad=3)
        ax.tick_params(labelsize=7, labelbottom=panel + columns >= len(chosen))
    figure.supxlabel("client", fontsize=9)
    figure.supylabel("class", fontsize=9)
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    bar = figure.colorbar(ScalarMappable(norm, _colours()), ax=axes, shrink=min(1.0, 2.5 / height), aspect=15, pad=0.01)
    bar.set_label("samples" if dot is None else "samples (dot area and colour)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    notes = [title] if title else []
    if len(chosen) < len(tasks):
        notes.append(f"{len(chosen)} of {len(tasks)} tasks")
    if num_clients < total_clients:
        notes.append(f"first {num_clients} of {total_clients} clients")
    if notes:
        figure.suptitle(", ".join(notes), fontsize=11)
    return figure


def save(
    folder: Path, tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]], title: str = ""
) -> tuple[Path, Path]:
    """Write ``partition.csv`` and ``partition.png`` into ``folder``, creating it; return their paths."""
    table, picture = folder / "partition.csv", folder / "partition.png"
    write_partition_csv(table, tasks, indices)
    partition_figure(tasks, indices, title).savefig(picture)
    return table, picture


def _fingerprint(index: np.ndarray) -> str:
    return hashlib.blake2b(np.sort(index).astype("<i8").tobytes(), digest_size=8).hexdigest()


def _grid(task: Task, indices: Mapping[int, np.ndarray], num_clients: int) -> np.ndarray:
    """Samples ``[classes, num_clients]`` float64, NaN in the columns of absent clients."""
    grid = np.full((task.num_classes, num_clients), np.nan)
    clients = np.fromiter(indices, dtype=np.int64, count=len(indices))
    shown = clients < num_clients
    grid[:, clients[shown]] = class_counts(task, indices).T[:, shown]
    return grid


def _layout(panels: int, num_clients: int, num_classes: int) -> tuple[int, float, float]:
    """Number of panel columns, then the width and height in inches of one client's and one class's cell."""
    widest = 4 if num_clients <= 20 else 3 if num_clients <= 50 else 2  # cells stay wider than 0.04 inches
    lines = -(-panels // widest)
    columns = -(-panels // lines)
    cell_width = (_PAGE[0] / columns - 0.5) / num_clients
    cell_height = (_PAGE[1] / lines - 0.5) / num_classes
    return columns, min(cell_width, 0.3), float(np.clip(cell_height, 0.08, 0.3 if num_clients <= 50 else 0.18))


def _colours() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    # The palest fifth of the map would vanish on white paper.
    return LinearSegmentedColormap.from_list("samples", colormaps["viridis_r"](np.linspace(0.15, 1, 256)))


def _draw_panel(ax: Axes, grid: np.ndarray, norm: Any, dot: float | None) -> None:
    """Draw ``grid`` as dots, the largest ``dot`` points wide, or as coloured cells if ``dot`` is None."""
    classes, num_clients = grid.shape
    for client in np.flatnonzero(np.isnan(grid).all(axis=0)):
        ax.axvspan(client - 0.5, client + 0.5, facecolor="0.93", edgecolor="0.75", hatch="//////", linewidth=0)
    if dot is None:
        cells = np.where(grid > 0, grid, np.nan)
        ax.imshow(cells, cmap=_colours(), norm=norm, aspect="auto", interpolation="nearest", zorder=2)
    else:
        held, holders = np.nonzero(np.nan_to_num(grid))
        counts = grid[held, holders]
        area = np.maximum(dot**2 * counts / norm.vmax, 2.0)  # a single sample must stay visible
        ax.scatter(holders, held, s=area, c=counts, cmap=_colours(), norm=norm, linewidths=0, zorder=2)
    ax.set_xlim(-0.5, num_clients - 0.5)
    ax.set_ylim(classes - 0.5, -0.5)
    ax.locator_params(axis="both", integer=True)
    ax.set_yticks(np.arange(0, classes, max(1, classes // 10)))
    ax.grid(color="0.92", linewidth=0.5)
    ax.set_axisbelow(True)
