"""``check_network``: checks the properties of a network that clients, engines and methods rely on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import Schedule
from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.engines.against_autograd import SAMPLES, AgainstAutograd
from cfl.engines.hidden_state import check_hidden_state
from cfl.engines.trial_pass import draws_random_numbers
from cfl.models import Network
from cfl.models.base import require_head, require_one_name_each
from cfl.models.batchnorm import batch_mask, convert_batchnorm, unmaskable_layers
from cfl.models.dropout import convert_dropout
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import difference
from cfl.testing.method_case import error_text
from cfl.testing.tiny_networks import NetworkFactory, double
from cfl.testing.tiny_runs import fit, tiny_client, weights
from cfl.training.global_network import frozen_parameters

_SAMPLES = 5
_TOLERANCE = 1e-8
_SINGLE_TOLERANCE = 1e-3
"""Allowed difference of weights after a short training in float32."""


def check_network(make: NetworkFactory, input_shape: tuple[int, int, int] = (1, 8, 8), num_outputs: int = 4) -> None:
    """Train a classifier in a tiny federation and check the properties that the program relies on.

    Its images are random numbers, also below 0 and between integers. A network of token numbers has to accept them.
    It takes about two seconds for a small network, on the CPU, and reads no files. The checks, by name:

    - ``head``: ``network.head`` is the ``nn.Linear`` that computes the outputs from ``features(x)``, ``[B, d]``;
    - ``names``: no module with weights has two names;
    - ``samples``: in evaluation mode a sample's logits do not depend on the others of its batch;
    - ``normalisation``: batch statistics leave out padded samples;
    - ``state``: outputs depend on parameters, buffers and torch's random numbers alone;
    - ``stacked``: parameters stacked over clients under ``torch.func.vmap`` give the gradients and running statistics
      of plain autograd, also with padding;
    - ``engines``: it trains to the same weights by ``vmap`` and ``workers``, and at any cohort width.

    Args:
        make: makes the network from ``input_shape`` and ``num_outputs``: a class or a ``functools.partial`` of it.
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: size of the output layer, at least 2.

    Raises:
        AssertionError: a sentence with the property, the network, where it fails, and by how much.
    """
    network = _made(make, input_shape, num_outputs)
    who = type(network).__name__
    x = torch.randn(_SAMPLES, *input_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _check_head(who, network, x)
    try:
        require_one_name_each(network)
    except ConfigError as error:
        raise AssertionError(f"names: {error_text(error)}") from error
    _check_samples(who, network, x)
    _check_normalisation(who, make, network, x)
    _check_against_autograd(who, _made(make, input_shape, num_outputs), x)
    _check_engines(who, make, input_shape, num_outputs)


def _made(make: NetworkFactory, input_shape: tuple[int, int, int], num_outputs: int) -> Network:
    """A network in float64 whose normalisation is not in its trivial initial state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = double(make)(input_shape, num_outputs)
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.uniform_(-0.5, 0.5)
    return network


def _check_head(who: str, network: Network, x: Tensor) -> None:
    try:
        require_head(network)
    except ConfigError as error:
        raise AssertionError(f"head: {error_text(error)}") from error
    if network.predicts != "vector":
        return
    network.eval()
    with torch.no_grad():
        try:
            features, logits = network.features(x), network(x)
        except Exception as error:
            given = f"{list(x.shape)} of normally distributed numbers, as the checks use them"
            raise AssertionError(f"head: {who} fails on images {given}: {error_text(error)}") from error
        if features.shape != (len(x), network.head.in_features):
            wanted = [len(x), network.head.in_features]
            raise AssertionError(f"head: features of {who} gives {list(features.shape)}; what enters head is {wanted}")
        differs = difference(logits, network.head(features), _TOLERANCE, "their logits")
    if differs:
        raise AssertionError(f"head: forward of {who} gives something else than head(features(x)): {differs}")


def _check_samples(who: str, network: Network, x: Tensor) -> None:
    """Check the property ``samples``, unless a BatchNorm layer has no running statistics.

    Such a layer uses the batch's statistics in evaluation by intention.
    """
    layers = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(layer.running_mean is None for layer in layers):
        return
    network.eval()
    with torch.no_grad(), _naming("samples", f"{who} in evaluation mode, with one sample and with {len(x)}"):
        alone, together = network(x[1:2]), network(x)[1:2]
    differs = difference(alone, together, _TOLERANCE, "the logits")
    if differs:
        raise AssertionError(f"samples: in evaluation mode {who} computes a sample otherwise in a batch: {differs}")


