"""Finds the sizes of a network's layers, and whether it draws random numbers, by one forward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cfl.engines.trial_copies import copied, masks_of_one
from cfl.models.dropout import dropout_masks
from cfl.runtime.errors import ConfigError


@torch.no_grad()
def draws_random_numbers(network: nn.Module, input_shape: tuple[int, int, int]) -> bool:
    """Whether a training pass advances torch's random stream on the CPU, which counted dropout does not.

    Raises:
        ConfigError: if the network cannot be copied or take the data's images, or its dropout layers cannot work.
    """
    trial = copied(network)
    some = next(trial.parameters())
    x = torch.zeros(2, *input_shape, dtype=some.dtype, device=some.device)
    try:
        cards = [some.device] if some.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cards), dropout_masks(trial, masks_of_one(trial, x)):
            before = torch.get_rng_state()
            trial(x)
            return not torch.equal(before, torch.get_rng_state())
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise
        what = f"{type(network).__name__} on images {list(input_shape)}: {type(error).__name__}: {error}"
        raise ConfigError("model.network", what, "a network that takes the data's images") from error


def patch_bytes(network: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Bytes of the patches of one sample that a step with the batch last in memory holds at a time.

    These are the patches of all convolutions, and once more the largest of all but the first, for their gradient.
    """
    size = next(network.parameters()).element_size()
    found = [
        weight[0].numel() * places * size
        for kind, weight, places in weighted_layers(network, input_shape)
        if kind is nn.Conv2d
    ]
    return sum(found) + max(found[1:], default=0)


@torch.no_grad()
def weighted_layers(
    network: nn.Module, input_shape: tuple[int, int, int]
) -> list[tuple[type[nn.Linear | nn.Conv2d], Tensor, int]]:
    """Linear and convolutional layers in the order of their use: kind, weight, number of places in a sample."""
    found: list[tuple[type[nn.Linear | nn.Conv2d], Tensor, int]] = []

    def note(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kind = nn.Conv2d if isinstance(module, nn.Conv2d) else nn.Linear
        found.append((kind, module.weight, output[0].numel() // len(module.weight)))

    trial = copy.deepcopy(network).eval()
    for module in trial.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(note)
    some = next(trial.parameters())
    trial(torch.zeros(1, *input_shape, dtype=some.dtype, device=some.device))
    return found
