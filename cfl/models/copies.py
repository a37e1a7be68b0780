"""Copies of a network for several threads."""

from __future__ import annotations

import copy

import torch
from torch import nn


def networks_for_threads(network: nn.Module, jobs: int) -> list[nn.Module]:
    """One module for each thread that may compute at the same time; all hold the same tensors.

    Hooks and modes belong to a module, so threads that observe layers or replace their tensors must not share one. On a
    CPU there are as many modules as math threads, at most ``jobs``. If that is one, and on other devices, the network
    itself is the only module.
    """
    at_once = min(torch.get_num_threads(), jobs) if next(network.parameters()).device.type == "cpu" else 1
    if at_once <= 1:
        return [network]
    tensors = {id(t): t for t in (*network.parameters(), *network.buffers())}
    return [copy.deepcopy(network, dict(tensors)) for _ in range(at_once)]
