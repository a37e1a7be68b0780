"""Global principal subspace extraction (Bakman et al., ICLR 2024, section 4.1.2): the clients' part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.task_handles import TaskRef
from cfl.methods.components.client_model import client_model, evaluating
from cfl.methods.components.layer_inputs.before_dropout import watch_before_dropout
from cfl.methods.components.layer_inputs.gpse_message import GpseMessage, LayerOfClient
from cfl.methods.components.layer_inputs.hooks import inputs_watched
from cfl.methods.components.layer_inputs.rows import layer_dim, layer_inputs
from cfl.methods.components.layer_inputs.workers_in_step import stream_of
from cfl.methods.context import Context
from cfl.models.copies import networks_for_threads
from cfl.models.dropout import DropoutMasks
from cfl.models.evaluation import evaluation_mode
from cfl.randomness.generators import seed_for
from cfl.runtime.ordered_threads import in_order


class SubspaceExtraction:
    """Lets clients collect the inputs of every protected layer, and yields their messages about these inputs.

    Args:
        context: context of the method whose clients send.
        layers: name -> protected layer of the network.
        with_bias: layer -> whether its bias counts as the weight of an input that is always 1.
        message: what is sent of a layer's inputs.
        batch_size: samples per forward pass; with dropout each is computed twice.
        dropout: whether dropout stays active, except the one directly in front of each layer
            (:func:`cfl.methods.components.layer_inputs.before_dropout.watch_before_dropout`).
        mask_sharing: worker processes, at least 1, of which those with equally many clients draw the same masks
            (:func:`cfl.methods.components.layer_inputs.workers_in_step.stream_of`).

    Attributes:
        dims: layer -> d, including the 1 of the bias if it counts.
    """

    def __init__(
        self,
        context: Context,
        layers: Mapping[str, nn.Module],
        with_bias: Mapping[str, bool],
        message: GpseMessage,
        batch_size: int,
        dropout: bool,
        mask_sharing: int,
    ) -> None:
        self.context, self.message, self.batch_size = context, message, batch_size
        self.dims = {n: layer_dim(m, with_bias[n]) for n, m in layers.items()}
        self._names, self._with_bias = tuple(layers), dict(with_bias)
        self._dropout = DropoutMasks(context.network, context.input_shape) if dropout else None
        self._mask_sharing = mask_sharing
        self._positions = inputs_per_sample(context.network, layers, context.input_shape)

    def messages(
        self,
        task: TaskRef,
        moment: int,
        sizes: Mapping[int, int],
        senders: Sequence[int],
        bases: Mapping[str, Tensor],
        local: Iterable[dict[str, Tensor]] | None = None,
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Compute the messages of some of the ``senders``; yields client and message in the given order.

        On a CPU, as many clients compute at a time as there are math threads. Each uses one thread and its own copy of
        the network.

        Args:
            task: the task whose samples are used.
            moment: keys random draws: the task's number, or a round.
            sizes: the k clients that this process computes -> numbers of their samples.
            senders: all clients of the extraction, ascending.
            bases: layer -> ``[d, r]`` basis of earlier tasks; missing for a layer without a basis.
            local: the clients' own models; None takes the model with which they are evaluated.
        """
        context = self.context
        network = context.network

        def jobs() -> Iterator[tuple[int, dict[str, Tensor]]]:
            if local is not None:
                shared = context.state_tensors()
                yield from zip(sizes, ({**shared, **own} for own in local), strict=True)
                return
            for client in sizes:
                yield client, client_model(context, client)

        def compute(network: nn.Module, job: tuple[int, dict[str, Tensor]]) -> dict[str, Tensor]:
            return self._message(network, task, moment, *job, sizes[job[0]], senders, bases)

        # Local models of clients that have just trained have their own running statistics.
        with evaluating(context) if local is None else evaluation_mode(network):
            networks = networks_for_threads(network, len(sizes))
            yield from zip(sizes, in_order(compute, jobs(), networks), strict=True)

    @torch.no_grad()
    def _message(
        self,
        network: nn.Module,
        task: TaskRef,
        moment: int,
        client: int,
        model: dict[str, Tensor],
        samples: int,
        senders: Sequence[int],
        bases: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """One client's message about the layer inputs of ``network`` with the tensors of ``model``."""
        context = self.context
        device = next(network.parameters()).device
        layers = {name: network.get_submodule(name) for name in self._names}
        parts = {
            name: LayerOfClient(
                name=name,
                number=number,
                d=self.dims[name],
                with_bias=self._with_bias[name],
                positions=self._positions[name],
                basis=bases.get(name),
                seed=context.seed,
                moment=moment,
                client=client,
                samples=samples,
                position=senders.index(client),
                clients=len(senders),
            )
            for number, name in enumerate(layers)
        }
        collectors = {name: self.message.collector(layer, parts[name]) for name, layer in layers.items()}
        hooks = {layer: collectors[name].add for name, layer in layers.items()}
        for batch, (x, _) in enumerate(context.client_batches(task, client, self.batch_size, device)):
            if self._dropout:
                key = seed_for(context.seed, *self._masks_of(client, senders, moment), batch)
                watch_before_dropout(network, model, x, self._dropout.draw_for_one(key, len(x), x), hooks)
            else:
                with inputs_watched(hooks):
                    functional_call(network, model, (x,))
        payload: dict[str, Tensor] = {}
        for name, part in parts.items():
            payload |= self.message.sent(collectors.pop(name), part)
        return payload

    def _masks_of(self, client: int, senders: Sequence[int], moment: int) -> tuple[str, int, int]:
        """Purpose and indices of the draws of a client's dropout masks."""
        if self._mask_sharing > 1:
            return "shared gpse dropout", moment, stream_of(senders.index(client), len(senders), self._mask_sharing)
        return "gpse dropout", moment, client


@torch.no_grad()
def inputs_per_sample(
    network: nn.Module, layers: Mapping[str, nn.Module], input_shape: Sequence[int]
) -> dict[str, int]:
    """Uses of each layer's weight for one sample: 1, or a convolution's output positions; 0 for an unused layer."""
    found = dict.fromkeys(layers, 0)
    some = next(network.parameters())

    def count(name: str) -> Callable[[nn.Module, Tensor], None]:
        def add(layer: nn.Module, x: Tensor) -> None:
            found[name] += sum(len(rows) for rows in layer_inputs(layer, x)) // 2

        return add

    with evaluation_mode(network), inputs_watched({layer: count(name) for name, layer in layers.items()}):
        network(torch.zeros(2, *input_shape, dtype=some.dtype, device=some.device))
    return found
