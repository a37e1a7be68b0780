"""Layer inputs in a network that drops, each without the dropout directly in front of its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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
    """One forward pass that shows watchers what their layers would be given if nothing were dropped since the last one.

    A layer's input is computed with all dropout up to the weighted layers (Linear, Conv2d) that it is computed from,
    and without the dropout between these and the layer itself, whatever else lies there: pooling, flattening, another
    dropout. The values are those of the network's own operations.

    Every sample travels twice. In the second copy nothing is dropped; in front of every weighted layer it becomes the
    first again, in which everything is. BatchNorm by the batch's own statistics sees both copies, which changes nothing
    where they are equal, that is, anywhere but directly behind a dropout.

    Args:
        network: evaluated, but for the layers in ``masks``; as it was afterwards.
        model: its parameters and buffers.
        x: ``[b, C, H, W]``.
        masks: of dropout layers, ``[b, ...]``, see :meth:`cfl.models.dropout.DropoutMasks.draw`.
        watchers: weighted layer of ``network`` -> called as ``watcher(layer, input)`` with ``[b, ...]``.
    """

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        dropped, kept = inputs[0].chunk(2)
        if layer in watchers:
            watchers[layer](layer, kept)
        return torch.cat([dropped, dropped])

    handles = [layer.register_forward_pre_hook(hook) for layer in weighted_layers(network).values()]
    try:
        with _dropping(network, {name: torch.cat([mask, torch.ones_like(mask)]) for name, mask in masks.items()}):
            functional_call(network, dict(model), (torch.cat([x, x]),))
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _dropping(network: nn.Module, masks: dict[str, Tensor]) -> Iterator[None]:
    """Within the context the named layers drop by these masks, in a network that is otherwise in its present mode."""
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
