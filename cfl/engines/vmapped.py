"""Computes all clients of a cohort in one stacked forward and backward pass, by torch.func.vmap."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.engines.base import Compile, Engine, Step, StepContext
from cfl.engines.chain import Chain
from cfl.engines.cohort import Cohort
from cfl.engines.graphs import Graphs
from cfl.engines.joined import behind
from cfl.engines.objective import hook_at_fault
from cfl.engines.one_pass import check_shape
from cfl.engines.stacked_layers import StackedLayers
from cfl.engines.updates import sgd_step
from cfl.models.batchnorm import batch_mask
from cfl.models.dropout import DropoutMasks, dropout_masks
from cfl.models.functional import call_with
from cfl.models.step_draws import StepDraws
from cfl.runtime.errors import EngineCannot

_NO_VMAP = re.compile("vmap|batching rule|match the broadcast shape|doesn't have storage", re.IGNORECASE)
"""Words in torch's errors about operations that it cannot compute for several models at once."""


class VmapEngine(Engine):
    """Computes any network on any device. A single client is computed in the ordinary way, without vmap.

    Args:
        network: the architecture; its own parameters are not touched.
        input_shape: ``(C, H, W)``.
        compile: torch.compile mode, or None.
        eager: see :class:`cfl.engines.graphs.Graphs`.
    """

    def __init__(
        self,
        network: nn.Module,
        input_shape: tuple[int, int, int],
        compile: Compile | None,
        eager: bool,
    ) -> None:
        self.network = network
        on_cuda = next(network.parameters()).device.type == "cuda"
        self._graphs = Graphs(eager) if on_cuda and compile is None and not list(network.buffers()) else None
        # On CUDA a small step takes mostly passes over the weights; on CPUs torch's own optimizer is as fast.
        self.fuses_sgd = self._graphs is not None
        self._stacked_layers = on_cuda and compile is None
        self._is_chain = self._stacked_layers and Chain.of(network) is not None
        self._sgd: tuple[float, float] | None = None
        self._first_sgd: tuple[float, float] | None = None
        self.masks = DropoutMasks(network, input_shape)
        self.draws = StepDraws(network)
        self._hooked = next((n for n, m in network.named_modules() if m._backward_hooks or m._backward_pre_hooks), None)
        self._has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
        self._together: Any = self._all_losses
        if compile is not None:
            self._together = torch.compile(self._all_losses, mode=None if compile == "default" else compile)

    def losses(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> Tensor:
        """As :meth:`Engine.losses`, with a graph of autograd unless the optimizer's step is taken.

        Raises:
            EngineCannot: ``vmap`` has no way to compute the network or a method's part of the loss, or would not call
                the network's hooks.
        """
        if self._hooked is not None and len(batch.x) > 1:
            valid = "schedule.cohort_width: 1, engine.kind: workers, or no hooks, which vmap does not call"
            raise EngineCannot("model.network", f"hooks of the backward pass of {self._hooked!r}", valid)
        try:
            return self._losses(Step(cohort, batch, context))
        except RuntimeError as error:
            if _NO_VMAP.search(str(error)) is None:
                raise
            reason = str(error).splitlines()[0].partition(". ")[0].removesuffix(".")
            key, value, what = "model.network", type(self.network).__name__, "a network"
            if (blamed := hook_at_fault(error, self.network)) is not None:
                method, hook = blamed
                key, value, what = method.key, f"{type(method).__name__}.{hook}", "operations"
            valid = f"schedule.cohort_width: 1, engine.kind: workers where they work, or {what} for vmap ({reason})"
            raise EngineCannot(key, value, valid) from error

    def _losses(self, step: Step) -> Tensor:
        cohort, batch, context = step
        parameters = list(cohort.parameters.values())
        self._sgd = None
        if context.keeps_logits or context.objective.joins(batch):
            return self._stepped(self._joined_losses(step), parameters, context)
        x, outputs = batch.x, cohort.outputs_in_loss(batch.task)
        inputs = {"x": x, "y": batch.y, **({"mask": batch.mask} if batch.padded else {})}
        inputs |= {} if outputs is None else {"outputs": outputs}
        if self.masks:
            inputs["keys"] = step.dropout_keys(cohort.clients)
        draws = self.draws.draw(cohort.round, cohort.clients, batch.step, x.device)
        inputs |= {f"draw {name}": value for name, value in draws.items()}
        compute = partial(self._of_inputs, cohort)
        self._first_sgd = self._first_sgd or context.fused_sgd
        # A CUDA graph has a fixed learning rate. If the rate changes in later rounds, graphs compute gradients only.
        self._sgd = context.fused_sgd if context.fused_sgd == self._first_sgd else None
        if self._graphs is not None:
            losses = self._graphs.losses(compute, inputs, parameters, self._sgd)
            if losses is not None:
                return losses if self._sgd is not None else self._stepped(losses, parameters, context)
        return self._stepped(compute(inputs), parameters, context)

    def _stepped(self, losses: Tensor, parameters: Sequence[Tensor], context: StepContext) -> Tensor:
        """Return the losses, after the optimizer's step if that is left to the engine."""
        if context.fused_sgd is None:
            return losses
        gradients = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            check_shape(parameter, gradient)
        sgd_step(parameters, gradients, *context.fused_sgd)
        return losses.detach()

    def _of_inputs(self, cohort: Cohort, inputs: Mapping[str, Tensor]) -> Tensor:
        """Losses ``[k]`` as a function of tensors only: samples, their masks, keys of dropout masks, and draws."""
        x, y, mask, outputs = inputs["x"], inputs["y"], inputs.get("mask"), inputs.get("outputs")
        dropped = {name.removeprefix("draw "): value for name, value in inputs.items() if name.startswith("draw ")}
        if "keys" in inputs:
            dropped |= self.masks.draw(inputs["keys"], x.shape[1], next(iter(cohort.data.values())).dtype)
        if len(x) == 1:
            parameters, buffers, masks = _first(cohort.parameters, cohort.buffers, dropped)
            own_mask = None if mask is None else mask[0]
            return self._loss(parameters, buffers, masks, x[0], y[0], own_mask, outputs).view(1)
        losses: Tensor = self._together(cohort.parameters, cohort.buffers, dropped, x, y, mask, outputs)
        return losses

    def _layers(self) -> AbstractContextManager[object]:
        """Context for computing layers: :class:`StackedLayers` on CUDA, unless autocast chooses data types.

        Maps have the channels last, and weights take their step at once, in chains only: their layers are known, and
        each weight is used once.
        """
        if not self._stacked_layers or torch.is_autocast_enabled("cuda"):
            return nullcontext()
        return StackedLayers(self._is_chain, self._sgd if self._is_chain else None)

    def backward(self, total: Tensor, cohort: Cohort) -> None:
        """Compute gradients by autograd, unless the optimizer's step has been taken."""
        if total.requires_grad:
            total.backward()
            _separate(cohort.parameters.values())

    def _joined_losses(self, step: Step) -> Tensor:
        """Losses of a step with added samples, a loss that methods change, or kept logits.

        They are not compiled, because samples and loss differ from step to step.
        """
        cohort, batch, context = step
        k, count = batch.mask.shape
        x, samples = batch.joined_samples(cohort.train_outputs)
        own = step.dropout_masks(self.masks, range(k), count)
        dropped = behind(own, step.added_masks(self.masks, range(k)), 1)
        dropped |= self.draws.draw(cohort.round, cohort.clients, batch.step, x.device)

        def loss(
            parameters: Mapping[str, Tensor],
            buffers: Mapping[str, Tensor],
            dropped: dict[str, Tensor],
            x: Tensor,
            samples: Samples,
        ) -> tuple[Tensor, ...]:
            padded = samples.mask if self._has_batchnorm else None
            with dropout_masks(self.network, dropped), batch_mask(self.network, padded):
                return call_with(self.network, {**parameters, **buffers}, of_network, x, samples)

        def of_network(x: Tensor, samples: Samples) -> tuple[Tensor, ...]:
            if context.keeps_logits:
                return context.objective.with_logits(self.network, x, samples)
            return (context.objective.of_network(self.network, x, samples),)

        if k == 1:
            found = loss(*_first(cohort.parameters, cohort.buffers, dropped), x[0], samples.row(0))
            found = tuple(value.unsqueeze(0) for value in found)
        else:
            mapped = vmap(loss, in_dims=(0, 0, 0, 0, samples.axes), randomness="different")
            with self._layers():
                found = mapped(cohort.parameters, cohort.buffers, dropped, x, samples)
        self.logits = found[1] if context.keeps_logits else None
        return found[0]

    def _all_losses(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dropped: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
    ) -> Tensor:
        axes = (0, 0, 0, 0, 0, None if mask is None else 0, None)
        # Random numbers that the network itself draws, other than counted dropout, differ between clients.
        mapped = vmap(self._loss, in_dims=axes, randomness="different")
        with self._layers():
            losses: Tensor = mapped(parameters, buffers, dropped, x, y, mask, outputs)
        return losses

    def _loss(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dropped: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
    ) -> Tensor:
        with dropout_masks(self.network, dropped), batch_mask(self.network, mask if self._has_batchnorm else None):
            logits = functional_call(self.network, {**parameters, **buffers}, (x,))
        if outputs is not None:
            logits = logits.masked_fill(~outputs, -torch.inf)
        if mask is None:
            return F.cross_entropy(logits, y)
        losses = F.cross_entropy(logits, y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)


def _separate(parameters: Iterable[Tensor]) -> None:
    """Copy each gradient that shares memory with an earlier one, because methods and clipping change them in place.

    Where a weight is the sum of two parameters, both have the same gradient. If the parameters are used through views,
    as for a single client (:func:`_first`), autograd stores it once.
    """
    seen: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        memory = 0 if gradient is None else gradient.untyped_storage().data_ptr()
        if gradient is not None and memory in seen:
            parameter.grad = gradient.clone()
        elif memory:  # 0 where there are no numbers
            seen.add(memory)


def _first(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """A single client's parameters, buffers and masks, without the leading axis of size 1."""

    def first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: values[0] for name, values in tensors.items()}

    # Parameters by ``view``, which is faster than selection; in small networks this matters.
    return {n: p.view(p.shape[1:]) for n, p in parameters.items()}, first(buffers), first(masks)
