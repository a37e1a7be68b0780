"""What a method may do beside the moments of :class:`cfl.methods.base.Method`.

A capability is a Protocol. A method has it by having its members (:func:`has`), and says nothing else of it: what
the checks and the engines want to know is derived (:mod:`cfl.methods.composition`). Attributes with a default need
not be there.

A cohort is k clients that train side by side, its tensors are stacked, ``[k, ...]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Protocol

from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.engines.right_factors import RightFactor


class NetworkExtension(Protocol):
    """Adds parameters to the network that has just been made, before anybody has seen it (APD)."""

    def extend_network(self, network: nn.Module) -> None:
        """Change the network. Torch's random numbers are seeded by the run's seed; drawing has no effect elsewhere."""


class PersonalParameters(Protocol):
    """Parameters and buffers that stay on their client, kept between rounds and never sent (personal layers, APD)."""

    def keeps_local(self, name: str) -> bool:
        """Whether the parameter or buffer of this name stays."""


class PersonalModel(Protocol):
    """A client answers its tasks by models of its own (APD, FedWeIT, single-task models)."""

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which a client answers test images of one of its tasks.

        Args:
            client: its id.
            task: its place in the client's own sequence, from 0; may be one that the client has yet to learn. None
                where the client is not told: it answers with what it has for the task that it is at.
            model: the client's parameters and buffers by name, in the server's order; not to be changed.
        """


class TestedOtherwise(Protocol):
    """A model fresh from local training is not yet the one its client answers with (APD prunes it)."""

    def as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which the client answers images of its present task; ``model`` is not to be changed."""


class Predictor(Protocol):
    """Scores test images in the network's place (iCaRL: nearest class means)."""

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores ``[B, O]``, or None to leave the network's logits alone; the first method that has some counts.

        Args:
            task: whose images they are, for those who may know it.
            model: parameters and buffers by name, as the task's tests compute with them.
            x: ``[B, C, H, W]``.
        """


class TaskModel(Protocol):
    """The global model answers each task in a form of its own (RGO permutes features)."""

    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which images of ``task`` are tested; ``model`` is in the server's order, not to be changed."""


# Local steps.


class Replay(Protocol):
    """Takes samples from the clients' buffers, ``context.buffer`` (A-GEM, DER, Fed-A-GEM)."""

    replays_logits: bool
    """Whether the buffers keep logits with the samples. On the class: it is asked without an instance."""


class BatchExtension(Protocol):
    """Adds samples to a local step (replay), or what a loss wants to know of its samples."""

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """The step, with ``batch.with_added`` samples or ``batch.with_extras``; asked before anything is computed."""


class SampleWeights(Protocol):
    """Weighs a step's samples as a function of its logits (GLFC, iCaRL).

    ``replaces_own_loss`` (False): it drops the cross-entropy of the step's own samples, and ``sample_loss`` puts a term
    in its place. ``reweighs_added_only`` (False): it does nothing to a step that has its own samples alone.
    """

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """Factors ``[N]`` of one client's cross-entropies from those so far.

        Runs under ``torch.func.vmap`` and is differentiated, so detach what shall not be.

        Args:
            weights: ``[N]``; see :class:`cfl.data.samples.ExtraSamples`.
            logits: ``[N, O]``.
            samples: of the same N samples.
        """


class SampleLoss(Protocol):
    """Adds a term of the logits to a client's loss (DER, CFeD). ``reweighs_added_only``: as for sample weights."""

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """A term ``[]`` of one client's loss; arguments as :meth:`SampleWeights.sample_weights`, also under vmap."""


