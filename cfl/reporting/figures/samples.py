"""Images in rows, such as samples drawn from a density or test images of a detector."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import torch
from matplotlib.figure import Figure
from torch import Tensor

from cfl.reporting.figures.base import new_figure


def sample_grid(images: Tensor, title: str, row_names: Sequence[str] | None = None, inches: float = 0.6) -> Figure:
    """Images in rows, a frame of grey around each.

    Args:
        images: ``[R, N, C, H, W]`` in 0 .. 1; one channel is shown as grey, three as colours. NaN leaves a place empty.
        title: printed above, taken literally.
        row_names: one per row; None names none.
        inches: width of an image; smaller if there are many in a row.

    Raises:
        ValueError: another number of channels, or not R names.
    """
    rows, columns, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images to draw have 1 or 3 channels, got {channels}")
    if row_names is not None and len(row_names) != rows:
        raise ValueError(f"{len(row_names)} row names for {rows} rows")
    frame = max(1, min(height, width) // 14)
    framed = torch.full((rows, columns, 3, height + frame, width + frame), 0.6)
    framed[..., :height, :width] = images.float().nan_to_num(nan=0.6).expand(-1, -1, 3, -1, -1)
    raster = framed.permute(0, 3, 1, 4, 2).reshape(rows * (height + frame), columns * (width + frame), 3)
    raster = torch.nn.functional.pad(raster, (0, 0, frame, 0, frame, 0), value=0.6)
    side = min(inches, 9.0 / columns)
    figure = new_figure(
        figsize=(max(3.2, columns * side + 1.0), rows * side * height / width + 0.7), layout="constrained"
    )
    axes = figure.subplots()
    axes.imshow(raster.numpy(), interpolation="nearest")
    axes.set_xticks([])
    middles = [frame + (row + 0.5) * (height + frame) - frame / 2 - 0.5 for row in range(rows)]
    axes.set_yticks([] if row_names is None else middles, [] if row_names is None else list(row_names), fontsize=9)
    axes.tick_params(length=0)
    axes.set_title(fill(title, max(36, int(12 * (columns * side + 1)))), fontsize=10, parse_math=False)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
