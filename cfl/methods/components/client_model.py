"""A client's model and samples, and how its model is evaluated, for what clients compute beside their local steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.models.evaluation import evaluation_mode
from cfl.randomness.generators import numpy_generator

if TYPE_CHECKING:
    from cfl.methods.context import Context


def client_model(context: Context, client: int) -> dict[str, Tensor]:
    """Parameters and buffers of a client's model before it trains: the global ones and its own.

    If running statistics are dropped, the returned ones are copies, because a pass with batch statistics changes them.
    """
    own = {name: values[0] for name, values in context.personal_state((client,)).items()}
    state = context.state_tensors()
    if context.batchnorm == "drop":
        state.update({name: state[name].clone() for name in _running_statistics(context.network)})
    model = {**state, **own}
    return {name: tensor.detach() for name, tensor in model.items()}


def _running_statistics(network: nn.Module) -> set[str]:
    layers = [(path, layer) for path, layer in network.named_modules() if isinstance(layer, _BatchNorm)]
    return {f"{path}.{name}" for path, layer in layers for name, _ in layer.named_buffers(recurse=False)}


@contextmanager
def evaluating(context: Context) -> Iterator[None]:
    """Within the context, evaluate a client's model: without dropout, with the batch's statistics if it has none."""
    nobody_keeps = context.batchnorm == "drop"
    statistics = context.evaluation_statistics() if nobody_keeps else nullcontext()
    with evaluation_mode(context.network), statistics:
        yield


@contextmanager
def evaluating_global(context: Context) -> Iterator[None]:
    """Within the context, evaluate the global model as tests do.

    Unlike in :func:`evaluating`, the batch's own statistics are used also if clients keep theirs local. Within the
    context, ``context.state_tensors()`` then has no running statistics. Outside, it has the initial ones, which never
    change.
    """
    with evaluation_mode(context.network), context.evaluation_statistics():
        yield


def run_model(context: Context, model: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits ``[b, O]`` of the network with these parameters and buffers."""
    logits: Tensor = functional_call(context.network, dict(model), (x,))
    return logits


def some_samples(
    context: Context, task: int, client: int, most: int, purpose: str, batch_size: int
) -> Iterator[Tensor]:
    """Network inputs ``[b, C, H, W]``, ``b <= batch_size``, of at most ``most`` of a client's training samples.

    They are drawn by a generator keyed by ``purpose``, task and client.
    """
    own = context.indices(task, client)
    if len(own) > most:
        chosen = numpy_generator(context.seed, purpose, task, client).choice(len(own), most, replace=False)
        chosen.sort()
        own = own[chosen]
    for part in torch.from_numpy(own).to(context.device).split(batch_size):
        yield context.gather(task, part)[0]
