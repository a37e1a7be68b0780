"""Layer inputs in a network with active dropout, each before the dropout directly in front of its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.methods.components.layer_inputs.weighted_layers import weighted_layers
from cfl.models.dropout import dropout_masks


def watch_before_dropout(
    network: nn.Module,
    model: Mapping[str, Tensor],
    x: Tensor,
    masks: Mapping[str, Tensor],
    watchers: Mapping[nn.Module, Callable[[nn.Module, Tensor], None]],
) -> None:
    """One forward pass that calls watchers with their layers' inputs, computed without the dropout just before them.

    A layer's input is computed with all dropout up to the preceding weighted layers (Linear, Conv2d), and without the
    dropout between these and the layer itself, whatever else lies between: pooling, flattening, another dropout. The
    values are those of the network's own operations.

    Every sample is computed twice. In the second copy nothing is dropped. In front of every weighted layer the second
    copy is replaced by the first, in which dropout is active. BatchNorm by the batch's own statistics sees both copies,
    which changes nothing where they are equal, that is, everywhere except directly behind a dropout.

    Args:
        network: in evaluation mode, except for the layers in ``masks``; unchanged afterwards.
        model: its parameters and buffers.
        x: ``[b, C, H, W]``.
        masks: masks of dropout layers, ``[b, ...]``, see :meth:`cfl.models.dropout.DropoutMasks.draw`.
        watchers: weighted layer of ``network`` -> called as ``watcher(layer, input)`` with ``[b, ...]``.
    """

    def hook(
        layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        dropped, kept = (inputs[0] if inputs else named["input"]).chunk(2)
        if layer in watchers:
            watchers[layer](layer, kept)
        return (torch.cat([dropped, dropped]),), {}

    both = {name: torch.cat([mask, torch.ones_like(mask)]) for name, mask in masks.items()}
    with _dropping(network, both), ExitStack() as handles:
        for layer in weighted_layers(network).values():
            handles.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        functional_call(network, dict(model), (torch.cat([x, x]),))


@contextmanager
def _dropping(network: nn.Module, masks: dict[str, Tensor]) -> Iterator[None]:
    """Within the context the named layers drop by these masks; the network's mode does not change otherwise."""
    layers = [network.get_submodule(name) for name in masks]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        with dropout_masks(network, masks):
            yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode
