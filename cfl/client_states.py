"""What clients keep between rounds: gathered into a cohort when it opens, scattered back when clients close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class ClientStates:
    """Named tensors per client, held for the clients that have any.

    A topic (``model``, say) has one tensor dictionary per client; a client without one gets the default.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[int, dict[str, Tensor]]] = {}

    def gather(self, topic: str, clients: Sequence[int], default: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stack the clients' tensors.

        Args:
            topic: what is kept.
            clients: the k ids.
            default: name -> tensor for clients that have nothing yet.

        Returns:
            name -> ``[k, ...]``, new memory.
        """
        held = self._topics.get(topic, {})
        return {
            name: torch.stack([held.get(client, default)[name].to(tensor.device) for client in clients])
            for name, tensor in default.items()
        }

    def scatter(
        self,
        topic: str,
        clients: Sequence[int],
        stacked: Mapping[str, Tensor],
        keep: Sequence[bool] | None = None,
    ) -> None:
        """Keep row j of ``stacked`` (name -> ``[k, ...]``) for client ``clients[j]``, as a copy.

        With ``keep``, clients whose entry is False stay as they were.
        """
        held = self._topics.setdefault(topic, {})
        for row, client in enumerate(clients):
            if keep is not None and not keep[row]:
                continue
            held[client] = {name: values[row].detach().clone() for name, values in stacked.items()}

    def get(self, topic: str, client: int) -> dict[str, Tensor] | None:
        """One client's tensors, or None if it has none."""
        return self._topics.get(topic, {}).get(client)

    def bytes(self) -> int:
        """Memory of everything held."""
        return sum(
            tensor.numel() * tensor.element_size()
            for clients in self._topics.values()
            for state in clients.values()
            for tensor in state.values()
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything held (not copied)."""
        return {topic: dict(clients) for topic, clients in self._topics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._topics = {topic: dict(clients) for topic, clients in state.items()}
