"""Copies of networks, and their dropout masks, for passes that are not training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cfl.models.dropout import DropoutMasks
from cfl.runtime.errors import ConfigError


def copied(network: nn.Module) -> nn.Module:
    """A deep copy of a network.

    Raises:
        ConfigError: it has parts that cannot be copied.
    """
    try:
        return copy.deepcopy(network)
    except Exception as error:
        what = f"{type(network).__name__}, which cannot be copied ({error})"
        valid = "one that copy.deepcopy can copy; weight_norm and spectral_norm of torch.nn.utils.parametrizations"
        raise ConfigError("model.network", what, valid) from error


def masks_of_one(network: nn.Module, x: Tensor, key: int = 0) -> dict[str, Tensor]:
    """Dropout masks of one client's samples ``[B, C, H, W]``: layer name -> ``[B, ...]``."""
    masks = DropoutMasks(network, x.shape[1:]).draw(torch.tensor([key], device=x.device), len(x), x.dtype)
    return {name: mask[0] for name, mask in masks.items()}
