"""A finished run: its figures, pictures and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cfl.cli.main import restored
from cfl.export.answer import Answer, Choice, answer_of
from cfl.export.prediction import ANSWERED, SampleScorer, first_without_answer
from cfl.metrics.measure import Measure, measure_named
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.figures import accuracy_curve, accuracy_heatmap, learning_curves
from cfl.reporting.method_names import printed
from cfl.reporting.rounding import rounded
from cfl.reporting.run_folder import read_run
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import CHECKPOINT, CONFIG, SUMMARY
from cfl.training.client import Client

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load(folder: str | Path, allow: str | Sequence[str] = ()) -> Run:
    """Read a finished run from its folder.

    Args:
        folder: the run folder, or its checkpoint ``last.ckpt``.
        allow: packages, modules or classes that the run's configuration may name for its model, besides those of cfl,
            torch.optim and Lightning's loggers: ``--allow`` of the command line.

    Raises:
        RunFolderError: there is no finished run, or a file of it is damaged.
    """
    return Run(folder, allow)


class Run:
    """A finished run, read from its folder. Figures are read at once, the model on first use.

    Args:
        folder: the run folder, or its checkpoint ``last.ckpt``.
        allow: as for :func:`load`.

    Attributes:
        folder: the run folder.
        figures: the content of the folder's tables (:class:`cfl.reporting.run_folder.Run`).

    Raises:
        RunFolderError: there is no finished run, or a file of it is damaged.
    """

    def __init__(self, folder: str | Path, allow: str | Sequence[str] = ()) -> None:
        folder = Path(folder).expanduser()
        self.folder = folder.parent if folder.name == CHECKPOINT else folder
        self._allow = (allow,) if isinstance(allow, str) else tuple(allow)
        if self.folder.is_dir() and not (self.folder / SUMMARY).exists():
            raise RunFolderError(_without_run(self.folder))
        self.figures = read_run(self.folder)

    def __repr__(self) -> str:
        figures = self.figures
        shown = ", ".join(f"{key.upper()} {rounded(value, 2)}" for key, value in self._ends().items())
        return f"Run({str(self.folder)!r}: {figures.method} on {figures.benchmark}, seed {figures.seed}; {shown})"

    def _ends(self) -> dict[str, float]:
        found = {"acc": self.acc, "fgt": self.fgt, "bwt": self.bwt, **self.figures.others}
        return {key: found[key] for key in self._measure.of_papers if found.get(key) is not None}

    @property
    def acc(self) -> float | None:
        """ACC in percent; None where undefined."""
        return self.figures.acc

    @property
    def fgt(self) -> float | None:
        """FGT in points, ``mean of a[i, i] - a[t, i]``; None where undefined."""
        return self.figures.fgt

    @property
    def bwt(self) -> float | None:
        """BWT in points; None where undefined."""
        return self.figures.bwt

    @property
    def fwt(self) -> float | None:
        """FWT in points; None where undefined."""
        return self.figures.fwt

    @property
    def accuracy_matrix(self) -> Tensor:
        """``[T, T]`` float64: accuracy in percent on each task (column) after each task (row), NaN where not evaluated.

        Runs with another measure have its values instead, such as negative log-likelihoods in nats.
        """
        return self.figures.matrix

    # Pictures.

    def plot_matrix(self) -> Figure:
        """The accuracy matrix as a picture."""
        return accuracy_heatmap(self.accuracy_matrix, printed(self.figures.method, {}), measure=self._measure)

    def plot_curve(self) -> Figure:
        """ACC after each round, if the run was evaluated between task ends; otherwise after each task."""
        name, measure = printed(self.figures.method, {}), self._measure
        if self.figures.curve:
            return learning_curves({name: self.figures.curve}, [], measure)
        known = {name: self.figures.means} if len(self.figures.means) else None
        return accuracy_curve({name: self.accuracy_matrix}, measure, known)

    @property
    def _measure(self) -> Measure:
        return measure_named(self.figures.measure)

    # The model.

    @property
    def model(self) -> Answer:
        """The model that the run's tests evaluated, in evaluation mode.

        It maps normalised images ``[N, C, H, W]`` to outputs ``[N, O]``.

        Raises:
            RunFolderError: there is no checkpoint with its configuration.
            ConfigError: the model differs by client or task (:meth:`model_for`), or ``cfl export`` would refuse it.
        """
        return self.model_for()

    def model_for(self, client: int | None = None, task: int | None = None) -> Answer:
        """The model of a client or for a task, if these have models of their own; otherwise like :attr:`model`.

        Args:
            client: the client; None for the global model.
            task: the task, from 0. With a client, it counts the client's own tasks.

        Raises:
            RunFolderError, ConfigError: as for :attr:`model`.
        """
        return self._models(Choice(client, task))

    def predict(self, images: Any, client: int | None = None, task: int | None = None) -> Tensor:
        """Predict ``[N]`` int64, the output with the highest score for each image; ``[N, D]`` in regression runs.

        The choice is among the same outputs as in the run's tests: in task-incremental runs, those of ``task``. A
        class-incremental run's outputs are the stream's classes, task after task.

        Args:
            images: ``[N, C, H, W]`` as the data set's ``load`` returns them, which are normalised. Floating-point
                images are network input instead, unless the data set's own are floating-point. Changes that tasks make
                to images, such as a permutation, are not made. Or rows of numbers ``[N, D]`` as ``Features`` and
                ``CsvTable`` hold them, which are standardised.
            client: as for :meth:`model_for`.
            task: the task of the images, from 0; needed if models or the outputs to choose among differ by task.

        Raises:
            RunFolderError: as for :attr:`model`.
            ConfigError: images have another shape or type, the outputs for one are not finite, the task is missing or
                does not exist, the run estimates a density or finds boxes, or as for :attr:`model`.
        """
        scorer = SampleScorer(self._client, Choice(client, task), self._models)
        data = scorer.federation.data
        try:
            images = torch.as_tensor(images, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            valid = "an array or a tensor; cfl predict reads files"
            raise ConfigError("images", type(images).__name__, f"{valid} ({error})") from error
        if images.ndim == 2 and data.input_shape[:2] == (1, 1):
            try:
                images = scorer.source().images_of_array(images.detach().numpy(), data.root)
            except ValueError as error:
                raise ConfigError("images", list(images.shape), f"rows as in the run's data set ({error})") from error
        stores_floats, floats = scorer.stores_floats(), images.is_floating_point()
        if not floats and (stores_floats or images.dtype != torch.uint8):
            in_bytes = "torch.uint8 as stored, or floating-point network input"
            valid = "floating-point images as the data set stores them" if stores_floats else in_bytes
            raise ConfigError("images", str(images.dtype), valid)
        stored = stores_floats or not floats
        images = images.float() if floats else images
        shapes = {tuple(data.input_shape)} | (scorer.stored_shapes() if stored else set())
        if images.ndim != 4 or tuple(images.shape[1:]) not in shapes:
            valid = " or ".join(f"[N, {', '.join(map(str, shape))}]" for shape in sorted(shapes))
            raise ConfigError("images", list(images.shape), f"shape {valid}")
        if stored:
            images = scorer.network_input(images)
        scores = scorer.scores(images)
        if (row := first_without_answer(scores)) is not None:
            raise ConfigError(f"images[{row}]", images[row].flatten().tolist(), ANSWERED)
        return scores.argmax(1) if self._measure.targets == "classes" else scores

    @cached_property
    def _models(self) -> Callable[[Choice], Answer]:
        """The model of a choice, which is copied from the checkpoint's once."""
        return cache(partial(answer_of, self._client))

    @cached_property
    def _client(self) -> Client:
        """The client module with its federation, restored from the checkpoint."""
        for name in (CONFIG, CHECKPOINT):
            if not (self.folder / name).is_file():
                of_parts = "; if the run is made of parts, its model is client.network" if name == CONFIG else ""
                raise RunFolderError(f"{self.folder / name}: no such file; a model needs it{of_parts}")
        allowed = [f"--allow={name}" for name in self._allow]
        return restored(["--ckpt_path", str(self.folder / CHECKPOINT), *allowed])[0]


def _without_run(folder: Path) -> str:
    """Say that a folder holds no finished run, and where runs are: at most two levels below, as in ``runs``."""
    below = sorted(file.parent for level in ("*", "*/*") for file in folder.glob(f"{level}/{SUMMARY}"))
    if not below:
        return f"{folder} holds no finished run: {SUMMARY} is missing"
    more = f" and {len(below) - 3} more" if len(below) > 3 else ""
    return f"{folder} holds no finished run; runs below it: {', '.join(map(str, below[:3]))}{more}"
