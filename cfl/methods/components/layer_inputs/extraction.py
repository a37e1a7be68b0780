"""Global principal subspace extraction (Bakman et al., ICLR 2024, section 4.2): the clients' part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.before_dropout import watch_before_dropout
from cfl.methods.components.layer_inputs.of_clients import (
    client_model,
    evaluating,
    inputs_watched,
)
from cfl.methods.components.layer_inputs.sketch import LayerSketch
from cfl.methods.components.layer_inputs.workers_in_step import stream_of
from cfl.methods.components.subspace import layer_dim, layer_inputs, residual_share
from cfl.methods.context import Context
from cfl.models.copies import networks_for_threads
from cfl.models.dropout import DropoutMasks
from cfl.models.evaluation import evaluation_mode
from cfl.randomness.generators import seed_for, torch_generator
from cfl.runtime.ordered_threads import in_order


class SubspaceExtraction:
    """Clients' sketches ``A_i = (X_i - O O^T X_i) G_i`` of every protected layer (eq 8, 9), and two scalars each.

    Args:
        context: context of the method whose clients send.
        layers: name -> protected layer of the network.
        with_bias: layer -> whether its bias counts as the weight of an input that is always 1.
        multiples: ``conv`` and ``linear`` -> columns of a sketch as a multiple of the layer's input dimension d.
        batch_size: samples per forward pass; with dropout each is computed twice.
        dropout: whether dropout stays active, but for the one directly in front of each layer
            (:func:`cfl.methods.components.layer_inputs.before_dropout.watch_before_dropout`); ``shared``: with the same
            masks for clients that draw the same Gaussian numbers.
        sharing: worker processes, at least 1, of which those with equally many clients draw the same Gaussian numbers
            (:func:`cfl.methods.components.layer_inputs.workers_in_step.stream_of`).
        scalars: ``energy``: summed squares of the inputs and of their part outside the basis; ``client_mean``: number
            of samples, and that number times the client's own share outside.
        mechanism: noise on the sketches, or None.

    Attributes:
        dims: layer -> d, including the 1 of the bias if it counts.
    """

    def __init__(
        self,
        context: Context,
        layers: Mapping[str, nn.Module],
        with_bias: Mapping[str, bool],
        multiples: Mapping[str, float],
        batch_size: int,
        dropout: bool | Literal["shared"],
        sharing: int,
        scalars: Literal["energy", "client_mean"],
        mechanism: GaussianMechanism | None,
    ) -> None:
        self.context, self.batch_size = context, batch_size
        self.sharing, self.scalars, self.mechanism = sharing, scalars, mechanism
        self.dims = {n: layer_dim(m, with_bias[n]) for n, m in layers.items()}
        self._names, self._with_bias = tuple(layers), dict(with_bias)
        kinds = {n: "conv" if isinstance(m, nn.Conv2d) else "linear" for n, m in layers.items()}
        self._columns = {n: max(1, math.ceil(multiples[kinds[n]] * d)) for n, d in self.dims.items()}
        shape = context.input_shape
        self._dropout = DropoutMasks(context.network, shape) if dropout else None
        self._shared_masks = dropout == "shared"
        self._positions = inputs_per_sample(context.network, layers, shape)

    def messages(
        self,
        task: int,
        clients: Sequence[int],
        senders: Sequence[int],
        bases: Mapping[str, Tensor],
        local: Iterable[dict[str, Tensor]] | None = None,
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Compute the messages of some of the ``senders``; yields client and message in the given order.

        A message holds for every layer a sketch ``[1, d, s]`` under its name and the scalars ``[1, 2]`` (float64) under
        ``<name> energies``. On a CPU, as many clients at a time as there are math threads
        compute, each with one of them and with a copy of the network to watch.

        Args:
            task: the task whose samples are used.
            clients: the k clients that this process computes.
            senders: all clients of the extraction, ascending.
            bases: layer -> ``[d, r]`` basis of earlier tasks; none where missing.
            local: the clients' own models; None takes the model with which they are evaluated.
        """
        context = self.context
        network = context.network

        def jobs() -> Iterator[tuple[int, dict[str, Tensor]]]:
            if local is not None:
                shared = context.state_tensors()
                yield from zip(clients, ({**shared, **own} for own in local), strict=True)
                return
            for client in clients:
                yield client, client_model(context, task, client)

        def compute(network: nn.Module, job: tuple[int, dict[str, Tensor]]) -> dict[str, Tensor]:
            return self._message(network, task, *job, senders, bases)

        # Clients that have just trained have statistics of their own.
        with evaluating(context) if local is None else evaluation_mode(network):
            networks = networks_for_threads(network, len(clients))
            yield from zip(clients, in_order(compute, jobs(), networks), strict=True)

    @torch.no_grad()
    def _message(
        self,
        network: nn.Module,
        task: int,
        client: int,
        model: dict[str, Tensor],
        senders: Sequence[int],
        bases: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """One client's message: sketches of the layer inputs of ``network`` with the tensors of ``model``.

        Model and bases are in the task's order of features, the message is in the server's.
        """
        context = self.context
        device = next(network.parameters()).device
        samples = len(context.indices(task, client))
        layers = {name: network.get_submodule(name) for name in self._names}
        sketches = {
            name: LayerSketch(
                layer,
                self._with_bias[name],
                self._columns[name],
                bases.get(name),
                self._generator(task, client, senders, number),
                samples * self._positions[name],
                self.sharing > 1,
            )
            for number, (name, layer) in enumerate(layers.items())
        }
        hooks = {layer: sketches[name].add for name, layer in layers.items()}
        for batch, (x, _) in enumerate(context.client_batches(task, client, self.batch_size, device)):
            if self._dropout:
                key = seed_for(context.seed, *self._masks_of(client, senders, task), batch)
                drawn = self._dropout.draw(torch.tensor([key], device=device), len(x), x.dtype)
                watch_before_dropout(network, model, x, {name: mask[0] for name, mask in drawn.items()}, hooks)
            else:
                with inputs_watched(hooks):
                    functional_call(network, model, (x,))
        payload: dict[str, Tensor] = {}
        for number, name in enumerate(layers):
            a, *both = sketches.pop(name).finish()
            if self.mechanism is not None:
                noise = torch_generator(context.seed, "sketch noise", task, client, number)
                a = self.mechanism.privatise(a, noise, len(senders))
            payload[name] = a[None]
            energies = torch.stack(both)
            if self.scalars == "client_mean":
                share = residual_share(energies[0], energies[1])
                energies = energies.new_tensor([samples, samples * share])
            payload[f"{name} energies"] = energies[None]
        return payload

    def _masks_of(self, client: int, senders: Sequence[int], task: int) -> tuple[str, int, int]:
        """Purpose and indices of the draws of a client's dropout masks."""
        if self._shared_masks:
            return "shared gpse dropout", task, stream_of(senders.index(client), len(senders), self.sharing)
        return "gpse dropout", task, client

    def _generator(self, task: int, client: int, senders: Sequence[int], number: int) -> torch.Generator:
        """The generator of a client's Gaussian numbers for a layer."""
        seed = self.context.seed
        if self.sharing == 1:
            return torch_generator(seed, "sketch", task, client, number)
        stream = stream_of(senders.index(client), len(senders), self.sharing)
        return torch_generator(seed, "shared sketch", task, stream, number)


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