class ForwardPass(Protocol):
    """Makes logits and a term of the loss in one pass (L2P); at most one method of a run may.

    ``passes_forward`` (True): False where its options switch that off.
    """

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits ``[N, O]`` of one client's step, which go on to all other terms, and a term ``[]`` of its loss;
        arguments as for :meth:`LocalObjective.local_loss`."""


class LocalObjective(Protocol):
    """Replaces a client's whole loss (FedCIL); at most one method of a run may."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """The loss ``[]`` of one client's step. Under ``torch.func.vmap``, so that random numbers come with the batch.

        Args:
            network: holds the client's parameters and buffers; in training mode.
            x: ``[N, C, H, W]``.
            samples: of the same N samples, the step's own and added ones.
        """


class Penalty(Protocol):
    """Adds a term that does not depend on samples to the loss, by autograd. A quadratic one is a Regularizer."""

    def penalty(self, cohort: Cohort) -> Tensor | None:
        """A term ``[k]``, one number for every client, or None."""


class Regularizer(Protocol):
    """Pulls weights towards anchors: every local step adds ``s (w - a)`` to the gradient (FedProx, EWC, FedCurv).

    ``pulls_with`` (""): the option that says how hard, for the message when training diverges.
    """

    def pulls(self, cohort: Cohort) -> Mapping[str, Pull]:
        """Parameter name -> s and a of the clients that have just started, until the next ones do; empty: none."""


class RightMultiplication(Protocol):
    """Multiplies gradients ``G [o, d]`` of some weights from the right in every local step (GPM, RGO)."""

    def right_factors(self, cohort: Cohort) -> Mapping[str, RightFactor]:
        """Weight name -> the factors ``[d, d]`` of the clients that have just started; empty: none."""


class GradientTransform(Protocol):
    """Changes the gradients of a local step, between backward and the optimizer (A-GEM, Fed-A-GEM, SCAFFOLD).

    ``kind`` (``add``): ``project`` where steps must not be turned after it, as clipping by value would; ``look`` where
    it leaves gradients as they are.
    ``shared_only`` (False): it leaves alone gradients of parameters that stay on their client.
    ``changes_gradients`` (True): False while it has nothing to do, so that an engine need not leave gradients behind;
    asked when clients have started, and before the first ones, when an engine is chosen.
    """

    def adjust_gradients(self, cohort: Cohort) -> None:
        """Change ``cohort.gradients`` (name -> ``[k, ...]``) in place."""


class LearningRateFactors(Protocol):
    """Clients take the optimizer's steps with learning rates of their own (LearningRateDecay)."""

    def step_factors(self, cohort: Cohort) -> Tensor | None:
        """Factors ``[k]`` of the learning rate for the clients that have just started, or None for 1. Only for
        :data:`cfl.engines.scaled_steps.LINEAR_OPTIMIZERS`; not part of ``cohort.lr``."""


class FrozenParameters(Protocol):
    """Parameters that no client moves while others train (FOT's first layer)."""

    def frozen_parameters(self, cohort: Cohort) -> Collection[str]:
        """Their names for the clients that have just started. The optimizer is given no gradient of them, so that
        weight decay and momentum do not move them either."""


# The server.


class ServerTransform(Protocol):
    """Changes the global step before it is taken (FOT projects it)."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """The step to take, from the one so far: parameter name -> ``[...]``, all of them."""


class ServerTraining(Protocol):
    """Changes the global model once more in ``end_round``, behind everybody's ``transform_step`` (CFeD, FedCIL)."""

    moves_model_after_round: bool
    """False where its options switch that off."""


CHANGING_GRADIENTS = (Regularizer, RightMultiplication, GradientTransform)
"""Capabilities of methods that work on gradients."""
IN_LOCAL_STEPS = (
    BatchExtension,
    SampleWeights,
    SampleLoss,
    ForwardPass,
    LocalObjective,
    Penalty,
    *CHANGING_GRADIENTS,
    LearningRateFactors,
)
"""Capabilities that make local steps cost more."""


@cache
def members(capability: Any) -> tuple[str, ...]:
    """Names that a class must have to have a capability."""
    return tuple(n for n in {**vars(capability), **vars(capability).get("__annotations__", {})} if n[0] != "_")


def has(method: object, *any_of: Any) -> bool:
    """Whether a method, or a class of methods, has one of some capabilities.

    Members are looked for by name, in the method and its class; no property of the method runs.
    """
    kind = method if isinstance(method, type) else method.__class__
    own = () if isinstance(method, type) else vars(method)
    return any(all(m in own or hasattr(kind, m) for m in members(capability)) for capability in any_of)


def crosses_tasks(method: object) -> bool:
    """Whether clients may compute with samples of earlier tasks, or with what stands for them, while at a later one."""
    return has(method, Replay, BatchExtension)


def moves_model_after_round(method: object) -> bool:
    """See :class:`ServerTraining`."""
    return bool(getattr(method, "moves_model_after_round", False))


def leaves_other_gradients(method: object) -> bool:
    """Whether a method may leave other gradients than it was given."""
    return has(method, *CHANGING_GRADIENTS) and getattr(method, "kind", "add") != "look"
