"""Task-, class- and domain-incremental learning as class masks over one output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scenario = Literal["task", "class", "domain"]


@dataclass(frozen=True)
class OutputMap:
    """Which network outputs belong to which task.

    Attributes:
        scenario: ``domain``: all tasks share the outputs; ``task``: every task has its own and is told apart at
            test time; ``class``: every task has its own and they compete at test time.
        num_outputs: size O of the network's output layer.
        offsets: per task, the output of its class 0.
        own: ``[T, O]`` bool, the outputs of each task.
        train: ``[T, O]`` bool, the outputs that take part in the loss of a task's samples, or None when all do.
    """

    scenario: Scenario
    num_outputs: int
    offsets: tuple[int, ...]
    own: Tensor
    train: Tensor | None

    @property
    def test(self) -> Tensor | None:
        """``[T, O]`` bool, the outputs among which a test sample's prediction is sought, or None for all."""
        if self.scenario == "class" or bool(self.own.all()):
            return None
        return self.own


def output_map(
    classes_per_task: list[int], scenario: Scenario, class_loss: Literal["all", "seen"] = "all"
) -> OutputMap:
    """Lay the tasks' classes out over one output layer.

    Args:
        classes_per_task: number of classes of each task.
        scenario: see :class:`OutputMap`.
        class_loss: class-incremental only: outputs in the training loss, ``all`` classes of the stream or those
            ``seen`` so far.
    """
    tasks = len(classes_per_task)
    shared = scenario == "domain"
    num_outputs = max(classes_per_task) if shared else sum(classes_per_task)
    offsets = tuple(0 if shared else sum(classes_per_task[:t]) for t in range(tasks))
    own = torch.zeros(tasks, num_outputs, dtype=torch.bool)
    for task, (offset, size) in enumerate(zip(offsets, classes_per_task, strict=True)):
        own[task, offset : offset + size] = True
    train: Tensor | None = own
    if scenario == "class":
        train = own.cumsum(0).bool() if class_loss == "seen" else None
    elif bool(own.all()):
        train = None
    return OutputMap(scenario, num_outputs, offsets, own, train)
