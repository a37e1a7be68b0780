"""Finds networks whose steps depend on more than their tensors, which engines would train wrongly without an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from cfl.engines.trial_copies import copied, masks_of_one
from cfl.models.dropout import dropout_masks
from cfl.runtime.errors import ConfigError

_ROUNDING = 1e-3
"""Relative difference of two passes' outputs on an accelerator, whose sums may be taken in any order."""


@torch.enable_grad()
def check_hidden_state(network: nn.Module, x: Tensor) -> None:
    """Refuse a network whose training step is no function of parameters, buffers, samples and torch's random stream.

    Clients train copies of a network's tensors, one client after another on the same modules. What a network keeps
    elsewhere would be lost, or would pass from one client to the next.

    Args:
        network: in the mode in which it trains; not changed.
        x: ``[B, C, H, W]`` samples, of the parameters' type.

    Raises:
        ConfigError: a part cannot be copied, or a step fails; a parameter is of integers or complex, has a hook or a
            sparse gradient, or is used though no module holds it; ``forward`` assigns a buffer or keeps a graph; or two
            passes over the same samples differ.
    """
    _check_parts(network)
    trial = copied(network)
    buffers = dict(trial.named_buffers())
    values = {own: buffer.clone() for own, buffer in buffers.items()}
    masks = masks_of_one(trial, x)
    with _gradients(network), _gradients(trial):
        first, used = _pass(network, trial, masks, x)
        _check_buffers(network, trial, buffers)
        for own, buffer in buffers.items():
            buffer.copy_(values[own])
        made_at_first_use = {own: b for own, b in trial.named_buffers() if own not in buffers}
        second, again = _pass(network, trial, masks, x)
        _check_buffers(network, trial, buffers | made_at_first_use)
    held = {id(parameter) for parameter in trial.parameters()}
    there = {id(parameter): own for own, parameter in network.named_parameters()}
    for leaf in used:
        if id(leaf) in held or not any(leaf is other for other in again):
            continue
        if id(leaf) in there:
            what = f"which reaches {there[id(leaf)]} by a function that holds the network"
            raise _refused(network, what, "methods of modules, which belong to a copy of the network")
        valid = "parameters that are attributes of modules; nn.ParameterList and nn.ModuleList instead of lists"
        raise _refused(network, f"which uses a parameter {list(leaf.shape)} that no module holds", valid)
    if not torch.allclose(first, second, rtol=_ROUNDING, atol=_ROUNDING * float(first.abs().max()), equal_nan=True):
        valid = "random numbers of torch's default generator only, and no state but buffers that change in place"
        raise _refused(network, "of which two passes over the same samples differ", valid)


def _refused(network: nn.Module, what: str, valid: str) -> ConfigError:
    return ConfigError("model.network", f"{type(network).__name__}, {what}", valid)


def _check_parts(network: nn.Module) -> None:
    """Refuse parts that cannot be copied for clients."""
    for part, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _refused(network, f"whose part {part} is TorchScript", "modules of Python")
    for own, parameter in network.named_parameters():
        if not parameter.is_floating_point():
            valid = "register_buffer for integers, pairs of real numbers for complex ones"
            raise _refused(network, f"whose parameter {own} is {parameter.dtype}", valid)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _refused(network, f"whose parameter {own} has a hook", "hooks of modules, which copies have too")


def _check_buffers(network: nn.Module, trial: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse a network of which a pass has replaced a buffer."""
    for own, buffer in trial.named_buffers():
        if buffer is not before.get(own, buffer):
            valid = f"self.{own}.copy_(...) and other changes in place"
            raise _refused(network, f"which assigns the buffer {own} in forward", valid)


def _pass(network: nn.Module, trial: nn.Module, masks: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A pass of a copy of the network, forward and back, from the same random state at every call.

    Returns:
        Outputs, and leaves of their graph.

    Raises:
        ConfigError: a pass fails, needs the graph of an earlier pass, or leaves a sparse gradient.
    """
    try:
        cards = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cards), dropout_masks(trial, masks):
            outputs: Tensor = trial(x.clone())  # which a network may change, or require a gradient of
        leaves = _leaves(outputs)
        outputs.sum().backward()  # not autograd.grad, which some checkpointing refuses
    except Exception as error:  # whatever a user's forward pass may raise
        if "backward through the graph a second time" in str(error):
            what, valid = "which uses an activation of an earlier pass", "detach() of what it keeps"
        else:
            what = f"whose step fails: {type(error).__name__}: {error}"
            valid = f"a network that autograd can differentiate on images {list(x.shape[1:])}"
        raise _refused(network, what, valid) from error
    for leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None and gradient.layout != torch.strided:
            what = f"with a sparse gradient of a parameter {list(leaf.shape)}"
            raise _refused(network, what, "dense gradients, such as those of nn.Embedding(sparse=False)")
    return outputs.detach(), leaves


def _leaves(outputs: Tensor) -> list[Tensor]:
    """The tensors that collect gradients in a backward pass."""
    found: list[Tensor] = []
    seen, open_nodes = set(), [outputs.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(cast(Any, node).variable)
        open_nodes += [before for before, _ in node.next_functions]
    return found


@contextmanager
def _gradients(network: nn.Module) -> Iterator[None]:
    """Within the context, parameters require gradients, which those of the global model do not."""
    before = [(p, p.requires_grad) for p in network.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
