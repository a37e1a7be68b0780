"""A model of the server's that clients need beside the current one, and who has been sent it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cfl.federation.federation import Federation


class LentModel:
    """The model of the task before, say: a client is sent it once, when it first needs it."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._holders: set[int] = set()

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
        self._holders = set(holders)

    def lend(
        self, federation: Federation, topic: str, clients: Sequence[int], device: torch.device
    ) -> dict[str, Tensor]:
        """Send it to those of these clients that have not got it; they count as having it from :meth:`note` on.

        Returns:
            Name -> tensor on the device.
        """
        late = [client for client in clients if client not in self._holders]
        federation.channel.downlink(topic, self.tensors, len(late))
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self.tensors

    def note(self, clients: Collection[int]) -> None:
        """These clients have it. Told when a round is over, to all processes alike."""
        self._holders.update(clients)

    def state_dict(self) -> dict[str, Any]:
        """The model, and who has it."""
        return {"old": dict(self.tensors), "received": sorted(self._holders)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.tensors, self._holders = dict(state["old"]), set(state["received"])
