"""Builds the network of a run and adapts it to stacked clients, or refuses it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cfl.methods.composition import Composition
from cfl.models.base import Network, require_head, require_one_name_each, require_real
from cfl.models.batchnorm import convert_batchnorm, unmaskable_layers
from cfl.models.dropout import convert_dropout
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import WithinMemory


def global_network(
    make: Callable[[tuple[int, int, int], int], Network],
    input_shape: tuple[int, int, int],
    num_outputs: int,
    methods: Composition,
    seed: int,
) -> tuple[Network, frozenset[str]]:
    """The network that holds the global model, extended by the methods.

    Args:
        make: class and options of the network.
        input_shape: ``(C, H, W)``.
        num_outputs: size of its output layer.
        methods: the methods of the run, which may add parameters.
        seed: the run's seed.

    Returns:
        The network, with ``requires_grad`` off for all parameters, and the names of those for which it was off already.

    Raises:
        ConfigError: the network cannot be trained by stacked clients, or does not fit in memory.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "initialise network"))
        with WithinMemory("model.network", None, "a smaller network", copies=3):  # global model, client, gradient
            network = convert_dropout(convert_batchnorm(_made(make, input_shape, num_outputs)))
        require_one_name_each(network)
        require_real(network)
        require_head(network)
        before = frozen_parameters(network)
        methods.extend(network, seed)
    mixing = unmaskable_layers(network)
    if mixing:
        raise ConfigError("model.network", mixing, "a network whose batch statistics can leave out padded samples")
    frozen = frozen_parameters(network)
    if thawed := before - frozen:
        valid = "a network without frozen parameters in layers that the methods replace"
        raise ConfigError("model.network", sorted(thawed), valid)
    # Only the server changes the global model; clients train stacked copies.
    network.requires_grad_(False)
    return network, frozen


def _made(
    make: Callable[[tuple[int, int, int], int], Network], input_shape: tuple[int, int, int], num_outputs: int
) -> Network:
    """Build the network, and turn its errors into errors of configuration.

    Raises:
        ConfigError: a layer refuses a value, such as a dropout above 1, or the class does not take these arguments.
    """
    try:
        return make(input_shape, num_outputs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        valid = f"a network that can be built of input_shape, num_outputs and its options ({error})"
        raise ConfigError("model.network", _name_of(make), valid) from error


def _name_of(make: Callable[..., Network]) -> str:
    """The name of the class that ``make``, such as a ``partial`` of jsonargparse, builds."""
    parts = (make, getattr(make, "func", None), *getattr(make, "args", ()))
    return next((part.__name__ for part in parts if isinstance(part, type)), str(make))


def frozen_parameters(network: Network) -> frozenset[str]:
    """Names of the parameters that do not require a gradient.

    Raises:
        ConfigError: no parameter requires a gradient.
    """
    frozen = frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad)
    if frozen and all(name in frozen for name, _ in network.named_parameters()):
        raise ConfigError("model.network", f"{type(network).__name__} with all parameters frozen", "one that trains")
    return frozen
