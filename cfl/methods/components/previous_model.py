"""A model of the server's that clients need beside the current one, and who has been sent it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cfl.methods.context import Context


class PreviousModel:
    """The model of the task before, say: a client is sent it once, when it first needs it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.holders: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self.tensors)

    def keep(self, tensors: Mapping[str, Tensor], holders: Collection[int]) -> None:
        """Lend another model from now on.

        Args:
            tensors: name -> tensor; copied.
            holders: clients that have it anyway.
        """
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.holders = set(holders)

    def lend(self, context: Context, topic: str, clients: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Send it to those of these clients that have not got it; they count as having it from :meth:`note` on.

        Returns:
            Name -> tensor on the device.
        """
        late = [client for client in clients if client not in self.holders]
        context.channel.downlink(topic, self.tensors, len(late))
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.tensors

    def note(self, clients: Collection[int]) -> None:
        """These clients have it. Told when a round is over, to all processes alike."""
        self.holders.update(clients)
