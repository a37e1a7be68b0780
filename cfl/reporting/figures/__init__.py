"""Pictures of accuracy matrices and learning curves, as matplotlib figures that need no display.

Widths and letters are those of an article: a column is 3.3 inches wide, a page 6.9, letters have 7 and 8 points.

Colours are told apart by readers with any form of colour blindness and in grey: the scale is cividis, lines have
markers and dashes beside their colours (:mod:`cfl.reporting.line_styles`). Every matrix is ``[T, T]`` in percent with
``a[t, i]`` the accuracy on task i after learning task t, NaN where not evaluated (:mod:`cfl.metrics.transfer`). With
another :class:`cfl.metrics.measure.Measure` it holds the values of that measure.
"""

from cfl.reporting.figures.attention import attention_bound, attention_heatmap, attention_scale, draw_attention
from cfl.reporting.figures.base import COLUMN_WIDTH, NUMBERS_UP_TO, PAGE_WIDTH, PRINT, require_square, save
from cfl.reporting.figures.curves import accuracy_curve, draw_band, learning_curves, legend_columns, line_look
from cfl.reporting.figures.heatmaps import (
    accuracy_heatmap,
    accuracy_heatmaps,
    cell_colours,
    cell_decimals,
    colour_scale,
)
from cfl.reporting.figures.samples import sample_grid

__all__ = [
    "COLUMN_WIDTH",
    "NUMBERS_UP_TO",
    "PAGE_WIDTH",
    "PRINT",
    "accuracy_curve",
    "accuracy_heatmap",
    "accuracy_heatmaps",
    "attention_bound",
    "attention_heatmap",
    "attention_scale",
    "cell_colours",
    "cell_decimals",
    "colour_scale",
    "draw_attention",
    "draw_band",
    "learning_curves",
    "legend_columns",
    "line_look",
    "require_square",
    "sample_grid",
    "save",
]
