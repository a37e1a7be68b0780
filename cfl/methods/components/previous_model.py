"""An earlier global model that clients need beside the current one, and the clients that have received it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from cfl.methods.context import Context


class PreviousModel:
    """An earlier global model or a part of it, such as the previous task's. A client receives it once, when it first
    needs it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.holders: set[int] = set()

    def __bool__(self) -> bool:
        """Whether a model is kept."""
        return bool(self.tensors)

    def keep(self, tensors: Mapping[str, Tensor], holders: Collection[int]) -> None:
        """Replace the model.

        Args:
            tensors: name -> tensor; copied.
            holders: clients that have it already.
        """
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.holders = set(holders)

    def lend(self, context: Context, topic: str, clients: Sequence[int]) -> dict[str, Tensor]:
        """Send the model to those of these clients that do not have it. Call :meth:`note` later to record them.

        Returns:
            Name -> tensor on the network's device.
        """
        late = [client for client in clients if client not in self.holders]
        context.channel.downlink(topic, self.tensors, len(late))
        self.tensors = {name: tensor.to(context.device) for name, tensor in self.tensors.items()}
        return self.tensors

    def note(self, clients: Collection[int]) -> None:
        """Record that these clients have the model. Called after a round, with the same clients in all processes."""
        self.holders.update(clients)
