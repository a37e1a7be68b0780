"""What a client minimises in a local step, as a function of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.metrics.measure import ACCURACY, Measure


class LossMethod(Protocol):
    """A method with a say in clients' losses, by any of these; :mod:`cfl.methods.capabilities` explains each."""

    @property
    def key(self) -> str:
        """Where its options stand in a configuration."""

    @property
    def task_free(self) -> bool:
        """Whether it must be shown handles in the place of tasks."""


class Weigher(LossMethod, Protocol):
    """Weighs samples."""

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """Map the factors ``[N]`` of one client's cross-entropies to those to use."""


class Term(LossMethod, Protocol):
    """Adds a term."""

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """A term ``[]`` of one client's loss."""


class Pass(LossMethod, Protocol):
    """Makes the logits."""

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits ``[N, O]`` of one client's step and a term ``[]`` of its loss."""


class Whole(LossMethod, Protocol):
    """Replaces the loss."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """The whole loss ``[]`` of one client's step."""


@dataclass(frozen=True)
class LossParts:
    """What methods have to say in clients' losses, each kind in the order of the methods.

    Attributes:
        weighers: weigh samples.
        terms: add terms.
        whole: replaces the whole loss.
        passing: makes the logits.
        own_alone_plain: whether weighers and terms do nothing to a step that has its own samples alone.
    """

    weighers: tuple[Weigher, ...] = ()
    terms: tuple[Term, ...] = ()
    whole: Whole | None = None
    passing: Pass | None = None
    own_alone_plain: bool = True


NOTHING = LossParts()


class Objective:
    """The measure's losses, weighted, reweighted by methods, plus methods' own terms.

    ``sum_i w_i L(z_i, y_i) + sum over methods of sample_loss(z)`` with ``w_i = 1/n`` for the step's own n samples and
    what methods say for those that they add. ``L`` is the cross-entropy where clients classify; logits of outputs that
    a sample's task does not use are left out of it.

    Args:
        parts: what methods have to say.
        measure: what a sample's loss is (:meth:`cfl.metrics.base.Measure.losses`).

    Attributes:
        plain: whether the loss is the weighted cross-entropy alone, with weights that do not depend on logits.
        of_logits: whether the loss is a function of the logits, so that who has its gradient by them needs no more.
    """

    def __init__(self, parts: LossParts = NOTHING, measure: Measure = ACCURACY) -> None:
        self.parts, self.measure = parts, measure
        self.weighers, self.terms = parts.weighers, parts.terms
        self._whole, self._passing = parts.whole, parts.passing
        self.of_logits = measure.by_outputs and not (parts.whole or parts.passing)
        self.plain = measure.is_cross_entropy and self.of_logits and not (self.weighers or self.terms)

    def of_network(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """One client's loss ``[]`` under a network that holds its parameters.

        Args:
            network: in training mode.
            x: ``[N, C, H, W]``.
            samples: of the same N samples.

        Raises:
            TypeError, ValueError: a method's hook returned something else than a tensor of its shape.
        """
        if self._whole is not None:
            loss = self._whole.local_loss(network, x, _shown(self._whole, samples))
            return _checked(loss, [], self._whole, "local_loss")
        return self._of_pass(network, x, samples)[0]

    def with_logits(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """As :meth:`of_network`, and the logits ``[N, O]``, detached; only where no method replaces the loss."""
        loss, logits = self._of_pass(network, x, samples)
        return loss, logits.detach()

    def _of_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        if self._passing is None:
            logits: Tensor = network(x)
            return self(logits, samples, x), logits
        logits, term = self._passing.forward_pass(network, x, _shown(self._passing, samples))
        return self(logits, samples, x) + _checked(term, [], self._passing, "forward_pass's term"), logits

    def joins(self, batch: CohortBatch) -> bool:
        """Whether a step's loss is anything else than the mean cross-entropy of the step's own samples."""
        return (
            batch.joined
            or not self.measure.is_cross_entropy
            or self._whole is not None
            or self._passing is not None
            or not self.parts.own_alone_plain
        )

    def __call__(self, logits: Tensor, samples: Samples, x: Tensor | None = None) -> Tensor:
        """One client's loss ``[]``.

        Args:
            logits: ``[N, O]``.
            samples: of the same N samples.
            x: the samples themselves, ``[N, C, H, W]``; only a loss that is not :attr:`of_logits` looks at them.
        """
        weights = samples.weights.to(logits.dtype)
        for weigher in self.weighers:
            found = weigher.sample_weights(weights, logits, _shown(weigher, samples))
            weights = _checked(found, list(weights.shape), weigher, "sample_weights")
        losses = weights * self.measure.losses(logits, samples.y, samples.allowed, x)
        # Not a product with the mask: what is padded may be infinite.
        loss = torch.where(samples.mask, losses, torch.zeros_like(losses)).sum()
        for term in self.terms:
            loss = loss + _checked(term.sample_loss(logits, _shown(term, samples)), [], term, "sample_loss")
        return loss

    def with_gradient(self, logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """The loss, which must be one :attr:`of_logits`, and its gradient by them.

        Written out where it is the weighted cross-entropy alone.

        Args:
            logits: ``[N, O]`` of one client, or ``[m, N, O]`` of several; may be changed.
            samples: of the same samples.

        Returns:
            ``[]`` or ``[m]`` losses, and gradients of the logits' shape.
        """
        if self.plain:
            return weighted_cross_entropy_with_gradient(logits, samples)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = (
                self(leaf, samples) if logits.ndim == 2 else torch.vmap(self, in_dims=(0, samples.axes))(leaf, samples)
            )
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), gradient


def weighted_cross_entropy_with_gradient(logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """``sum_i w_i CE(z_i, y_i)`` over the last sample axis and its gradient ``w_i (softmax(z_i) - onehot(y_i))``.

    Args:
        logits: ``[..., N, O]``.
        samples: of the same samples.
    """
    if samples.allowed is not None:
        logits = logits.masked_fill(~samples.allowed, -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    target = samples.y.unsqueeze(-1)
    losses = log_p.gather(-1, target).squeeze(-1).neg_()
    gradient = log_p.exp_()
    gradient.scatter_add_(-1, target, gradient.new_full((1,), -1.0).expand_as(target))
    weights = samples.weights.to(logits.dtype)
    losses = torch.where(samples.mask, losses * weights, torch.zeros_like(losses))
    return losses.sum(-1), gradient.mul_(torch.where(samples.mask, weights, torch.zeros_like(weights)).unsqueeze(-1))


def _shown(method: LossMethod, samples: Samples) -> Samples:
    return samples.without_tasks() if method.task_free else samples


def _checked(found: Tensor, shape: list[int], method: LossMethod, hook: str) -> Tensor:
    """What a method's hook returned for one client: another shape would be spread over the samples, unnoticed."""
    if not isinstance(found, Tensor):
        raise TypeError(f"{method.key}: {hook} is {found!r}, not a tensor of shape {shape}")
    if list(found.shape) != shape:
        raise ValueError(f"{method.key}: {hook} has shape {list(found.shape)}, not {shape}, as for one client")
    return found
