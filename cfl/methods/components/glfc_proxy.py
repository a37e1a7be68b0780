"""The proxy server of GLFC: which old model is the best, judged on images that clients have given away in gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class KeptModel:
    """A global model worth remembering.

    Attributes:
        tensors: name -> tensor, copies.
        classes: ``[O]`` bool, those that the server had images of when it was chosen: what it may know.
        accuracy: in [0, 1], on the pool's images.
        version: a number that no other model has, from 1.
    """

    tensors: dict[str, Tensor]
    classes: Tensor
    accuracy: float
    version: int


class ProxyServer:
    """A pool of images of the current task's classes, and two slots: the best model of this task and of the one before.

    Differs from the authors' code, in which whatever clients send replaces the pool and moves the slots on, stragglers'
    images too; the best accuracy so far is never forgotten, so that a task whose images are harder to recognise finds
    no model; and a client that has noticed new data distils from the current slot whenever there is one.

    Args:
        num_outputs: number of classes O.

    Attributes:
        images: ``[M, C, H, W]`` the pool, None before the first image.
        labels: ``[M]`` int64.
        current: the best model since the pool was opened, or None.
        previous: the best one of the pool before, or None.
    """

    def __init__(self, num_outputs: int) -> None:
        self.images: Tensor | None = None
        self.labels = torch.zeros(0, dtype=torch.int64)
        self.current: KeptModel | None = None
        self.previous: KeptModel | None = None
        self.classes = torch.zeros(num_outputs, dtype=torch.bool)
        self._version = 0

    def receive(self, images: Tensor, labels: Tensor) -> bool:
        """Clients have given images away.

        Where most of them are of classes that nobody has sent before, a new task has begun: the slots move on, and the
        pool holds these images alone. Otherwise these are stragglers, and the pool grows.

        Args:
            images: ``[m, C, H, W]``.
            labels: ``[m]`` int64.

        Returns:
            whether the slots have moved on.
        """
        moves = self.images is None or 2 * int((~self.classes[labels]).sum()) > len(labels)
        if moves:
            self.previous, self.current = self.current or self.previous, None
            self.images, self.labels = images, labels
        else:
            assert self.images is not None
            self.images, self.labels = torch.cat([self.images, images]), torch.cat([self.labels, labels])
        self.classes[labels] = True
        return moves

    def judge(
        self, tensors: Mapping[str, Tensor], accuracy_of: Callable[[Mapping[str, Tensor]], float], changed: bool = False
    ) -> None:
        """Keep a global model if it is no worse than the current slot's on the pool.

        Args:
            tensors: the model.
            accuracy_of: a model's accuracy on the pool.
            changed: whether the pool has grown, so that the current slot's accuracy is another now.
        """
        if self.images is None:
            return
        if self.current is not None and changed:
            self.current.accuracy = accuracy_of(self.current.tensors)
        found = accuracy_of(tensors)
        if self.current is None or found >= self.current.accuracy:
            self._version += 1
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            self.current = KeptModel(copies, self.classes.clone(), found, self._version)

    def old_model(self, signals: bool, classes: Tensor) -> KeptModel | None:
        """What a client distils from.

        The current slot's model if the client has just noticed new data, which that model does not know yet; else, and
        where the other clients were faster, so that it knows most of them, the previous slot's.

        Args:
            signals: whether the client has noticed new data in this round.
            classes: ``[O]`` bool, those of the client's present data.
        """
        current = self.current
        if signals and current is not None and 2 * int((classes & current.classes).sum()) <= int(classes.sum()):
            return current
        return self.previous

    def state_dict(self) -> dict[str, Any]:
        """Pool and slots."""
        slots = (self.current, self.previous)
        return {
            "images": self.images,
            "labels": self.labels,
            "classes": self.classes.clone(),
            "version": self._version,
            "slots": [None if slot is None else dict(vars(slot)) for slot in slots],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.images, self.labels, self.classes = state["images"], state["labels"], state["classes"].clone()
        self._version = state["version"]
        self.current, self.previous = (None if slot is None else KeptModel(**slot) for slot in state["slots"])
