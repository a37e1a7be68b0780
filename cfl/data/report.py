"""The partition report: the samples of each client and class, as a table and as a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedWriter, TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.data.types import Task
from cfl.runtime.atomic_write import if_possible, replacing
from cfl.runtime.run_files import PARTITION_PICTURE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TASKS = 12
"""Most tasks shown in the picture of a partition."""

MOST_CLIENTS = 150
"""Most clients shown in the picture of a partition."""

_CLIENTS_AT_ONCE = 4096
_DPI = 150
_SMALLEST_DOT = 0.08  # inches, diameter of the largest dot below which cells are coloured instead
_PAGE = (15.0, 10.0)  # inches to fill with panels, as far as legibility allows


def write_partition_csv(path: Path, tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]]) -> None:
    """Write a CSV file with one row per task and client that takes part in it, a few clients at a time.

    Its columns are ``task``, ``client``, ``samples``, ``classes`` (distinct classes held), ``class_00``, ``class_01``,
    ... (samples of each class, labels local to the task; 0 beyond the task's classes) and ``hash`` (16 hexadecimal
    digits of BLAKE2b over the ascending indices as little-endian int64: equal hashes mean equal samples).

    Args:
        path: of the file, whose folder is created.
        tasks: the stream's tasks.
        indices: per task, client id to indices into ``task.train``.
    """
    width = max((task.num_groups for task in tasks), default=0)
    digits = max(2, len(str(width - 1)))
    columns = ["task", "client", "samples", "classes", *(f"class_{k:0{digits}d}" for k in range(width)), "hash"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, TextIOWrapper(BufferedWriter(file), "ascii", newline="") as lines:
        lines.write(",".join(columns) + "\r\n")  # numbers and hexadecimal digits: nothing to quote
        lines.writelines(",".join(map(str, row)) + "\r\n" for row in _rows(tasks, indices, width))


def _rows(tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]], width: int) -> Iterator[list[Any]]:
    """The rows of :func:`write_partition_csv`, with ``width`` columns for classes."""
    for t, (task, of_client) in enumerate(zip(tasks, indices, strict=True)):
        clients = list(of_client)
        for start in range(0, len(clients), _CLIENTS_AT_ONCE):
            some = clients[start : start + _CLIENTS_AT_ONCE]
            shares = _shares(of_client, start, start + len(some))
            counts = np.zeros((len(some), width), dtype=np.int64)
            counts[:, : task.num_groups] = _class_counts(task, shares)
            held = (counts > 0).sum(axis=1).tolist()
            for client, size, classes, per_class, fingerprint in zip(
                some, shares.sizes.tolist(), held, counts.tolist(), _fingerprints(shares), strict=True
            ):
                yield [t, client, size, classes, *per_class, fingerprint]


def runs_of_neighbours(indices: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of each run of neighbours among ascending indices ``[n]``."""
    parts = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1) if len(indices) else []
    return [(int(part[0]), int(part[-1])) for part in parts]


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced numbers of 0 .. count - 1, including the first and the last."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist()


def partition_figure(
    tasks: Sequence[Task],
    indices: Sequence[Mapping[int, np.ndarray]],
    title: str = "",
) -> Figure:
    """Picture of the partition: a panel per task, with a mark for each client and class.

    The marks are dots, whose area and colour are the number of samples, or coloured cells where so many clients share a
    panel (from about 60) that dots would be too small. All panels share one scale. Clients that take no part in
    a task are hatched. Longer streams and larger federations are thinned to :data:`MOST_TASKS` evenly spaced tasks and
    to the first :data:`MOST_CLIENTS` clients, and the picture says so.

    Args:
        tasks: the stream's tasks, at least one.
        indices: per task, client id to indices into ``task.train``.
        title: heading.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    total_clients = 1 + max((max(of_client, default=0) for of_client in indices), default=0)
    num_clients = min(total_clients, MOST_CLIENTS)
    chosen = evenly(len(tasks), MOST_TASKS)
    grids = [_grid(tasks[t], indices[t], num_clients) for t in chosen]
    largest = max(1.0, *(float(np.nanmax(grid, initial=0)) for grid in grids))

    num_classes = max(grid.shape[0] for grid in grids)
    columns, cell_width, cell_height = _layout(len(chosen), num_clients, num_classes)
    lines = -(-len(chosen) // columns)
    width = max(columns * (num_clients * cell_width + 0.3) + 1.5, 5.0)
    height = max(lines * (num_classes * cell_height + 0.35) + 0.9, 2.5)
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
    norm = PowerNorm(0.5, 0, largest)  # shares are skewed, so small counts get most of the contrast
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


def save_partition_figure(
    folder: Path, tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]], title: str = ""
) -> None:
    """Write :func:`partition_figure` as ``partition.png`` into a folder; with a warning if that is not possible."""
    with if_possible(), replacing(folder / PARTITION_PICTURE) as file:
        partition_figure(tasks, indices, title).savefig(file, format="png")


def _shares(indices: Mapping[int, np.ndarray], start: int, stop: int) -> Shares:
    """The shares of the clients ``start`` to ``stop``, in the order of ``indices``."""
    if isinstance(indices, ClientShares):
        return indices.dealt(start, stop)
    return Shares.of(list(islice(indices.values(), start, stop)))


def _class_counts(task: Task, shares: Shares) -> np.ndarray:
    """Samples of each share and class, ``[shares, task.num_groups]`` int64."""
    cells = np.repeat(np.arange(len(shares)) * task.num_groups, shares.sizes)
    cells += task.train.groups.numpy()[shares.samples]
    return np.bincount(cells, minlength=len(shares) * task.num_groups).reshape(len(shares), task.num_groups)


def _fingerprints(shares: Shares) -> list[str]:
    rising = np.diff(shares.samples) >= 0
    starts = shares.offsets[:-1][shares.sizes > 0]
    rising[starts[1:] - 1] = True  # the first sample of a share may be below the last one of the share before
    if not rising.all():
        shares = Shares.of([np.sort(index) for index in shares])
    samples, ends = memoryview(shares.samples.astype("<i8").tobytes()), (8 * shares.offsets).tolist()
    return [hashlib.blake2b(samples[start:stop], digest_size=8).hexdigest() for start, stop in pairwise(ends)]


def _grid(task: Task, indices: Mapping[int, np.ndarray], num_clients: int) -> np.ndarray:
    """Samples ``[classes, num_clients]`` float64, NaN in the columns of absent clients."""
    grid = np.full((task.num_groups, num_clients), np.nan)
    shown = [client for client in range(num_clients) if client in indices]
    grid[:, shown] = _class_counts(task, Shares.of([indices[client] for client in shown])).T
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
    absent = np.flatnonzero(np.isnan(grid).all(axis=0))
    for first, last in runs_of_neighbours(absent):  # one patch for neighbours: thousands of them take seconds to draw
        ax.axvspan(first - 0.5, last + 0.5, facecolor="0.93", edgecolor="0.75", hatch="//////", linewidth=0)
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
