"""The loss that a client minimises in a local step, as a function of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.engines.cross_entropy import weighted_cross_entropy
from cfl.metrics.measure import ACCURACY, Measure
from cfl.models.base import Network
from cfl.runtime.errors import ConfigError


class LossMethod(Protocol):
    """A method that changes clients' losses by hooks of the protocols below, see :mod:`cfl.methods.capabilities`."""

    @property
    def key(self) -> str:
        """The key of the method's options in a configuration."""

    @property
    def task_free(self) -> bool:
        """Whether tasks must be hidden from the method."""


class Weigher(LossMethod, Protocol):
    """A method that weighs samples."""

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """Return the factors ``[N]`` of one client's cross-entropies to use instead of ``weights``."""


class Term(LossMethod, Protocol):
    """A method that adds a term to the loss."""

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """A term ``[]`` of one client's loss."""


class ForwardPass(LossMethod, Protocol):
    """A method that computes the logits."""

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits ``[N, O]`` of one client's step and a term ``[]`` of its loss."""


class Whole(LossMethod, Protocol):
    """A method that replaces the loss."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """The whole loss ``[]`` of one client's step."""


@dataclass(frozen=True)
class LossParts:
    """The methods that change clients' losses, grouped by their hooks, each group in the order of the methods.

    Attributes:
        weighers: weigh samples.
        terms: add terms.
        whole: replaces the whole loss.
        passing: computes the logits.
        own_alone_plain: whether weighers and terms have no effect on a step without added samples.
    """

    weighers: tuple[Weigher, ...] = ()
    terms: tuple[Term, ...] = ()
    whole: Whole | None = None
    passing: ForwardPass | None = None
    own_alone_plain: bool = True


NOTHING = LossParts()


