"""Refuses runs in which clients have no model, or no features, in common."""

from __future__ import annotations

from cfl.methods.base import Method
from cfl.models.base import Network
from cfl.runtime.errors import ConfigError


def check_common_model(method: Method) -> None:
    """Refuse parameters that stay on their client.

    Raises:
        ConfigError: naming the method.
    """
    if method.context.has_personal_models:
        raise ConfigError(method.key, "with parameters kept local", "one model for all clients")


def network_with_common_features(method: Method) -> Network:
    """The network of a run in which all clients have the same features.

    Raises:
        ConfigError: it has no features to look at, or clients' models differ.
    """
    network = method.context.network
    if not isinstance(network, Network):
        valid = f"a subclass of cfl.models.base.Network, whose features are looked at, with {method.key}"
        raise ConfigError("model.network", type(network).__name__, valid)
    check_common_model(method)
    return network
