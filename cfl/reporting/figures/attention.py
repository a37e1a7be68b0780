"""Pictures of FedWeIT's attention: how much clients borrow from each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from cfl.reporting.attention import read_attention
from cfl.reporting.figures.base import NUMBERS_UP_TO, new_figure
from cfl.reporting.rounding import significant

_COLOURS = "PuOr"


def attention_heatmap(rows: Iterable[Mapping[str, Any]], layer: str) -> Figure:
    """Draw how much clients borrow from each other in one layer, FedWeIT's attention (Figure 5b of its paper).

    A panel per task, on one colour scale; see :func:`draw_attention`.

    Args:
        rows: the rows of a run's ``fedweit.csv`` (:func:`cfl.reporting.attention.read_attention`).
        layer: the layer's name in these rows, for example that of the first fully connected layer.

    Raises:
        ValueError: no attention is known in that layer; the message names the layers with attention.
    """
    found = read_attention(rows)
    if layer not in found:
        raise ValueError(f"no attention in layer {layer!r}: one of {sorted(found)}")
    tasks = dict(sorted(found[layer].items()))
    most = max(attention_bound(of.values) for of in tasks.values())
    widths = [1.6 + 0.55 * len(of.lenders) for of in tasks.values()]
    tallest = max(len(of.borrowers) for of in tasks.values())
    figure = new_figure(figsize=(1.2 + sum(widths), 2.0 + 0.3 * tallest), layout="constrained")
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
    """Return the largest magnitude of the values, the bound of a colour scale that is symmetric about 0."""
    return max([abs(value) for row in values for value in row if value is not None], default=0.0) or 1e-12


def attention_scale(most: float) -> ScalarMappable:
    """Return the colour scale of attention, white at 0.

    Args:
        most: magnitude at both ends of the scale.
    """
    return ScalarMappable(Normalize(-most, most), colormaps[_COLOURS])


def draw_attention(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    borrowers: Sequence[str],
    lenders: Sequence[str],
    most: float,
) -> None:
    """Draw attention as colours: a row per borrowing client, a column per lending client and task.

    Cells are blank for a client's own knowledge. Up to :data:`NUMBERS_UP_TO` columns the values are printed.

    Args:
        axes: the axes to draw on.
        values: ``[borrowers][lenders]``, of either sign and without bounds.
        borrowers: names of the rows.
        lenders: names of the columns.
        most: magnitude at the ends of the colour scale.
    """
    shown = torch.tensor([[math.nan if value is None else value for value in row] for row in values])
    axes.imshow(shown.numpy(), cmap=_COLOURS, vmin=-most, vmax=most, aspect="auto")
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
