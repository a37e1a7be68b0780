"""Selects the layers of a network that multiply input vectors with a weight."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from cfl.runtime.errors import ConfigError

WeightedLayer = nn.Linear | nn.Conv2d
NORMALISING = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
_log = logging.getLogger(__name__)


def weighted_layers(network: nn.Module) -> dict[str, WeightedLayer]:
    """All Linear and Conv2d layers by module name, in the network's order.

    The output layers of ``nn.MultiheadAttention`` are not included: it uses their weights without calling them, so that
    their inputs cannot be observed.
    """
    unseen = _output_layers_of_attention(network)
    return {
        name: m for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and id(m) not in unseen
    }


def _output_layers_of_attention(network: nn.Module) -> set[int]:
    return {id(m.out_proj) for m in network.modules() if isinstance(m, nn.MultiheadAttention)}


def choose_layers(
    network: nn.Module,
    patterns: Sequence[str] | None,
    key: str,
    without: object = None,
    frozen: Collection[str] = (),
) -> dict[str, WeightedLayer]:
    """The layers that patterns over module names choose.

    Args:
        network: the network with the layers.
        patterns: as in file names; None chooses all but ``without`` and those whose weights are frozen.
        key: the patterns' config key, for errors.
        without: a layer that is left out unless a pattern names it, such as an output layer with outputs per task.
        frozen: names of parameters that are not trained.

    Raises:
        ConfigError: if a pattern matches nothing, a chosen layer has no weight of its own or a frozen one, or shares it
            with another, or a chosen convolution does not multiply whole patches padded with zeros.
    """
    found = weighted_layers(network)
    if patterns is None:
        if others := _other_weights(network):
            where = "belong to no Linear or Conv2d layer that is called"
            _log.warning("%s: %s %s; the method does not see them", key, others, where)
        chosen = {n: layer for n, layer in found.items() if layer is not without and f"{n}.weight" not in frozen}
    else:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in found):
                raise ConfigError(key, pattern, f"patterns that match one of {list(found)}")
        chosen = {name: layer for name, layer in found.items() if any(fnmatchcase(name, p) for p in patterns)}
    holders = _holders(network)
    for name, layer in chosen.items():
        if is_parametrized(layer, "weight") or "weight" not in layer._parameters:
            made = "another method decomposes" if is_parametrized(layer, "weight") else "is made of others"
            raise ConfigError(key, f"{name}, whose weight {made}", "layers with a weight of their own")
        if sharers := [holder for holder in holders.get(id(layer.weight), []) if holder != f"{name}.weight"]:
            found_as = f"{name}, whose weight is {sharers[0]} as well"
            raise ConfigError(key, found_as, "layers whose inputs are all that their weights are multiplied with")
        if f"{name}.weight" in frozen:
            raise ConfigError(key, f"{name}, whose weight is frozen", "layers that are trained")
        if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding_mode != "zeros"):
            valid = "Linear layers and Conv2d layers with groups=1 and padding_mode='zeros'"
            raise ConfigError(key, f"{name}: {layer}", valid)
    return chosen


def _holders(network: nn.Module) -> dict[int, list[str]]:
    """Identity of a parameter -> the names under which modules hold it; a module with several names counts once."""
    found: dict[int, list[str]] = {}
    for name, module in network.named_modules():
        for parameter, tensor in module.named_parameters(prefix=name, recurse=False):
            found.setdefault(id(tensor), []).append(parameter)
    return found


def _other_weights(network: nn.Module) -> str:
    """Names of the parameters that do not belong to a Linear, Conv2d or normalisation layer that is called."""
    seen = (nn.Linear, nn.Conv2d, *NORMALISING)
    unseen = _output_layers_of_attention(network)
    names = [
        f"{name}.{parameter}" if name else parameter
        for name, module in network.named_modules()
        if (id(module) in unseen or not isinstance(module, seen)) and not is_parametrized(module)
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
