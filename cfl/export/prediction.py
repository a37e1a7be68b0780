"""Score samples by a run's model, among the same outputs as the run's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.streams.sequence import enlarge, repeat_channels
from cfl.data.types import ImageSet
from cfl.export.answer import Answer, Choice, answer_of
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.methods.capabilities import Predictor
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ANSWERED = "inputs of a size as in training: the network's outputs for these are not finite"
"""What is valid in place of the samples of :func:`first_without_answer`."""


class SampleScorer:
    """Scores images, or rows of numbers, by the model of a run.

    Args:
        client: the module with its federation, restored from a checkpoint.
        choice: the client whose model is used, and the task of the samples.
        models: gives the model of a choice (:func:`cfl.export.answer.answer_of`). Scorers of a run that share it copy
            each model once. Unless given, a scorer has one of its own.

    Attributes:
        federation: the federation of the run.
        choice: the given choice.
        gives_probabilities: whether scores are logits, so that their softmax are probabilities; False if a method
            computes the scores.

    Raises:
        ConfigError: there is no such task.
    """

    def __init__(self, client: Client, choice: Choice, models: Callable[[Choice], Answer] | None = None) -> None:
        self.federation, self.choice = client.require_federation(), choice
        self.gives_probabilities = not self.federation.methods.with_capability(Predictor)
        self._models = models or cache(partial(answer_of, client))
        if choice.task is not None and choice.task not in choice.tasks(self.federation.data):
            raise ConfigError("task", choice.task, self._valid_task())

    def model_of_client(self) -> Answer:
        """The model of the client, or the global one, whatever the task.

        Raises:
            ConfigError: as for :func:`cfl.export.answer.answer_of`.
        """
        return self._models(Choice(self.choice.client))

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        """Return the model's outputs ``[N, O]``, with minus infinity for outputs that tests do not choose among.

        Args:
            x: ``[N, C, H, W]`` float32 network input.

        Raises:
            ConfigError: the task is missing, the run neither classifies nor predicts numbers, or as for
                :func:`cfl.export.answer.answer_of`.
        """
        model, allowed = self.prepared()
        scores = torch.cat([model(part) for part in x.split(self.federation.data.eval_batch_size)])
        return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)

    def prepared(self) -> tuple[Answer, Tensor | None]:
        """Return the model that :meth:`scores` uses, and ``[O]`` bool, the outputs to choose among, or None for all.

        Raises:
            ConfigError: as for :meth:`scores`.
        """
        data, measure, choice = self.federation.data, self.federation.measure, self.choice
        if measure.targets not in ("classes", "numbers"):
            valid = f"a run that classifies or predicts numbers; this one measures {measure.words}"
            raise ConfigError("predict", data.stream.name, valid)
        allowed = data.outputs.test_after(last_task(self.federation))
        if allowed is not None and choice.task is None and not allowed.eq(allowed[0]).all():
            raise ConfigError("task", None, f"{self._valid_task()}, the task of the samples")
        model = self._models(choice) if self._differs_by_task() else self.model_of_client()
        return model, None if allowed is None else allowed[choice.stream_task(data)]

    def network_input(self, stored: Tensor) -> Tensor:
        """Return network input ``[N, C, H, W]`` float32: stored images, enlarged and normalised as in the task's tests.

        Changes that tasks make to images, such as a permutation, are not made.

        Args:
            stored: ``[N, c, h, w]`` as the data set's ``load`` gives them, or enlarged already.

        Raises:
            ConfigError: the task is missing and the data sets of tasks are normalised differently, or the stream has
                tasks without a data set.
        """
        data = self.federation.data
        sources = [data.stream.source_of(number) for number in range(data.stream.num_tasks)]
        transforms = [source.transform() for source in sources if source is not None]
        if len(transforms) < len(sources):
            raise ConfigError("images", str(stored.dtype), "floating-point network input: the stream tells no data set")
        if self.choice.task is None and len({transform.normalisation for transform in transforms}) > 1:
            valid = f"{self._valid_task()}, as this run's data sets are normalised differently"
            raise ConfigError("task", None, valid)
        transform = repeat_channels(transforms[self.choice.stream_task(data)], data.input_shape[0])
        images = ImageSet(stored, torch.zeros(len(stored), dtype=torch.int64))
        return transform.normalised(enlarge(images, data.input_shape).images)

    def stored_shapes(self) -> set[tuple[int, int, int]]:
        """``(c, h, w)`` of the images of the task's data set, or of all tasks' data sets; see :meth:`network_input`."""
        return {source.shape for source in self._sources()}

    def stores_floats(self) -> bool:
        """Whether the task's data set, or all tasks' data sets, hold floating-point images; False if none is known.

        Raises:
            ConfigError: the task is missing, and only some tasks' data sets hold such images.
        """
        kinds = {source.is_float for source in self._sources()}
        if len(kinds) > 1:
            valid = f"{self._valid_task()}: some tasks' data sets hold bytes, others floating-point numbers"
            raise ConfigError("task", None, valid)
        return kinds == {True}

    def _sources(self) -> list[Source]:
        """The data sets of the task, or of all tasks, as far as the stream tells them."""
        data, choice = self.federation.data, self.choice
        tasks = range(data.stream.num_tasks) if choice.task is None else [choice.stream_task(data)]
        return [source for number in tasks if (source := data.stream.source_of(number)) is not None]

    def source(self) -> Source:
        """The data set as whose samples files and rows of numbers are read.

        Raises:
            ConfigError: the stream does not name the data set, or the task is missing and the data sets of tasks
                differ.
        """
        data, choice = self.federation.data, self.choice
        source = data.stream.source_of(choice.stream_task(data))
        if source is None:
            raise ConfigError("data.stream", data.stream.name, "a stream that tells the data set of each task")
        others = (data.stream.source_of(task) for task in range(data.stream.num_tasks))
        if choice.task is None and any(other is not source for other in others):
            valid = f"{self._valid_task()}: samples are read as the data set of their task"
            raise ConfigError("task", None, valid)
        return source

    def _valid_task(self) -> str:
        return f"an integer between 0 and {self.choice.tasks(self.federation.data)[-1]}"

    def _differs_by_task(self) -> bool:
        if self.choice.client is not None and self.federation.methods.tells_tasks_apart:
            return True
        try:
            self.model_of_client()
        except ConfigError as error:
            if error.key != "task":
                raise
            return True
        return False


def first_without_answer(scores: Tensor) -> int | None:
    """The first row of scores ``[N, O]`` with NaN, infinity or minus infinity throughout; None without such a row."""
    strange = (scores.isnan() | scores.isposinf()).any(1) | scores.isneginf().all(1)
    return int(strange.long().argmax()) if bool(strange.any()) else None


def last_task(federation: Federation) -> int:
    """The last task that any client has trained on."""
    return max(matrix_rows.current(federation).values())


def output_names(federation: Federation, choice: Choice) -> list[str]:
    """Return the name of the class of each of a network's outputs, or the output's number if it has no single class.

    Args:
        federation: the federation of the run.
        choice: with the task of the images; it matters if tasks share an output for different classes.
    """
    data = federation.data
    numbers = [str(output) for output in range(data.num_outputs)]
    if federation.measure.targets != "classes":
        return numbers
    of_task = data.stream.class_names(data.root, data.seed)
    found: list[set[str]] = [set() for _ in numbers]
    for first, classes in zip(data.outputs.offsets, of_task, strict=True):
        for output, name in enumerate(classes, first):
            found[output].add(name)
    names = [own.pop() if len(own) == 1 else number for own, number in zip(found, numbers, strict=True)]
    if choice.task is not None:
        chosen = choice.stream_task(data)
        first = data.outputs.offsets[chosen]
        names[first : first + len(of_task[chosen])] = of_task[chosen]
    return names
