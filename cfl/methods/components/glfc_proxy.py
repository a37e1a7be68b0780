"""The proxy server of GLFC: chooses the best old model, evaluated on images reconstructed from clients' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class KeptModel:
    """A stored global model.

    Attributes:
        tensors: name -> tensor, copies.
        classes: ``[O]`` bool, classes of which the server had images when the model was chosen.
        accuracy: in [0, 1], on the pool's images.
        version: unique number of the model, from 1.
    """

    tensors: dict[str, Tensor]
    classes: Tensor
    accuracy: float
    version: int


class ProxyServer:
    """A pool of images of the current task's classes, and two slots: the best models of this and of the previous task.

    Differs from the authors' code in three points. There, all images that clients send replace the pool and shift the
    slots, those of stragglers too. The best accuracy is never reset, so that a task whose images are harder to
    recognise gets no model. And a client with a signal distils the model of the current slot whenever there is one.

    Args:
        num_outputs: number of classes O.

    Attributes:
        images: ``[M, C, H, W]`` the pool, None before the first image.
        labels: ``[M]`` int64.
        current: the best model on the current pool, or None.
        previous: the best model on the previous pool, or None.
    """

    def __init__(self, num_outputs: int) -> None:
        self.images: Tensor | None = None
        self.labels = torch.zeros(0, dtype=torch.int64)
        self.current: KeptModel | None = None
        self.previous: KeptModel | None = None
        self.classes = torch.zeros(num_outputs, dtype=torch.bool)
        self._version = 0

    def receive(self, images: Tensor, labels: Tensor) -> bool:
        """Add images that were reconstructed from clients' gradients.

        If most of them are of classes that no client has sent before, a new task has begun: the slots are shifted, and
        the pool is replaced by these images. Otherwise they are from stragglers and are added to the pool.

        Args:
            images: ``[m, C, H, W]``.
            labels: ``[m]`` int64.

        Returns:
            whether the slots were shifted.
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
        """Store a global model if its accuracy on the pool is at least that of the current slot.

        Args:
            tensors: the model.
            accuracy_of: computes a model's accuracy on the pool.
            changed: whether the pool has grown, so that the current slot's accuracy has to be computed again.
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
        """The model that a client distils.

        For a client with a signal it is the current slot's model, unless the server already had images of most of the
        client's classes when that model was chosen. In this case, and without a signal, it is the previous slot's.

        Args:
            signals: whether the client has a signal in this round.
            classes: ``[O]`` bool, classes of the client's current data.
        """
        current = self.current
        if signals and current is not None and 2 * int((classes & current.classes).sum()) <= int(classes.sum()):
            return current
        return self.previous

    def state_dict(self) -> dict[str, Any]:
        """The pool and the slots, for checkpoints."""
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
