"""Captures steps of stacked clients on a CUDA device once as a graph, and replays them.

A step of ``vmap`` is some hundred small kernels, which Python launches more slowly than the device computes them. A
graph launches all of them at once, with the same results.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from cfl.engines.updates import sgd_step

WORTH_CAPTURING = 24
"""Number of steps of one shape after which a step is captured; capturing takes as long as some ten steps."""

MOST_GRAPHS = 16
"""Number of captured steps that are kept, each with the memory of its maps; the latest ones."""

_log = logging.getLogger(__name__)

Inputs = Mapping[str, Tensor]
Compute = Callable[[Inputs], Tensor]


class Graphs:
    """Graphs of steps, one per shape of inputs.

    Args:
        eager: capture at once, for a trial whose steps stand for those of a long run.
    """

    def __init__(self, eager: bool) -> None:
        self._worth = 1 if eager else WORTH_CAPTURING
        self._asked: Counter[Any] = Counter()
        self._graphs: dict[Any, GraphedStep] = {}
        self._refused: set[Any] = set()

    def losses(
        self,
        compute: Compute,
        inputs: Inputs,
        parameters: Sequence[Tensor],
        sgd: tuple[float, float] | None = None,
    ) -> Tensor | None:
        """``compute(inputs)``, ``[k]``, with a graph of autograd to ``parameters``; None if the step is not captured.

        Args:
            compute: returns the clients' losses. Apart from inputs and parameters it uses constants only.
            inputs: by name; copied.
            parameters: ``[k, ...]`` leaves. Client j's loss depends on row j alone.
            sgd: learning rate and weight decay of a step that the parameters then take; the losses come without a
                graph of autograd.
        """
        key = (
            sgd,
            tuple((name, value.shape, value.dtype) for name, value in inputs.items()),
            tuple(parameter.data_ptr() for parameter in parameters),
            len(parameters[0]),
        )
        found = self._graphs.pop(key, None)
        if found is None:
            self._asked[key] += 1
            if key in self._refused or self._asked[key] < self._worth:
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                oldest = next(iter(self._graphs))
                del self._graphs[oldest], self._asked[oldest]
            found = _captured(compute, inputs, parameters, sgd)
            if found is None:
                self._refused.add(key)
                return None
        self._graphs[key] = found  # the last one used is the last to go
        return found(inputs)


def _captured(
    compute: Compute, inputs: Inputs, parameters: Sequence[Tensor], sgd: tuple[float, float] | None
) -> GraphedStep | None:
    """Capture a step; None if that is not possible.

    A graph would repeat the random numbers that a step draws by itself. A step that waits for the device, or whose
    memory does not fit twice, cannot be captured.
    """
    device = parameters[0].device
    before, stream = torch.cuda.get_rng_state(device), torch.cuda.current_stream(device)
    step = GraphedStep(compute, inputs, parameters, sgd)
    try:
        step.warm_up()
        if not torch.equal(before, torch.cuda.get_rng_state(device)):
            torch.cuda.set_rng_state(before, device)
            return None
        step.capture()
    except RuntimeError as error:  # a step that cannot be computed at all fails again without a graph
        torch.cuda.set_stream(stream)
        torch.cuda.set_rng_state(before, device)
        _log.info("local steps are computed without a CUDA graph: %s", str(error).partition("\n")[0])
        return None
    return step


class GraphedStep:
    """One captured step: losses, and their gradients or a step of SGD.

    Args:
        compute: see :meth:`Graphs.losses`.
        inputs: of a step like those to come.
        parameters: leaves ``[k, ...]`` whose memory stays at its place.
        sgd: see :meth:`Graphs.losses`.
    """

    def __init__(
        self,
        compute: Compute,
        inputs: Inputs,
        parameters: Sequence[Tensor],
        sgd: tuple[float, float] | None,
    ) -> None:
        self._compute: Compute | None = compute
        self.parameters = list(parameters)
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        self._graph = torch.cuda.CUDAGraph()
        self.losses = torch.empty(0)
        self.gradients: list[Tensor | None] = []
        self.replays = 0
        self._sgd = sgd

    def warm_up(self) -> None:
        """Let libraries choose their kernels and take their memory, which a capture does not allow.

        Parameters are left as they were.
        """
        before = [] if self._sgd is None else [p.detach().clone() for p in self.parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._both()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            for parameter, value in zip(self.parameters, before, strict=False):
                parameter.detach().copy_(value)

    def capture(self) -> None:
        """Record the kernels of a step."""
        # By default another thread's calls, such as those of NCCL's watchdog, would end the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.losses, self.gradients = self._both()
        # Or else the step and its engine would refer to each other, and a trial's would keep their memory.
        self._compute = None

    def _both(self) -> tuple[Tensor, list[Tensor | None]]:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        # With a cache, all replays would use the cast weights of the captured step.
        casting = nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype, cache_enabled=False)
        with torch.enable_grad(), casting:
            losses = cast(Compute, self._compute)(self._inputs)
            found = torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)
        if self._sgd is not None:
            sgd_step(self.parameters, found, *self._sgd)
            return losses.detach(), []
        return losses.detach(), list(found)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Replay the step with other inputs.

        Returns:
            The losses ``[k]`` before the step of SGD; without such a step, with a graph of autograd.
        """
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        self.replays += 1
        if self._sgd is not None:
            return self.losses.clone()
        losses: Tensor = _Replayed.apply(self, *self.parameters)
        return losses


class _Replayed(torch.autograd.Function):
    """The losses of a replay as a function of the parameters, whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, step: GraphedStep, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.replay = step, step.replays
        return step.losses.clone()

    @staticmethod
    def backward(ctx: Any, *of_losses: Tensor) -> tuple[Tensor | None, ...]:
        step: GraphedStep = ctx.step
        if step.replays != ctx.replay:
            raise RuntimeError("the gradients of an earlier step are gone: a later one took their memory")
        (factor,) = of_losses
        scaled = [g if g is None else g * factor.to(g.dtype).view(-1, *[1] * (g.ndim - 1)) for g in step.gradients]
        return (None, *scaled)
