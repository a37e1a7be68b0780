"""The network of a run: built, made fit for stacked clients, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cfl.methods.composition import Composition
from cfl.models.base import Network, require_head, require_one_name_each
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
        methods: may add parameters.
        seed: the run's seed.

    Returns:
        The network, none of whose parameters requires a gradient any more, and the names of those that never did.

    Raises:
        ConfigError: it cannot be trained by stacked clients, or not in the memory there is.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "initialise network"))
        with WithinMemory("model.network", None, "a smaller network", copies=3):  # with a client's, and its gradient
            network = convert_dropout(convert_batchnorm(_made(make, input_shape, num_outputs)))
        require_one_name_each(network)
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
    # The global model moves by the server's hand alone.
    network.requires_grad_(False)
    return network, frozen


def _made(
    make: Callable[[tuple[int, int, int], int], Network], input_shape: tuple[int, int, int], num_outputs: int
) -> Network:
    """What the maker makes.

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
    """The name of the class that a maker, such as jsonargparse's ``partial``, makes."""
    parts = (make, getattr(make, "func", None), *getattr(make, "args", ()))
    return next((part.__name__ for part in parts if isinstance(part, type)), str(make))


def frozen_parameters(network: Network) -> frozenset[str]:
    """Names of the parameters that do not ask for a gradient.

    Raises:
        ConfigError: none of them does.
    """
    frozen = frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad)
    if frozen and all(name in frozen for name, _ in network.named_parameters()):
        raise ConfigError("model.network", f"{type(network).__name__} with all parameters frozen", "one that trains")
    return frozen
