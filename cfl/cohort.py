"""K copies of one network trained side by side, stacked along a leading axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cfl.data.cohorts import CohortBatch
from cfl.models.batchnorm import batch_mask


class Cohort:
    """The clients being trained right now.

    Parameters are leaf tensors ``[k, ...]``, so that one elementwise optimizer trains every client by itself. The
    memory is allocated once for the greatest width and reused by every cohort.

    Args:
        network: the architecture; its own parameters are not touched.
        width: greatest number of clients.
        train_outputs: ``[T, O]`` bool, outputs in the loss of each task, or None for all.

    Attributes:
        clients: ids of the k clients, in the order of the leading axis.
        sizes: their numbers of training samples.
        task: the task they train.
        round: the round they train in.
        parameters: name -> ``[k, ...]`` leaf tensor.
        buffers: name -> ``[k, ...]``.
        received: name -> ``[...]``, the global parameters they started from.
        own: name -> ``[k, ...]``, what they started from instead where it is their own.
        used_outputs: ``[O]`` bool, outputs that had a part in the loss, or None for all.
    """

    def __init__(self, network: nn.Module, width: int, train_outputs: Tensor | None = None) -> None:
        self.network, self.width = network, width
        self._room = {n: p.detach().new_empty((width, *p.shape)) for n, p in network.named_parameters()}
        self._buffer_room = {n: b.detach().new_empty((width, *b.shape)) for n, b in network.named_buffers()}
        self._has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
        device = next(network.parameters()).device
        self._train_outputs = None if train_outputs is None else train_outputs.to(device)
        self.parameters = {n: nn.Parameter(room) for n, room in self._room.items()}
        self.buffers: dict[str, Tensor] = dict(self._buffer_room)
        self.received: Mapping[str, Tensor] = {}
        self.own: Mapping[str, Tensor] = {}
        self.clients: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.task = self.round = 0
        self.used_outputs: Tensor | None = None

    @torch.no_grad()
    def open(
        self,
        clients: Sequence[int],
        sizes: Sequence[int],
        task: int,
        round: int,
        shared: Mapping[str, Tensor],
        shared_buffers: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
    ) -> None:
        """Start ``k <= width`` clients.

        Args:
            clients: their ids.
            sizes: their numbers of training samples.
            task: the task they train.
            round: the round they train in.
            shared: parameter name -> ``[...]``, given to every client alike.
            shared_buffers: buffer name -> ``[...]``, given to every client alike.
            own: parameter or buffer name -> ``[k, ...]``, each client's own; wins over the shared ones.
        """
        k = len(clients)
        self.clients, self.sizes, self.task, self.round = tuple(clients), tuple(sizes), task, round
        self.received, self.own = shared, own
        for name, parameter in self.parameters.items():
            parameter.data = self._room[name][:k]
            parameter.grad = None
            parameter.copy_(own[name] if name in own else shared[name].expand_as(parameter))
        for name, room in self._buffer_room.items():
            self.buffers[name] = room[:k]
            self.buffers[name].copy_(own[name] if name in own else shared_buffers[name].expand_as(room[:k]))
        self.used_outputs = None if self._train_outputs is None else self._train_outputs[task].clone()

    @property
    def plain(self) -> bool:
        """Whether one client is alone, which takes the ordinary path without vmap."""
        return len(self.clients) == 1

    def losses(self, batch: CohortBatch) -> Tensor:
        """Mean cross-entropy of each client on its unmasked samples, ``[k]``; 0 for a client that has finished."""
        x, y = cast(Tensor, batch.x), cast(Tensor, batch.y)
        outputs = None if self._train_outputs is None else self._train_outputs[batch.task]
        if self.plain:
            mask = batch.mask[0] if batch.padded else None
            parameters = {n: p.view(p.shape[1:]) for n, p in self.parameters.items()}
            buffers = {n: b[0] for n, b in self.buffers.items()}
            return self._loss(parameters, buffers, x[0], y[0], mask, outputs).view(1)
        mapped = vmap(
            self._loss,
            in_dims=(0, 0, 0, 0, 0 if batch.padded else None, None),
            randomness="different",
        )
        return mapped(self.parameters, self.buffers, x, y, batch.mask if batch.padded else None, outputs)

    def _loss(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
    ) -> Tensor:
        state = {**parameters, **buffers}
        if mask is not None and self._has_batchnorm:
            with batch_mask(self.network, mask):
                logits = functional_call(self.network, state, (x,))
        else:
            logits = functional_call(self.network, state, (x,))
        if outputs is not None:
            logits = logits.masked_fill(~outputs, -torch.inf)
        if mask is None:
            return F.cross_entropy(logits, y)
        losses = F.cross_entropy(logits, y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    def rows(self, positions: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The given clients' rows of stacked tensors: a view when that is all of them, else a copy."""
        if len(positions) == len(self.clients):
            return {n: t.detach() for n, t in tensors.items()}
        index = torch.tensor(positions, device=next(iter(self.parameters.values())).device)
        return {n: t.detach().index_select(0, index) for n, t in tensors.items()}

    def put_back_unused_outputs(self, positions: Sequence[int], trained: Mapping[str, Tensor]) -> None:
        """Undo what weight decay or momentum did to outputs that had no part in the loss.

        Args:
            positions: the clients whose tensors these are.
            trained: as :meth:`rows` gives them; the output layer's (``head.*``) are changed in place.
        """
        if self.used_outputs is None:
            return
        unused = ~self.used_outputs
        for name, values in trained.items():
            if name.startswith("head.") and values.ndim > 1 and values.shape[1] == len(unused):
                if name in self.own:
                    values[:, unused] = self.rows(positions, {name: self.own[name]})[name][:, unused]
                else:
                    values[:, unused] = self.received[name][unused]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Name -> ``[k, ...]`` gradients of the current step; methods change them in place."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
