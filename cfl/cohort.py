"""K copies of one network trained side by side, stacked along a leading axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Cohort:
    """The clients being trained right now.

    Parameters are leaf tensors ``[k, ...]``, so that one elementwise optimizer trains every client by itself. The
    memory is allocated once for the greatest width and reused by every cohort.

    Args:
        network: the architecture; its own parameters are not touched.
        width: greatest number of clients.
        train_outputs: ``[T, O]`` bool, outputs in the loss of each task, or None for all.
        channels_last: hold every client's convolution weights ``[O, C, h, w]`` with the channels last in memory.

    Attributes:
        clients: ids of the k clients, in the order of the leading axis.
        sizes: their numbers of training samples.
        task: the task they train.
        round: the round they train in.
        parameters: name -> ``[k, ...]`` leaf tensor.
        buffers: name -> ``[k, ...]``.
        received: name -> ``[...]``, the global parameters they started from.
        own: name -> ``[k, ...]``, what they started from instead where it is their own.
        used_outputs: ``[k, O]`` bool, outputs that had a part in each client's loss, or None for all.
    """

    def __init__(
        self, network: nn.Module, width: int, train_outputs: Tensor | None = None, channels_last: bool = False
    ) -> None:
        self.network, self.width = network, width
        self._room = {n: _room(p.detach(), width, channels_last) for n, p in network.named_parameters()}
        self._buffer_room = {n: b.detach().new_empty((width, *b.shape)) for n, b in network.named_buffers()}
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
        self.used_outputs = None
        if self._train_outputs is not None:
            self.used_outputs = self._train_outputs[task].expand(k, -1).clone()

    @property
    def train_outputs(self) -> Tensor | None:
        """``[T, O]`` bool, outputs in the training loss of each task, or None for all."""
        return self._train_outputs

    def use_outputs(self, tasks: Tensor, mask: Tensor) -> None:
        """Note that samples of other tasks have a part in the loss.

        Args:
            tasks: ``[k, M]`` int64.
            mask: ``[k, M]`` bool, False where there is no sample.
        """
        if self._train_outputs is not None and self.used_outputs is not None:
            self.used_outputs |= (self._train_outputs[tasks] & mask.unsqueeze(-1)).any(1)

    @property
    def data(self) -> dict[str, Tensor]:
        """Name -> ``[width, ...]``, the memory of :attr:`parameters`, of which the first k rows are in use."""
        return self._room

    def outputs_in_loss(self, task: int) -> Tensor | None:
        """``[O]`` bool, outputs in the training loss of a task, or None for all."""
        return None if self._train_outputs is None else self._train_outputs[task]

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
        (used,) = self.rows(positions, {"used": self.used_outputs}).values()
        for name, values in trained.items():
            if name.startswith("head.") and values.ndim > 1 and values.shape[1] == used.shape[1]:
                own = name in self.own
                start = self.rows(positions, {name: self.own[name]})[name] if own else self.received[name]
                keep = used.view(*used.shape, *[1] * (values.ndim - 2))
                values.copy_(torch.where(keep, values, start))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Name -> ``[k, ...]`` gradients of the current step; methods change them in place."""
        return {n: p.grad for n, p in self.parameters.items() if p.grad is not None}


def _room(parameter: Tensor, width: int, channels_last: bool) -> Tensor:
    """Memory for ``width`` copies of a parameter, ``[width, ...]``."""
    if not channels_last or parameter.ndim != 4:
        return parameter.new_empty((width, *parameter.shape))
    outputs, inputs, height, breadth = parameter.shape
    return parameter.new_empty((width, outputs, height, breadth, inputs)).permute(0, 1, 4, 2, 3)
