"""The model of a run: which of its tensors clients and server exchange, and which stay on their client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor, nn

from cfl.engines.cohort import Cohort
from cfl.federation.client_states import ClientStates
from cfl.runtime.errors import ConfigError

MODEL_TOPIC = "model"
"""Topic of the clients' personal parameters and buffers."""


class FederatedModel:
    """A network whose tensors are exchanged, kept by each client, or frozen.

    Args:
        network: the global model; its parameters and buffers are the server's.
        keeps_local: whether a parameter or buffer stays on its client.
        batchnorm: what happens to BatchNorm's running statistics after local training. ``average``: they are averaged
            like weights. ``local``: every client keeps its own and never sends them. ``drop``: they are discarded.
            A global model without statistics is evaluated with those of the test batch.
        clients: storage of the clients' states; in memory only if not given.
        frozen: names of parameters that are not trained. They are on the model's device and are never sent.

    Attributes:
        frozen: names of parameters that are neither trained nor sent.
        personal: names of parameters and buffers that stay on their client from round to round.
        shared_parameters: names of the parameters that clients and server exchange.
        shared_buffers: names of the buffers that clients and server exchange.
        has_personal_models: whether clients have parameters of their own, so that each client's model is evaluated.
        training_norms: names of the BatchNorm layers that were in training mode when the run began.
        initial: name -> first value of each tensor in :attr:`personal`, the same for all clients; see
            :meth:`keep_initial`.

    Raises:
        ConfigError: a buffer holds NaN or infinity.
    """

    def __init__(
        self,
        network: nn.Module,
        keeps_local: Callable[[str], bool],
        batchnorm: Literal["average", "local", "drop"] = "average",
        clients: ClientStates | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self.network, self.batchnorm, self.frozen = network, batchnorm, frozenset(frozen)
        self.clients = ClientStates() if clients is None else clients
        parameters = [n for n, _ in network.named_parameters()]
        buffers = state_buffers(network)
        candidates = parameters if batchnorm == "drop" else parameters + buffers
        kept = {n for n in candidates if keeps_local(n)}
        self.personal = frozenset(kept | set(buffers) if batchnorm == "local" else kept)
        self.shared_parameters = tuple(n for n in parameters if n not in self.personal and n not in frozen)
        self.shared_buffers = tuple(n for n in buffers if n not in self.personal and batchnorm == "average")
        self.has_personal_models = not self.personal.isdisjoint(parameters)
        self.initial: dict[str, Tensor] = {}
        norms = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.training_norms = tuple(name for name, layer in norms if layer.training)

    def keep_initial(self) -> None:
        """Copy the network's personal tensors as every client's first values. Called after methods' setup."""
        self.initial = {n: t.detach().clone() for n, t in self.state_tensors().items() if n in self.personal}

    def state_tensors(self) -> dict[str, Tensor]:
        """The global model's parameters and buffers by name (not copied)."""
        return {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}

    def shared_tensors(self) -> dict[str, Tensor]:
        """The message that carries the global model to a client: name -> tensor (not copied)."""
        tensors = self.state_tensors()
        return {name: tensors[name] for name in (*self.shared_parameters, *self.shared_buffers)}

    def trained_tensors(self, cohort: Cohort, positions: Sequence[int]) -> dict[str, Tensor]:
        """The trained tensors that these clients of a cohort send or keep, name -> ``[k, ...]``.

        If any tensor of a client is not finite, :meth:`cfl.federation.channel.Channel.usable` leaves the client out of
        the round."""
        names = (*self.shared_parameters, *self.shared_buffers, *self.personal)
        tensors = {**cohort.parameters, **cohort.buffers}
        return cohort.rows(positions, {name: tensors[name] for name in names})

    def personal_state(self, clients: tuple[int, ...]) -> dict[str, Tensor]:
        """Personal parameters and buffers of these clients, name -> ``[k, ...]``; by default :attr:`initial`."""
        device = next(self.network.parameters()).device  # the network may have moved to it since keep_initial
        self.initial = {name: value.to(device) for name, value in self.initial.items()}
        return self.clients.gather(MODEL_TOPIC, clients, self.initial)

    @contextmanager
    def evaluation_statistics(self) -> Iterator[None]:
        """Within the context, BatchNorm uses the test batch's statistics if the evaluated model has none. Layers that
        were in evaluation mode when the run began have the statistics that came with the network."""
        layers = [cast(nn.BatchNorm2d, self.network.get_submodule(name)) for name in self.training_norms]
        has_own = self.batchnorm == "average" or (self.batchnorm == "local" and self.has_personal_models)
        if has_own or not layers:
            yield
            return
        saved = [(m, m.training, m.running_mean, m.running_var, m.num_batches_tracked) for m in layers]
        try:
            for layer in layers:
                layer.train(True)
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            yield
        finally:
            for layer, training, mean, var, count in saved:
                layer.train(training)
                layer.running_mean, layer.running_var, layer.num_batches_tracked = mean, var, count


def state_buffers(network: nn.Module) -> list[str]:
    """Names of the buffers that are part of a model, as its state dict has them.

    Buffers registered with ``persistent=False`` are constants. They are not sent, averaged or checked.

    Raises:
        ConfigError: a buffer holds NaN or infinity.
    """
    state = network.state_dict()
    buffers = {name: tensor for name, tensor in network.named_buffers() if name in state}
    for name, tensor in buffers.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            valid = (
                "finite values in what clients and server exchange; persistent=False for a buffer that is a constant"
            )
            raise ConfigError("model.network", f"{type(network).__name__}, whose buffer {name} has others", valid)
    return list(buffers)
