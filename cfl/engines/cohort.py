"""K copies of one network trained side by side, stacked along a leading axis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cfl.data.scenarios import OutputMap
from cfl.data.task_handles import TaskHandles, unwrap_tasks

if TYPE_CHECKING:
    from cfl.data.cohorts import CohortBatch

Turn = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def _no_engine(batch: CohortBatch, purpose: str) -> dict[str, Tensor]:
    raise RuntimeError("a cohort that no engine trains")


class Cohort:
    """The clients being trained right now.

    Parameters are leaf tensors ``[k, ...]``, so that one elementwise optimizer trains every client independently. The
    memory is allocated once for the greatest width and reused whenever :meth:`open` starts other clients.

    Args:
        network: the architecture; its own parameters are not touched.
        width: greatest number of clients.
        outputs: says which outputs are in the loss; None: all.
        channels_last: hold every client's convolution weights ``[O, C, h, w]`` with the channels last in memory.

    Attributes:
        clients: ids of the k clients, in the order of the leading axis.
        sizes: their numbers of training samples.
        task: the task they train.
        round: the round they train in.
        parameters: name -> ``[k, ...]`` leaf tensor.
        data: name -> ``[width, ...]``, the memory of :attr:`parameters`, of which the first k rows are in use.
        buffers: name -> ``[k, ...]``.
        global_parameters: name -> ``[...]``, the parameters that the clients received.
        own: name -> ``[k, ...]``, each client's own tensors, from which it started instead of the global ones.
        to_server: puts tensors of these clients into the server's order, see :meth:`turn`.
        train_outputs: ``[T, O]`` bool, outputs in the loss of each task's samples in these clients' steps, or None for
            all.
        used_outputs: ``[k, O]`` bool, outputs that had a part in each client's loss, or None for all.
        lr: the optimizer's learning rate.
        gradients_on: function for methods of another batch of the same clients and a name for its dropout masks. It
            returns the gradients of the clients' mean cross-entropies on this batch at their present weights: name ->
            ``[k, ...]``, valid until the next call. It changes nothing, not even BatchNorm's running statistics. It may
            be called from the cohort's first step on: which parameters are frozen is not known before.
        withheld: rows of the clients that do not train on their own samples, see :meth:`withhold`.
        steps: local steps since the cohort opened, with the present one; when a client closes, the number of its steps.
    """

    def __init__(
        self, network: nn.Module, width: int, outputs: OutputMap | None = None, channels_last: bool = False
    ) -> None:
        self.network, self.width = network, width
        self.data = {n: _room(p.detach(), width, channels_last) for n, p in network.named_parameters()}
        self._buffer_room = {n: b.detach().new_empty((width, *b.shape)) for n, b in network.named_buffers()}
        device = next(network.parameters()).device
        self._outputs = None if outputs is None or outputs.train is None else outputs.to(device)
        self.train_outputs: Tensor | None = None
        self.parameters = {n: nn.Parameter(room) for n, room in self.data.items()}
        self._trained = tuple(self.parameters.items())
        self.buffers: dict[str, Tensor] = dict(self._buffer_room)
        self.global_parameters: Mapping[str, Tensor] = {}
        self.own: Mapping[str, Tensor] = {}
        self.clients: tuple[int, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.task = self.round = self.steps = 0
        self.withheld: frozenset[int] = frozenset()
        self.lr = 0.0
        self.gradients_on: Callable[[CohortBatch, str], dict[str, Tensor]] = _no_engine
        self.used_outputs: Tensor | None = None
        self.to_server: Turn = dict

    @torch.no_grad()
    def open(
        self,
        clients: Sequence[int],
        sizes: Sequence[int],
        task: int,
        round: int,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        mixed: bool = False,
    ) -> None:
        """Start ``k <= width`` clients.

        Args:
            clients: their ids.
            sizes: their numbers of training samples.
            task: the task they train.
            round: the round they train in.
            shared: parameter or buffer name -> ``[...]``, given to every client alike.
            own: parameter or buffer name -> ``[k, ...]``, each client's own, used instead of the shared one.
            mixed: whether samples may be of other tasks; :meth:`use_outputs` must then be called for all samples.
        """
        k = len(clients)
        self.clients, self.sizes, self.task, self.round = tuple(clients), tuple(sizes), task, round
        self.global_parameters = {name: shared[name] for name in self.parameters}
        self.own, self.to_server = own, dict
        self.withheld = frozenset()
        self.steps = 0
        for name, parameter in self.parameters.items():
            parameter.data = self.data[name][:k]
            parameter.grad = None
        for name, room in self._buffer_room.items():
            self.buffers[name] = room[:k]
        for name, held in {**self.parameters, **self.buffers}.items():
            held.copy_(own[name] if name in own else shared[name].expand_as(held))
        self.used_outputs = None
        self.train_outputs = None if self._outputs is None else self._outputs.in_loss_during(task)
        if self.train_outputs is not None:
            of_task = self.train_outputs[task].expand(k, -1)
            self.used_outputs = torch.zeros_like(of_task) if mixed else of_task.clone()

    @torch.no_grad()
    def turn(self, there: Turn, back: Turn) -> None:
        """Let clients that have just started compute with their features in another order than the server's.

        Args:
            there: function that puts tensors, name -> ``[..., *shape]``, into the clients' order.
            back: the inverse of ``there``.
        """
        self.global_parameters, self.own, self.to_server = there(self.global_parameters), there(self.own), back
        held = {**self.parameters, **self.buffers}
        for name, turned in there(held).items():
            if turned is not held[name]:
                held[name].copy_(turned)

    @torch.no_grad()
    def begin_with(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Let a client start its local work from these tensors, as if they were what it has kept.

        Args:
            position: the client's place in the cohort.
            tensors: name of a parameter or buffer -> ``[*shape]``.
        """
        for name, value in tensors.items():
            for held in (self.parameters, self.buffers, self.own):
                if name in held:
                    held[name][position] = value.to(held[name].device)

    def use_outputs(self, tasks: Tensor | TaskHandles, mask: Tensor) -> None:
        """Note that samples of other tasks have a part in the loss.

        Args:
            tasks: ``[k, M]`` int64, or handles of tasks.
            mask: ``[k, M]`` bool, False where there is no sample.
        """
        if self.train_outputs is not None and self.used_outputs is not None:
            self.used_outputs |= (self.train_outputs[unwrap_tasks(tasks)] & mask.unsqueeze(-1)).any(1)

    def withhold(self, rows: Collection[int]) -> None:
        """Note that these clients do not train on their own samples, so that memories store none of these samples."""
        self.withheld |= frozenset(rows)

    def trained_on(self, mask: Tensor) -> Tensor:
        """``[k, B]`` bool, the samples in ``mask`` ``[k, B]`` that their clients train on: none of withheld clients."""
        if not self.withheld:
            return mask
        kept = mask.clone()
        kept[sorted(self.withheld)] = False
        return kept

    def outputs_in_loss(self, task: int) -> Tensor | None:
        """``[O]`` bool, outputs in the loss of a task's samples in these clients' steps, or None for all."""
        return None if self.train_outputs is None else self.train_outputs[task]

    def rows(self, positions: Sequence[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The given clients' rows of stacked tensors: a view when that is all of them, else a copy."""
        if len(positions) == len(self.clients):
            return {n: t.detach() for n, t in tensors.items()}
        index = torch.tensor(positions, device=next(iter(self.parameters.values())).device)
        return {n: t.detach().index_select(0, index) for n, t in tensors.items()}

    @torch.no_grad()
    def put_back_unused_outputs(self, positions: Sequence[int]) -> None:
        """Undo what weight decay or momentum did to these clients' outputs that had no part in the loss.

        Buffers stay: no optimizer changes them, and forward passes compute all outputs.
        """
        if self.used_outputs is None:
            return
        index = torch.tensor(positions, device=next(iter(self.parameters.values())).device)
        for name, tensor in self.parameters.items():
            used = self.used_rows(name, positions)
            if used is not None:
                start = self.own[name][index] if name in self.own else self.global_parameters[name]
                tensor[index] = torch.where(used, tensor[index], start)

    def used_rows(self, name: str, positions: Sequence[int] | None = None) -> Tensor | None:
        """Which rows of a parameter or buffer belong to outputs that have had a part in each client's loss so far.

        Args:
            name: of the tensor.
            positions: the clients; all if not given.

        Returns:
            ``[k, O, 1, ...]`` bool for a tensor of the output layer (``head.*``), None for others, and where all
            outputs have had a part.
        """
        shape = (self.data[name] if name in self.data else self._buffer_room[name]).shape
        used = self.used_outputs
        if used is None or not name.startswith("head.") or len(shape) < 2 or shape[1] != used.shape[1]:
            return None
        if positions is not None:
            (used,) = self.rows(positions, {"used": used}).values()
        return used.view(*used.shape, *[1] * (len(shape) - 2))

    @property
    def replaced(self) -> str | None:
        """Name of a parameter in place of which :attr:`parameters` has a tensor that the optimizer does not see."""
        return next((name for name, parameter in self._trained if self.parameters.get(name) is not parameter), None)

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Name -> ``[k, ...]`` gradients of the current step; methods change them in place. The mapping is read-only,
        because the optimizer would not see a replaced tensor."""
        return MappingProxyType({n: p.grad for n, p in self.parameters.items() if p.grad is not None})


def _room(parameter: Tensor, width: int, channels_last: bool) -> Tensor:
    """Memory for ``width`` copies of a parameter, ``[width, ...]``."""
    if not channels_last or parameter.ndim != 4:
        return parameter.new_empty((width, *parameter.shape))
    outputs, inputs, height, breadth = parameter.shape
    return parameter.new_empty((width, outputs, height, breadth, inputs)).permute(0, 1, 4, 2, 3)
