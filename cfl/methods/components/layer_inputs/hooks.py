"""Hooks that watch what a network's layers are given and return, within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.rows import layer_inputs
from cfl.methods.components.layer_inputs.weighted_layers import WeightedLayer

See = Callable[[str, Tensor], None]


@contextmanager
def inputs_watched(watchers: Mapping[nn.Module, Callable[[nn.Module, Tensor], None]]) -> Iterator[None]:
    """Within the context, every layer calls its watcher, as ``watcher(layer, x)``, with its input."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        watchers[layer](layer, inputs[0] if inputs else named["input"])

    with ExitStack() as handles:
        for layer in watchers:
            handles.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield


@contextmanager
def seen_inputs(layers: Mapping[str, WeightedLayer], see: See) -> Iterator[None]:
    """Within the context, every forward pass calls ``see`` with the layers' names and inputs, in pieces ``[n, d]``."""

    def watcher(name: str) -> Callable[[nn.Module, Tensor], None]:
        def show(layer: nn.Module, x: Tensor) -> None:
            for rows in layer_inputs(layer, x.detach()):
                see(name, rows)

        return show

    with inputs_watched({layer: watcher(name) for name, layer in layers.items()}):
        yield


@contextmanager
def probed_outputs(layers: Mapping[str, WeightedLayer]) -> Iterator[dict[str, list[Tensor]]]:
    """Within the context, zeros that require gradients are added to the layers' outputs.

    Their gradients are those with respect to the outputs, also if the outputs are changed in place later.

    Yields:
        name -> the zeros, one tensor ``[b, o, ...]`` for each use of the layer; to be emptied between passes.
    """
    probes: dict[str, list[Tensor]] = {name: [] for name in layers}

    def hook(name: str) -> Any:
        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            probe = torch.zeros_like(output, requires_grad=True)
            probes[name].append(probe)
            return output + probe

        return add

    with ExitStack() as handles:
        for name, layer in layers.items():
            handles.enter_context(layer.register_forward_hook(hook(name)))
        yield probes
