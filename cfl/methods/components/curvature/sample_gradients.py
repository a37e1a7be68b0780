"""Sums over samples of squared per-sample gradients, without one backward pass per sample.

The gradients are those of ``v_b . logits_b`` of every sample b, for given signals ``v [B, O]``. Autograd runs once for
the batch, down to the layers' outputs. The gradients of a layer's weights follow from its inputs and its outputs'
gradients (:mod:`cfl.methods.components.curvature.layer_squares`). This works for a weight that is used once, in a layer
whose inputs have one row for every sample. All other parameters are differentiated sample by sample, under ``vmap``
where that can differentiate the network, with one backward pass per sample otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.methods.components.curvature.layer_calls import LayerCall, recorded_pass
from cfl.methods.components.curvature.layer_squares import chunks
from cfl.models.evaluation import evaluation_mode

Signals = Callable[[Tensor], Iterable[Tensor]]


def squared_gradient_sums(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    signals: Signals,
    names: Sequence[str],
    batch_statistics: bool = False,
) -> dict[str, Tensor]:
    """``sum_v sum_b (d (v_b . logits_b) / d w)^2`` for every parameter w, the network in evaluation mode.

    Args:
        network: ``[B, ...]`` to logits ``[B, O]``, each row from its own sample alone.
        tensors: parameters and buffers to compute with, by name; missing ones are taken from the network.
        x: ``[B, ...]`` inputs.
        signals: function from logits ``[B, O]`` to one or more v, each ``[B, O]``; logits and v carry no gradient.
        names: the parameters w.
        batch_statistics: BatchNorm layers that are in training mode normalise by the batch's own statistics instead of
            their running ones, taken as constants. Layers without running statistics always do.

    Returns:
        name -> sum, shaped as the parameter.
    """
    given = {**dict(network.named_parameters()), **dict(network.named_buffers()), **tensors}
    given = {name: tensor.detach() for name, tensor in given.items()}
    # Copies, so that nothing is left of the passes in buffers that a network changes in place.
    given |= {name: given[name].clone() for name, _ in network.named_buffers()}
    with _constant_statistics(network, batch_statistics), evaluation_mode(network), _differentiable_recurrence(network):
        logits, calls = recorded_pass(network, given, x, names)
        calls = _by_sample(calls, network, given, x)
        sums = {name: torch.zeros_like(given[name], memory_format=torch.contiguous_format) for name in names}
        direct = {name: sums[name] for name in calls}
        distinct = list({id(call): call for call in calls.values()}.values())
        others = [name for name in names if name not in direct]
        for v in signals(logits.detach()):
            for call, d in zip(distinct, _output_gradients(logits, distinct, v), strict=True):
                if d is not None:
                    call.add_squares(d, direct)
            if others:
                _add_sample_by_sample(network, given, x, v, others, sums)
    return sums


# Network -> shape of a sample -> parameter -> shapes of a row; see _by_sample.
_ROWS: WeakKeyDictionary[nn.Module, dict[torch.Size, dict[str, list[torch.Size]]]] = WeakKeyDictionary()


def _by_sample(
    calls: Mapping[str, LayerCall], network: nn.Module, given: Mapping[str, Tensor], x: Tensor
) -> dict[str, LayerCall]:
    """Those of a batch's calls whose inputs and outputs have one row for every sample.

    A batch of another size tells: the first dimension has to be the number of samples in both, and the others the same.
    In one batch alone, the first dimension may be as large by chance, for example that of a sequence's positions. The
    other batch is computed once for a network, and the shapes of its rows are remembered.
    """
    rows = _ROWS.setdefault(network, {}).setdefault(x.shape[1:], {})
    if new := [name for name in calls if name not in rows]:
        few = x[:2] if len(x) > 2 else torch.cat([x, x[:1]])
        _, again = recorded_pass(network, given, few, new)
        for name in new:
            shapes = _shapes_of_rows(calls[name], len(x))
            same = name in again and _shapes_of_rows(again[name], len(few)) == shapes
            rows[name] = shapes if same else []
    return {name: call for name, call in calls.items() if rows[name] and _shapes_of_rows(call, len(x)) == rows[name]}


def _shapes_of_rows(call: LayerCall, rows: int) -> list[torch.Size]:
    """Shapes of a row of a call's input and output; none if it has not as many rows."""
    shapes = [call.input.shape, call.output.shape]
    return [shape[1:] for shape in shapes] if all(shape[:1] == (rows,) for shape in shapes) else []


