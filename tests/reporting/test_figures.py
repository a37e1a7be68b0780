from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps, pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from support.made_up import matrix

from cfl.metrics.measure import measure_named
from cfl.reporting.figures import (
    COLUMN_WIDTH,
    NUMBERS_UP_TO,
    PAGE_WIDTH,
    accuracy_curve,
    accuracy_heatmap,
    accuracy_heatmaps,
    cell_colours,
    learning_curves,
    save,
)

NAN = math.nan


def numbers(figure: Figure) -> dict[tuple[int, int], str]:
    """Return (row, column) -> text of the cells of the first heatmap, by their positions."""
    texts = (text for text in figure.axes[0].texts if text.get_text())
    return {(round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in texts}


def pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255.0


def pixel_at(figure: Figure, t: int, i: int) -> np.ndarray:
    """Return the drawn colour near the lower left corner of the cell in row t and column i, away from its number."""
    image = pixels(figure)
    x, y = figure.axes[0].transData.transform((i - 0.42, t + 0.42))
    return image[image.shape[0] - 1 - int(y), int(x)]


def relative_luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, other: str) -> float:
    high, low = sorted((relative_luminance(one), relative_luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_cells_show_row_t_and_column_i() -> None:
    a = matrix(4)
    a[2, 0] = a[0, 3] = NAN
    shown = numbers(accuracy_heatmap(a, "run"))
    expected = {(t, i): f"{a[t, i].item():.1f}" for t in range(4) for i in range(4) if not math.isnan(a[t, i])}
    assert shown == expected


def test_drawn_colours_follow_the_scale_from_0_to_100() -> None:
    a = torch.tensor([[0.0, 30.0, 30.0], [100.0, 50.0, NAN], [25.0, NAN, 75.0]], dtype=torch.float64)
    figure = accuracy_heatmap(a, "run")
    for t, i in [(0, 0), (1, 0), (1, 1), (2, 0), (2, 2)]:
        assert pixel_at(figure, t, i) == pytest.approx(colormaps["cividis"](a[t, i].item() / 100)[:3], abs=0.02)
    for t, i in [(1, 2), (2, 1)]:  # cells not evaluated are white
        assert pixel_at(figure, t, i) == pytest.approx((1.0, 1.0, 1.0))
    bar = figure.axes[-1]
    assert bar.get_ylim() == (0.0, 100.0)


def test_tasks_not_learned_yet_are_lighter_and_hatched() -> None:
    a = torch.full((3, 3), 20.0, dtype=torch.float64)
    figure = accuracy_heatmap(a, "run")
    hatches = [collection for collection in figure.axes[0].collections if collection.get_hatch()]
    boxes = [path.get_extents() for collection in hatches for path in collection.get_paths()]
    hatched = {(round(box.y0 + 0.5), i) for box in boxes for i in range(round(box.x0 + 0.5), round(box.x1 + 0.5))}
    assert hatched == {(0, 1), (0, 2), (1, 2)}
    for accuracy in (0.0, 20.0, 50.0, 80.0):
        seen, unseen = cell_colours(accuracy)[0], cell_colours(accuracy, seen=False)[0]
        assert relative_luminance(unseen) > relative_luminance(seen) + 0.05


def test_a_picture_of_many_tasks_has_few_parts_and_no_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are looked up, or hatched, one by one take seconds with a hundred tasks."""
    monkeypatch.setattr("cfl.reporting.figures.heatmaps.cell_colours", lambda *_: pytest.fail("a cell by itself"))
    a = matrix(60)
    a[0, 10] = NAN
    cells, hatches = accuracy_heatmap(a, "run").axes[0].collections
    assert len(hatches.get_paths()) == 60  # a row each but the last; the first has a gap
    assert len(cells.get_edgecolor()) == 0
    shades = np.asarray(cells.get_array())
    assert shades[0, 10, 3] == 0
    assert shades[30, 20, :3] == pytest.approx(colormaps["cividis"](a[30, 20].item() / 100)[:3])


def test_numbers_are_readable_on_every_colour() -> None:
    for tenth in range(1001):
        for seen in (True, False):
            background, ink = cell_colours(tenth / 10, seen)
            assert contrast(background, ink) >= 4.5  # WCAG 2, level AA
            assert contrast(background, ink) == max(contrast(background, c) for c in ("#000000", "#ffffff"))


def test_grey_print_keeps_the_order_of_accuracies() -> None:
    grey = [relative_luminance(cell_colours(float(accuracy))[0]) for accuracy in range(0, 101, 5)]
    assert grey == sorted(grey)


def test_numbers_are_left_out_where_they_would_not_fit() -> None:
    assert len(numbers(accuracy_heatmap(matrix(NUMBERS_UP_TO), "run"))) == NUMBERS_UP_TO**2
    assert not numbers(accuracy_heatmap(matrix(NUMBERS_UP_TO + 1), "run"))


@pytest.mark.parametrize("tasks", [1, 5, 50])
def test_axes_are_labelled_with_task_indices(tasks: int) -> None:
    axes = accuracy_heatmap(matrix(tasks), "run").axes[0]
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert set(ticks) <= set(range(tasks))
        assert len(ticks) >= min(tasks, 10)
    assert axes.yaxis_inverted()  # the first task on top, as in the tables


def test_names_are_taken_literally() -> None:
    figure = accuracy_heatmap(matrix(2), "cost $5")
    pixels(figure)  # a lone dollar would be a syntax error of mathematical text
    assert figure.axes[0].get_title() == "cost $5"
    pixels(accuracy_curve({"_one $": matrix(2)}))


def test_heatmaps_stand_side_by_side() -> None:
    figure = accuracy_heatmaps({f"run {k}": matrix(k + 1, k) for k in range(4)})
    pixels(figure)
    titled = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in titled] == ["run 0", "run 1", "run 2", "run 3"]
    boxes = [axes.get_position() for axes in titled]
    assert boxes[0].y0 == pytest.approx(boxes[1].y0)
    assert boxes[0].x1 < boxes[1].x0 < boxes[1].x1 < boxes[2].x0
    assert boxes[3].y1 < boxes[0].y0
    assert [len(axes.texts) for axes in titled] == [1, 4, 9, 16]


def test_lines_are_the_average_over_tasks_seen_and_the_first_task() -> None:
    runs = {"one": matrix(5, 1), "two": matrix(3, 2)}
    axes = accuracy_curve(runs).axes[0]
    for a, first, average in zip(runs.values(), axes.lines[0::2], axes.lines[1::2], strict=True):
        tasks = len(a)
        assert list(average.get_xdata()) == list(range(tasks))
        expected = [sum(a[t, i].item() for i in range(t + 1)) / (t + 1) for t in range(tasks)]
        assert list(average.get_ydata()) == pytest.approx(expected)
        assert list(first.get_ydata()) == pytest.approx([a[t, 0].item() for t in range(tasks)])
        assert first.get_linewidth() < average.get_linewidth()
        assert first.get_color() == average.get_color()


def test_rows_not_evaluated_are_skipped() -> None:
    a = matrix(4)
    a[1] = NAN
    a[2, 1] = NAN  # no average, but task 0 is known
    axes = accuracy_curve({"run": a}).axes[0]
    assert list(axes.lines[0].get_xdata()) == [0, 2, 3]
    assert list(axes.lines[1].get_xdata()) == [0, 3]


def test_every_run_has_its_own_line_style_and_name() -> None:
    names = [f"_run {k}" for k in range(25)]
    figure = accuracy_curve({name: matrix(3, k) for k, name in enumerate(names)})
    lines = figure.axes[0].lines[1::2]
    assert len({(line.get_color(), line.get_marker(), str(line._dash_pattern)) for line in lines}) == 25
    legends = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert legends == [names, ["ACC over tasks seen", "accuracy on task 0"]]


def test_methods_are_drawn_alike_whatever_stands_beside_them() -> None:
    def look(figure: Figure, place: int) -> tuple[str, str, str]:
        line = figure.axes[0].lines[place]
        return line.get_color(), line.get_marker(), line.get_linestyle()

    a = matrix(3)
    assert look(accuracy_curve({"fot": a}), 1) == look(accuracy_curve({"er": a, "x": a, "FOT": a}), 5)
    assert look(accuracy_curve({"fot": a}), 1) == look(learning_curves({"er": [1.0], "FOT": [2.0]}), 1)


def test_bands_are_one_deviation_wide() -> None:
    a = matrix(3)
    average = [a[t, : t + 1].mean().item() for t in range(3)]
    (band,) = accuracy_curve({"run": a}, deviations={"run": [1.0, math.nan, 2.0]}).axes[0].collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.round(6).tolist()}
    for t, std in ((0, 1.0), (2, 2.0)):
        assert {(t, round(average[t] - std, 6)), (t, round(average[t] + std, 6))} <= corners
    assert {x for x, _ in corners} == {0, 2}, "where no deviation is known there is no band"
    (band,) = learning_curves({"run": [None, 20.0, 30.0]}, deviations={"run": [1.0, 1.0, 3.0]}).axes[0].collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert corners == {(1, 19), (1, 21), (2, 27), (2, 33)}


@pytest.mark.parametrize("lines", [1, 8, 25])
def test_pictures_are_as_wide_as_a_column_or_a_page_with_letters_of_7_and_8_points(lines: int) -> None:
    names = [f"method {k}" for k in range(lines)]
    curves = {name: [50.0 + k, 60.0 + k] for k, name in enumerate(names)}
    for width in (COLUMN_WIDTH, PAGE_WIDTH):
        figures = [
            accuracy_curve({name: matrix(3, k) for k, name in enumerate(names)}, width=width),
            learning_curves(curves, [55], width=width),
        ]
        for figure in figures:
            FigureCanvasAgg(figure).draw()
            assert figure.get_size_inches()[0] == width
            box = figure.get_tightbbox()
            assert -0.01 <= box.x0 <= box.x1 <= width + 0.01
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert {text.get_fontsize() for text in texts} <= {7, 8}
            assert figure.axes[0].get_position().height * figure.get_figheight() > 1.2
    heatmaps = accuracy_heatmaps({f"m{k}": matrix(5, k) for k in range(lines)})
    assert heatmaps.get_figwidth() <= PAGE_WIDTH


def test_learning_curves_have_a_point_per_evaluation() -> None:
    long = [float(k) for k in range(1, 201)]
    runs: dict[str, list[float | None]] = {
        "_$one": [None, 20.0, None, 35.5, 30.0],
        "two": [12.5, None],
        "long": [*long],
    }
    figure = learning_curves(runs, [85, 97.5])
    pixels(figure)  # the names are taken literally
    axes = figure.axes[0]
    across = [line for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert [list(line.get_ydata()) for line in across] == [[85, 85], [97.5, 97.5]]
    lines = [line for line in axes.lines if line not in across]
    points = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in lines]
    assert points == [[(1, 20.0), (3, 35.5), (4, 30.0)], [(0, 12.5)], list(enumerate(long))]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*runs, "targets: 85, 97.5 %"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("communication round", "ACC (%)")


def test_learning_curves_without_targets_have_no_line_across() -> None:
    figure = learning_curves({"run": [40.0, 41.0]})
    assert len(figure.axes[0].lines) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run"]
    low, high = figure.axes[0].get_ylim()
    assert high - low == pytest.approx(10.0), "a span below ten points would magnify noise"


def test_the_accuracy_axis_neither_magnifies_noise_nor_leaves_percent() -> None:
    close = torch.full((3, 3), 91.0, dtype=torch.float64)
    low, high = accuracy_curve({"run": close}).axes[0].get_ylim()
    assert high - low == pytest.approx(10.0, abs=1.0)
    assert low < 91 < high
    low, high = accuracy_curve({"run": torch.tensor([[100.0, 0.0], [0.0, 0.0]])}).axes[0].get_ylim()
    assert low >= -1
    assert high <= 101


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_values_without_bounds_may_be_of_any_size(scale: float) -> None:
    """The targets of a regression have their own unit: errors of 0.1 and 0.5 are far apart."""
    errors = scale * torch.tensor([[0.127, 0.9], [0.512, 0.131]], dtype=torch.float64)
    low, high = accuracy_curve({"run": errors}, measure_named("rmse")).axes[0].get_ylim()
    assert 0 < low < 0.127 * scale < 0.512 * scale < high < 0.6 * scale
    low, high = (
        learning_curves({"run": [0.127 * scale, 0.512 * scale]}, measure=measure_named("rmse")).axes[0].get_ylim()
    )
    assert 0 < low < 0.127 * scale < 0.512 * scale < high < 0.6 * scale
    low, high = learning_curves({"run": [20.0 * scale, 20.1 * scale]}, measure=measure_named("nll")).axes[0].get_ylim()
    assert high - low == pytest.approx(2.0 * scale, rel=0.01), "noise is not magnified"
    figure = accuracy_heatmap(errors, "run", measure_named("rmse"))
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert len(set(shown)) == 4
    assert [float(text) for text in shown] == pytest.approx(errors.flatten().tolist(), rel=0.05)


def test_save_writes_the_picture_where_asked(tmp_path: Path) -> None:
    path = save(accuracy_heatmap(matrix(3), "run"), tmp_path / "new" / "folder" / "heatmap.png")
    image = imread(path)
    assert min(image.shape[:2]) > 300
    assert image[..., :3].std() > 0.05


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_picture_is_the_same_file_whenever_it_is_drawn(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(name: str) -> bytes:
        return save(accuracy_curve({"fot": matrix(3), "a<&$": matrix(3, 1)}), tmp_path / f"{name}.{kind}").read_bytes()

    first = drawn("one")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert drawn("two") == first
    assert first.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
    if kind == "pdf":
        assert b"/Type3" not in first
        assert b"CreationDate" not in first


def test_no_display_and_no_global_list_of_figures_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure went through pyplot, which may open a display")

    monkeypatch.setattr(pyplot, "figure", refuse)
    monkeypatch.setattr(pyplot, "switch_backend", refuse)
    open_before = pyplot.get_fignums()
    save(accuracy_heatmap(matrix(2), "run"), tmp_path / "heatmap.png")
    save(accuracy_curve({"run": matrix(2)}), tmp_path / "curve.png")
    assert pyplot.get_fignums() == open_before


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no accuracy matrix"):
        accuracy_heatmaps({})
    with pytest.raises(ValueError, match="no accuracy matrix"):
        accuracy_curve({})
    with pytest.raises(ValueError, match="no learning curve"):
        learning_curves({})
    with pytest.raises(ValueError, match=r"run: .* at least one evaluation"):
        learning_curves({"run": [None, None]})
    with pytest.raises(ValueError, match=r"run: .* \[2, 3\]"):
        accuracy_heatmap(torch.zeros(2, 3), "run")
    with pytest.raises(ValueError, match=r"run: .* \[4, 2, 2\]"):
        accuracy_curve({"run": torch.zeros(4, 2, 2)})


def test_a_notebook_shows_a_figure_that_is_returned() -> None:
    """A returned figure is shown in a notebook, also without pyplot, whose import makes matplotlib's figures shown."""
    figure = accuracy_heatmap(torch.eye(2) * 100, "x")
    assert figure._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"  # type: ignore[attr-defined]
