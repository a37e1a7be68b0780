"""Scenarios: task-, class- and domain-incremental learning as class masks over one output layer, and others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from cfl.data.exposure import UNANNOUNCED, Exposure
from cfl.data.streams import Stream
from cfl.data.types import Task
from cfl.metrics.measure import MEASURES, measure_of
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices

Scenario = Literal["task", "class", "domain", "density", "regression", "detection"]
EVERY_SCENARIO: frozenset[Scenario] = frozenset(get_args(Scenario))


@dataclass(frozen=True)
class OutputMap:
    """Maps tasks to network outputs.

    Attributes:
        scenario: ``domain``: all tasks share the outputs; ``task``: every task has its own and is told apart at
            test time; ``class``: every task has its own and they compete at test time; ``density``: there are no
            classes, and all tasks share the outputs, one per variable of a sample; ``regression``: likewise, one per
            number to predict; ``detection``: likewise, those of a grid of boxes.
        num_outputs: size O of the network's output layer.
        offsets: per task, the output of its class 0.
        own: ``[T, O]`` bool, the outputs of each task.
        train: ``[T, O]`` bool, the outputs that take part in the loss of a task's samples while it is trained on, or
            None when all do.
        grows: whether ``train`` has the classes seen so far. Replayed samples of earlier tasks then compete with all
            classes seen by the current task.
    """

    scenario: Scenario
    num_outputs: int
    offsets: tuple[int, ...]
    own: Tensor
    train: Tensor | None
    grows: bool = False

    def in_loss_during(self, task: int) -> Tensor | None:
        """``[T, O]`` bool, outputs in the loss of every task's samples while ``task`` is trained on; None: all."""
        if self.train is None or not self.grows:
            return self.train
        return self.train[torch.arange(len(self.train), device=self.train.device).clamp(min=task)]

    def to(self, device: torch.device) -> OutputMap:
        """The same with ``train`` on a device."""
        return self if self.train is None else replace(self, train=self.train.to(device))

    def test_after(self, task: int) -> Tensor | None:
        """``[T, O]`` bool, the outputs among which tests choose after training on ``task`` (-1 before any training), or
        None for all.

        If the loss is over the classes seen so far, the other outputs are untrained and are left out of the choice.
        """
        if self.scenario == "class" and self.grows and self.train is not None and task >= 0:
            return self.train[task].expand_as(self.own)
        if self.scenario == "class" or bool(self.own.all()):
            return None
        return self.own


def output_map(
    classes_per_task: list[int],
    scenario: Scenario,
    class_loss: Literal["all", "seen", "own"] = "all",
    variables: int = 0,
    groups: Sequence[int] | None = None,
) -> OutputMap:
    """Map the tasks' classes to the outputs of one layer.

    Args:
        classes_per_task: number of classes of each task.
        scenario: see :class:`OutputMap`.
        class_loss: class-incremental only: outputs in the training loss, ``all`` classes of the stream, those
            ``seen`` so far, or those of a sample's ``own`` task.
        variables: number of outputs in scenarios without classes: density, regression and detection.
        groups: per task, the group of tasks that share their outputs, from 0; by default all tasks are one group if
            domain-incremental, and each task is its own otherwise.

    Raises:
        ConfigError: tasks differ in how many numbers they predict, or how many classes their boxes have.
    """
    tasks = len(classes_per_task)
    targets = measure_of(scenario).targets
    if targets in ("numbers", "boxes") and len({*classes_per_task}) > 1:
        what = "numbers to predict" if targets == "numbers" else "classes of boxes"
        valid = f"data sets with as many {what} in every task"
        raise ConfigError("data.stream", f"tasks with {', '.join(map(str, classes_per_task))}", valid)
    if targets != "classes":
        return OutputMap(scenario, variables, (0,) * tasks, torch.ones(tasks, variables, dtype=torch.bool), None)
    if groups is None:
        groups = [0] * tasks if scenario == "domain" else range(tasks)
    sizes = [0] * (1 + max(groups))
    for group, classes in zip(groups, classes_per_task, strict=True):
        sizes[group] = max(sizes[group], classes)
    num_outputs = sum(sizes)
    offsets = tuple(sum(sizes[:group]) for group in groups)
    own = torch.zeros(tasks, num_outputs, dtype=torch.bool)
    for task, (offset, size) in enumerate(zip(offsets, classes_per_task, strict=True)):
        own[task, offset : offset + size] = True
    train: Tensor | None = own
    grows = scenario == "class" and class_loss == "seen"
    if scenario == "class" and class_loss != "own":
        train = own.cumsum(0).bool() if grows else None
    elif bool(own.all()):
        train = None
    return OutputMap(scenario, num_outputs, offsets, own, train, grows)