def _output_gradients(logits: Tensor, calls: Sequence[LayerCall], v: Tensor) -> Sequence[Tensor | None]:
    if not logits.requires_grad or not calls:
        return [None] * len(calls)
    outputs = [call.output for call in calls]
    return torch.autograd.grad(logits, outputs, v, retain_graph=True, allow_unused=True)


# All other parameters.


def _add_sample_by_sample(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    v: Tensor,
    names: Sequence[str],
    sums: dict[str, Tensor],
) -> None:
    """Add the squared gradients of these parameters, from every sample's own gradient."""

    def value(wanted: dict[str, Tensor], sample: Tensor, signal: Tensor) -> Tensor:
        logits: Tensor = functional_call(network, {**tensors, **wanted}, (sample.unsqueeze(0),))
        return (logits.squeeze(0) * signal).sum()

    def in_turn(wanted: dict[str, Tensor], samples: Tensor, signals: Tensor) -> dict[str, Tensor]:
        each = [_gradients(value, wanted, *pair) for pair in zip(samples, signals, strict=True)]
        return {name: torch.stack([gradients[name] for gradients in each]) for name in wanted}

    wanted = {name: tensors[name] for name in names}
    of_samples: Callable[..., dict[str, Tensor]] = vmap(grad(value), in_dims=(None, 0, 0))
    for some in chunks(len(x), sum(tensor.numel() for tensor in wanted.values())):
        try:
            gradients = of_samples(wanted, x[some], v[some])
        except Exception:  # whatever a user's forward pass may raise; what is no fault of vmap is raised again
            of_samples = in_turn
            gradients = of_samples(wanted, x[some], v[some])
            _warn_of_slow(names)
        for name, own in gradients.items():
            sums[name] += own.detach().square().sum(0)


def _gradients(
    value: Callable[[dict[str, Tensor], Tensor, Tensor], Tensor], wanted: Mapping[str, Tensor], x: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """The gradients of one sample's value, 0 where it does not depend on a tensor."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in wanted.items()}
    with torch.enable_grad():
        found = value(leaves, x, v)
    if not found.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    gradients = torch.autograd.grad(found, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _warn_of_slow(names: Sequence[str]) -> None:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    rank_zero_warn(
        f"the Fisher information of {shown} takes one backward pass per sample: torch.func.vmap cannot compute the "
        "network's gradients"
    )


@contextmanager
def _constant_statistics(network: nn.Module, also_training: bool) -> Iterator[None]:
    """Within the context, BatchNorm layers without running statistics use the first batch's statistics as constants.
    With ``also_training``, so do those that are in training mode."""
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]
    layers = [m for m in norms if m.running_mean is None or (also_training and m.training)]
    before = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def hook(layer: Any, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if layer not in found:
            x = (inputs[0] if inputs else named["input"]).detach()
            variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
            found[layer] = (mean, variance)
        layer.running_mean, layer.running_var = found[layer]

    try:
        with ExitStack() as handles:
            for layer in layers:
                handles.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
            yield
    finally:
        for layer, mean, variance in before:
            layer.running_mean, layer.running_var = mean, variance


@contextmanager
def _differentiable_recurrence(network: nn.Module) -> Iterator[None]:
    """Within the context, recurrent layers can be differentiated in evaluation mode, which cuDNN's cannot."""
    cudnn = torch.backends.cudnn
    without = cudnn.enabled and any(isinstance(module, nn.RNNBase) for module in network.modules())
    if without:
        cudnn.enabled = False
    try:
        yield
    finally:
        if without:
            cudnn.enabled = True
