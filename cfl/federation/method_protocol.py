"""The interface through which the federation uses the methods of a run.

:class:`cfl.methods.composition.Composition`, in the package above, implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.metrics.accuracy import AccuracyMatrix


class MethodComposition(Mapping[str, Any], ABC):
    """The methods of a run by name, with functions that call all of them.

    Methods and the federation are typed ``Any``, because importing their classes here would be circular.
    """

    @abstractmethod
    def with_capability(self, capability: Any) -> dict[str, Any]:
        """The methods that have a capability, by name."""

    @property
    @abstractmethod
    def replays(self) -> bool:
        """Whether clients need replay buffers."""

    @property
    @abstractmethod
    def replays_logits(self) -> bool:
        """Whether buffers store the samples' logits."""

    @property
    @abstractmethod
    def tells_tasks_apart(self) -> bool:
        """Whether a client may use another model for each task."""

    @property
    @abstractmethod
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging."""

    @abstractmethod
    def check(self, data: FederatedDataModule) -> None:
        """Refuse methods that cannot work with these data."""

    @abstractmethod
    def setup(self, federation: Any) -> None:
        """Give every method a context made of the federation."""

    @abstractmethod
    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client."""

    @abstractmethod
    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that is tested on a task."""

    @abstractmethod
    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that a client uses for one of its tasks."""

    @abstractmethod
    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores that replace the network's logits, or None."""

    @property
    @abstractmethod
    def identified(self) -> list[AccuracyMatrix]:
        """Matrices of the share of test samples whose task a method finds."""

    @abstractmethod
    def client_storage(self) -> int:
        """Bytes that a client stores for the methods between rounds."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state of all methods."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
