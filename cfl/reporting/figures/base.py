"""Common parts of all pictures: widths, fonts, figures that need no display, and saving to a file."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from cfl.runtime.atomic_write import replacing

COLUMN_WIDTH, PAGE_WIDTH = 3.3, 6.9
"""Widths of a column and of a page of an article, in inches."""
PRINT: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.handlelength": 2.4,
}
"""Settings of matplotlib while a picture is made."""
NUMBERS_UP_TO = 12
"""Largest number of tasks for which a heatmap prints the accuracies into its cells."""
_UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}


def new_figure(figsize: tuple[float, float], layout: Literal["constrained", "compressed"]) -> Figure:
    """Return an empty figure that notebooks show even if pyplot is not imported.

    It is not an instance of a subclass: loggers recognise matplotlib's figures by the name of their class.
    """
    figure = Figure(figsize=figsize, layout=layout)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    return file.getvalue()


@rc_context({"pdf.fonttype": 42, "svg.hashsalt": "cfl"})  # publishers require outline fonts
def save(figure: Figure, path: Path, dots_per_inch: int = 150) -> Path:
    """Write ``figure`` to ``path`` in the format of its suffix, without a date; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".")
    with replacing(path) as file:
        figure.savefig(file, dpi=dots_per_inch, format=kind, metadata=_UNDATED.get(kind))
    return path


def require_square(matrix: Tensor, title: str) -> None:
    """Refuse a matrix that is empty or not ``[T, T]``."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"{title}: an accuracy matrix to draw is [T, T], got {list(matrix.shape)}")