class Objective:
    """A client's loss: a weighted sum of its samples' losses, plus the terms of methods.

    ``sum_i w_i L(z_i, y_i) + sum over methods of sample_loss(z)``. For the step's own n samples ``w_i`` is ``1/n``,
    times ``own_factor`` if a method gives one. For added samples the method gives ``w_i``. Weighers may change all
    ``w_i``. ``L`` is the cross-entropy if clients classify. It leaves out the logits of outputs that a sample's task
    does not use.

    Args:
        parts: the methods that change the loss.
        measure: gives the loss of a sample (:meth:`cfl.metrics.base.Measure.losses`).

    Attributes:
        plain: whether the loss is the weighted cross-entropy alone, with weights that do not depend on logits.
        of_logits: whether the loss is a function of the logits, so that only its gradient by them is needed.
    """

    def __init__(self, parts: LossParts = NOTHING, measure: Measure = ACCURACY) -> None:
        self._parts, self.measure = parts, measure
        self.of_logits = measure.by_outputs and not (parts.whole or parts.passing)
        self.plain = measure.is_cross_entropy and self.of_logits and not (parts.weighers or parts.terms)
        self._own_plain = measure.is_cross_entropy and self.of_logits and parts.own_alone_plain

    def of_network(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """One client's loss ``[]`` under a network that holds its parameters.

        Args:
            network: in training mode.
            x: ``[N, C, H, W]``.
            samples: of the same N samples.

        Raises:
            TypeError, ValueError: a method's hook returned something else than a tensor of its shape.
            ConfigError: a method's hook returned a value without gradient, which trains nothing.
        """
        if (whole := self._parts.whole) is not None:
            loss = _ask(whole, "local_loss", network, x, _shown(whole, samples))
            return _trains(_checked(loss, [], whole, "local_loss"), whole, "local_loss")
        return self._of_pass(network, x, samples)[0]

    def with_logits(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """The loss of :meth:`of_network`, and the detached logits ``[N, O]``; only if no method replaces the loss."""
        loss, logits = self._of_pass(network, x, samples)
        return loss, logits.detach()

    def _of_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        if (passing := self._parts.passing) is None:
            logits: Tensor = network(x)
            return self(logits, samples, x), logits
        found = _ask(passing, "forward_pass", network, x, _shown(passing, samples))
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"{passing.key}: forward_pass gives {type(found).__name__}, not (logits, term)")
        classes = cast(Network, network).num_outputs if self.measure.is_cross_entropy else None
        wanted = None if classes is None else [len(samples.y), classes]
        logits = _checked(found[0], wanted, passing, "forward_pass's logits")
        term = _checked(found[1], [], passing, "forward_pass's term")
        if not _is_zero_on_cpu(term):
            _trains(term, passing, "forward_pass's term")
        loss = self(logits, samples, x) + term
        return _trains(loss, passing, "forward_pass"), logits

    def joins(self, batch: CohortBatch) -> bool:
        """Whether a step's loss may differ from the mean cross-entropy of the step's own samples."""
        return batch.joined or not self._own_plain

    def __call__(self, logits: Tensor, samples: Samples, x: Tensor | None = None) -> Tensor:
        """One client's loss ``[]``.

        Args:
            logits: ``[N, O]``.
            samples: of the same N samples.
            x: network inputs ``[N, C, H, W]``; used only by losses that are not :attr:`of_logits`.
        """
        losses = self.measure.losses(logits, samples.y, samples.allowed, x)
        # Not of the logits' type: in mixed precision they are in half precision, and the losses are not.
        weights = samples.weights.to(torch.promote_types(losses.dtype, torch.float32))
        for weigher in self._parts.weighers:
            found = _ask(weigher, "sample_weights", weights, logits, _shown(weigher, samples))
            weights = _checked(found, list(weights.shape), weigher, "sample_weights")
        losses = weights * losses
        # Not a product with the mask, because losses of padded samples may be infinite.
        loss = torch.where(samples.mask, losses, torch.zeros_like(losses)).sum()
        for term in self._parts.terms:
            found = _checked(_ask(term, "sample_loss", logits, _shown(term, samples)), [], term, "sample_loss")
            if debug_unwrap(logits).requires_grad and not _is_zero_on_cpu(found):
                _trains(found, term, "sample_loss")
            loss = loss + found
        return loss

    def with_gradient(self, logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """The loss, which must be :attr:`of_logits`, and its gradient by the logits.

        A :attr:`plain` loss has its gradient by formula, any other by autograd.

        Args:
            logits: ``[N, O]`` of one client, or ``[m, N, O]`` of several; may be changed.
            samples: of the same samples.

        Returns:
            ``[]`` or ``[m]`` losses, and gradients of the logits' shape.
        """
        if self.plain:
            return weighted_cross_entropy(logits, samples)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = (
                self(leaf, samples) if logits.ndim == 2 else torch.vmap(self, in_dims=(0, samples.axes))(leaf, samples)
            )
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient


def _shown(method: LossMethod, samples: Samples) -> Samples:
    return samples.without_tasks() if method.task_free else samples


def _ask(method: LossMethod, hook: str, *given: object) -> Any:
    """Call a method's hook; :func:`hook_at_fault` finds this frame in the traceback of an error."""
    return getattr(method, hook)(*given)


def hook_at_fault(error: BaseException, network: nn.Module) -> tuple[LossMethod, str] | None:
    """The method and the name of its hook that raised an error; None if the network raised it, or something else."""
    parts, found = {id(module) for module in network.modules()}, None
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is _ask.__code__:
            found = frame.f_locals["method"], frame.f_locals["hook"]
        elif id(frame.f_locals.get("self")) in parts:
            found = None
    return found


def _checked(found: Any, shape: list[int] | None, method: LossMethod, hook: str) -> Tensor:
    """Return what a method's hook returned for one client; refuse other shapes, which torch would broadcast.

    Any shape is right if ``shape`` is None."""
    if not isinstance(found, Tensor):
        wanted = "" if shape is None else f" of shape {shape}"
        raise TypeError(f"{method.key}: {hook} is {found!r:.60}, not a tensor{wanted}")
    if shape is not None and list(found.shape) != shape:
        raise ValueError(f"{method.key}: {hook} has shape {list(found.shape)}, not {shape}, as for one client")
    return found


def _trains(found: Tensor, method: LossMethod, hook: str) -> Tensor:
    """Return a part of the loss; refuse one without gradient.

    Raises:
        ConfigError: naming the method and the hook.
    """
    if not debug_unwrap(found).requires_grad:  # a tensor of vmap does not tell
        valid = "what is computed from the network without detach, item or no_grad: else it trains nothing"
        raise ConfigError(method.key, f"{type(method).__name__}.{hook} without gradient", valid)
    return found


def _is_zero_on_cpu(found: Tensor) -> bool:
    """Whether a term has no effect, as one that has nothing to remember yet. On an accelerator, every constant counts
    as such, because the program would have to wait for its value."""
    plain = debug_unwrap(found)
    return not plain.requires_grad and (plain.device.type != "cpu" or not bool(plain.any()))