def _check_normalisation(who: str, make: NetworkFactory, network: Network, x: Tensor) -> None:
    mixing = unmaskable_layers(convert_batchnorm(_made(make, network.input_shape, network.num_outputs)))
    if mixing:
        raise AssertionError(
            f"normalisation: batch statistics of {who} cannot leave out padded samples: {mixing}; nn.BatchNorm1d and "
            "nn.BatchNorm2d can"
        )
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        return
    found = []
    for padding in (0, 2):
        other = convert_batchnorm(_made(make, network.input_shape, network.num_outputs)).train()
        padded = torch.cat([x, torch.full_like(x[:1], 7.0).expand(padding, *x.shape[1:])])
        mask = torch.arange(len(padded)) < len(x)
        _still(other)
        with batch_mask(other, mask), _naming("normalisation", f"{who} in training mode"):
            logits = other(padded)[: len(x)]
        found.append({"the logits": logits.detach(), **{n: b.clone() for n, b in other.named_buffers()}})
    differs = difference(found[1], found[0], _TOLERANCE)
    if differs:
        raise AssertionError(f"normalisation: padded samples change what {who} computes of the others: {differs}")


@contextmanager
def _naming(property: str, what: str) -> Iterator[None]:
    """Within the context, an error of a forward or backward pass is one of a property."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{property}: {what} fails: {error_text(error)}") from error


def _still(network: nn.Module) -> None:
    """Switch off dropout, whose masks depend on the batch size."""
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()


def _check_against_autograd(who: str, network: Network, x: Tensor) -> None:
    network = convert_dropout(convert_batchnorm(network)).train()
    try:
        frozen_parameters(network)  # refuses a network without others
        check_hidden_state(network, x)
    except ConfigError as error:
        raise AssertionError(f"state: {error_text(error)}") from error
    with _naming("stacked", f"{who} in training mode"):
        if draws_random_numbers(network, network.input_shape):
            return
        differs = AgainstAutograd(network, x[:SAMPLES]).under_vmap()
    if differs:
        raise AssertionError(
            f"stacked: torch.func.vmap does not compute {who} with parameters stacked over clients: {differs}; without "
            "it there is engine.kind workers, one client after another"
        )


def _check_engines(who: str, make: NetworkFactory, input_shape: tuple[int, int, int], num_outputs: int) -> None:
    def train(engine: Literal["vmap", "workers"], width: int, of: Callable[..., Network]) -> dict[str, Tensor]:
        source = Synthetic(num_outputs, list(input_shape), 20 * num_outputs, 2 * num_outputs, noise=60.0)
        schedule = Schedule(rounds_per_task=1, clients_per_round=1.0, local_epochs=2, batch_size=4, cohort_width=width)
        partition = Dirichlet(1.0, min_samples=3, balance=False)
        data = FederatedDataModule(Permuted(source, 1), schedule, num_clients=4, partition=partition)
        options = EngineOptions(engine, workers=2 if engine == "workers" else None)
        client = tiny_client(data, of, engine=options)
        start = {name: tensor.clone() for name, tensor in client.network.state_dict().items()}
        try:
            trained = weights(fit(client, data))
        except Exception as error:
            where = f"engine.kind {engine}, {width} clients side by side"
            raise AssertionError(f"engines: training {who} fails ({where}): {error_text(error)}") from error
        still = [n for n, p in client.network.named_parameters() if torch.equal(trained[n], start[n])]
        if len(still) == len(dict(client.network.named_parameters())):
            raise AssertionError(f"engines: training moves no parameter of {who}")
        return trained

    # In float64 autograd computes the steps. For the network as it is, workers may have hand-written steps.
    exact = double(make)
    expected = {of: train("vmap", 1, of) for of in (exact, make)}
    ways: tuple[tuple[Literal["vmap", "workers"], NetworkFactory, float], ...] = (
        ("vmap", exact, _TOLERANCE),
        ("workers", exact, _TOLERANCE),
        ("workers", make, _SINGLE_TOLERANCE),
    )
    for engine, of, tolerance in ways:
        differs = difference(train(engine, 4, of), expected[of], tolerance)
        if differs:
            where = f"4 clients side by side with engine.kind {engine} instead of 1 with vmap"
            raise AssertionError(f"engines: {who} trains to other weights with {where}: {differs}")
