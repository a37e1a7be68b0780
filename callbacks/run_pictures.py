"""Draws the pictures of a run: its matrix, its curves, and images that its model generates or tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.models.evaluation import evaluation_mode
from cfl.reporting.figures import accuracy_curve, accuracy_heatmap, learning_curves, sample_grid, save
from cfl.reporting.method_names import printed_methods
from cfl.runtime.run_files import SAMPLES
from cfl.training.client import Client
from cfl.training.density_samples import draw_images
from cfl.training.evaluation import mean_matrix
from cfl.training.found_boxes import draw_boxes


def drawn_curves(federation: Federation, title: str, targets: Sequence[float]) -> Iterator[tuple[str, Figure]]:
    """Draw the ``matrix``, the ``curve`` over tasks and, if a finished run was evaluated in between, over ``rounds``.

    There is no curve over ``rounds`` if all of its values are undefined.

    Args:
        federation: the federation after a round.
        title: title of the matrix.
        targets: accuracies in percent, drawn as lines.

    Yields:
        Name and picture.
    """
    matrix, method, measure = mean_matrix(federation), printed_methods(federation.methods), federation.measure
    yield "matrix", accuracy_heatmap(matrix, title, measure=measure)
    yield "curve", accuracy_curve({method: matrix}, measure, {method: matrix_rows.means(federation)})
    evaluated = any(value is not None for value in federation.curve)
    if federation.finished and federation.schedule.settings.evaluate_every and evaluated:
        yield "rounds", learning_curves({method: federation.curve}, targets, measure)


def save_curves(folder: Path, federation: Federation, benchmark: str, targets: Sequence[float]) -> None:
    """Write the pictures of :func:`drawn_curves` after the last round of a run into its folder."""
    title = f"{printed_methods(federation.methods)} on {benchmark}"
    for name, picture in drawn_curves(federation, title, targets):
        save(picture, folder / f"{federation.measure.name}_{name}.png")


def save_samples(folder: Path, client: Client, benchmark: str, count: int) -> Path | None:
    """Write ``samples.png`` for densities of images and for detectors, and return its path; None for other runs.

    Args:
        folder: the run folder.
        client: the module with the trained network.
        benchmark: name of the benchmark.
        count: number of images drawn or tested; 0 for none.
    """
    federation = client.require_federation()
    with evaluation_mode(client.network), federation.model.evaluation_statistics():  # else statistics would change
        drawn = draw_images(client, count) or draw_boxes(client, count)
    if drawn is None:
        return None
    title = f"{printed_methods(federation.methods)} on {benchmark}: {drawn.what} {drawn.whose}"
    return save(sample_grid(drawn.images, title, drawn.row_names, drawn.inches), folder / SAMPLES)