def scenario_of(stream: Stream, named: Scenario | None) -> Scenario:
    """The scenario that a user names, or the one that follows from a stream's labels.

    Raises:
        ConfigError: ``data.scenario`` needs other labels.
    """
    measures = [measure for measure in MEASURES if measure.targets == stream.targets]
    if named is None and stream.targets == "classes":
        return "domain" if stream.shared_labels else "task"
    if named is None:
        return cast(Scenario, measures[0].scenarios[0])
    if measure_of(named).targets not in ("inputs", stream.targets):
        valid = " or ".join(name for measure in measures for name in measure.scenarios)
        raise ConfigError("data.scenario", named, f"{valid}, since labels are {stream.targets}")
    return named


def check_class_loss(value: str, scenario: Scenario, exposure: Exposure, in_own_order: bool) -> None:
    """Refuse ``seen`` and ``own`` unless the run is class-incremental and methods are told task boundaries.

    Raises:
        ConfigError: naming what rules it out: scenario, exposure, or ``data.sequences`` (``in_own_order``).
    """
    check_choices("data", ("all", "seen", "own"), class_loss=value)
    if value == "all":
        return
    valid = None
    if exposure in UNANNOUNCED:
        valid = f"all with data.exposure: {exposure}: which classes are in the loss would tell where tasks end"
    elif in_own_order and value == "seen":
        valid = "all with data.sequences: which classes a client has seen does not follow from the stream's order"
    elif scenario != "class":
        how = "data.scenario: class with data.stream: ClassSplit, for example"
        valid = f"all with data.scenario: {scenario}; {value} is for class-incremental streams ({how})"
    if valid is not None:
        raise ConfigError("data.class_loss", value, valid)


def check_answers_compete(stream: Stream, scenario: Scenario, num_outputs: int) -> None:
    """Refuse streams in which a sample has only one possible class, so that every answer would be right.

    Raises:
        ConfigError: ``data.scenario`` or ``data.stream``.
    """
    classes = stream.classes_per_task
    if scenario == "task" and 1 in classes:
        valid = f"class, or streams with at least 2 classes in every task: task {classes.index(1)} has 1"
        raise ConfigError("data.scenario", "task", f"{valid}, and so every answer would be right")
    if scenario in ("class", "domain") and num_outputs == 1:
        raise ConfigError("data.stream", stream.name, "one with at least 2 classes")


def require_binary(tasks: Sequence[Task]) -> None:
    """Refuse samples whose network input has values other than 0 and 1.

    Raises:
        ConfigError: naming the task.
    """
    for task in tasks:
        for images in (task.train.images, task.test.images):
            if images.is_floating_point():
                stored = images.unique()
            else:  # much faster
                stored = torch.bincount(images.flatten(), minlength=256).nonzero().flatten().to(torch.uint8)
            channels = len(task.transform.mean)
            x = task.transform.normalised(stored.view(-1, 1, 1, 1).expand(-1, channels, 1, 1))
            if not bool(((x == 0) | (x == 1)).all()):
                what = f"{task.name}, whose network input lies between {float(x.min()):.3g} and {float(x.max()):.3g}"
                valid = "binary data sets with data.scenario density, e.g. a source in Binarised"
                raise ConfigError("data.stream.source", what, valid)
