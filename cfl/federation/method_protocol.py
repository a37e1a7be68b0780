"""What the federation relies on in the methods of a run.

The methods, and how several act as one, are in the room above: :class:`cfl.methods.composition.Composition`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cfl.data.datamodule import FederatedDataModule


class MethodComposition(Mapping[str, Any], ABC):
    """Methods by name, and as the federation asks them, all together.

    A method, and the federation, are ``Any``, because they are of rooms above or import this module.
    """

    @abstractmethod
    def with_capability(self, capability: Any) -> dict[str, Any]:
        """Name -> method of those that have a capability."""

    @property
    @abstractmethod
    def replays(self) -> bool:
        """Whether clients need buffers."""

    @property
    @abstractmethod
    def replays_logits(self) -> bool:
        """Whether buffers have to keep logits with the samples."""

    @property
    @abstractmethod
    def tells_tasks_apart(self) -> bool:
        """Whether a client may answer one task otherwise than another."""

    @property
    @abstractmethod
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging."""

    @abstractmethod
    def check(self, data: FederatedDataModule) -> None:
        """Refuse what the data leave nothing to stand on."""

    @abstractmethod
    def setup(self, federation: Any) -> None:
        """Give every method a context made of the federation."""

    @abstractmethod
    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client."""

    @abstractmethod
    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which images of a task are tested."""

    @abstractmethod
    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which a client answers one of its tasks."""

    @abstractmethod
    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores in the place of the network's logits, or None."""

    @abstractmethod
    def client_storage(self) -> int:
        """Bytes that a client has to keep for the methods between rounds."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
