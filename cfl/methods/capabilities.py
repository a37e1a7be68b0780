"""The capabilities of methods, in addition to the moments of :class:`cfl.methods.base.Method`.

A capability is a Protocol. A method has it by defining its members (:func:`has`); nothing is registered. A class that
sets one of these members to None does not have the capability, even if its base class has it. The checks and the
engines derive everything else from the capabilities (:mod:`cfl.methods.composition`). Attributes with a default in
brackets are declared in :class:`cfl.methods.base.Method`.

A cohort is k clients that train side by side. Its tensors are stacked, ``[k, ...]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.engines.right_factors import RightFactor
from cfl.methods.declared_state import declared_state
from cfl.privacy.release import Noise

if TYPE_CHECKING:
    from cfl.methods.base import Method


class NetworkExtension(Protocol):
    """Adds parameters to the network directly after it was created, before ``setup`` (APD)."""

    def extend_network(self, network: nn.Module) -> None:
        """Add the parameters. Torch's generator is seeded for this call; numbers drawn from it affect nothing else.

        Parameters of the network that require no gradient afterwards are neither trained nor sent."""


class PersonalParameters(Protocol):
    """Keeps parameters and buffers on their client between rounds and never sends them (personal layers, APD)."""

    def keeps_local(self, name: str) -> bool:
        """Whether the parameter or buffer of this name stays on its client."""


class PersonalModel(Protocol):
    """Gives each client its own model for each of its tasks (APD, FedWeIT, single-task models)."""

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that a client uses for test images of one of its tasks; tensors that it leaves out are ``model``'s.

        Args:
            client: the client's id.
            task: number of the task in the client's own sequence, from 0; the client may not have learned it yet. None
                if the task is unknown: the client then uses its model of the current task.
            model: the client's parameters and buffers by name, in the server's order; not to be changed.
        """


class TestedOtherwise(Protocol):
    """Lets LearningRateDecay validate another model than the one after local training (APD prunes it).

    Tests of such a model need :class:`PersonalModel` or :class:`TaskModel`.
    """

    def as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that the client uses for images of its current task; ``model`` is not to be changed."""


class Predictor(Protocol):
    """Computes the scores of test images in place of the network (iCaRL: nearest class means).

    ``identified`` (None): the method's own :class:`cfl.metrics.accuracy.AccuracyMatrix`, made in ``setup``, in which
    evaluations count the images whose highest score is that of an output of their own task.
    """

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Finite scores ``[B, O]``, or None to use the network's logits; the first method that returns scores counts.

        For ``cfl export``, nothing in it may branch on values of tensors.

        Args:
            task: the images' task, for methods that may use it.
            model: parameters and buffers by name, of the model tested on the task.
            x: ``[B, C, H, W]``.
        """


class TaskModel(Protocol):
    """Changes the global model for the tests of each task (RGO permutes features)."""

    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model tested on ``task``, made from ``model``; tensors that it leaves out are ``model``'s.

        ``model`` has the server's order and must not change.
        """


# Local steps.


class Replay(Protocol):
    """Takes samples from the clients' buffers, ``context.buffer`` (A-GEM, DER, Fed-A-GEM)."""

    replays_logits: bool
    """Whether the buffers store logits with the samples. Set it on the class: it is read without an instance."""


class BatchExtension(Protocol):
    """Adds samples to a local step (replay), or extra tensors about the samples for the method's loss."""

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """The step with ``batch.with_added`` samples or ``batch.with_extras``; called before the step is computed."""


class SampleWeights(Protocol):
    """Weights a step's samples as a function of their logits (GLFC, iCaRL).

    ``replaces_own_loss`` (False): True if it drops the cross-entropy of the step's own samples, which ``sample_loss``
    replaces. ``reweighs_added_only`` (False): True if it changes no step without added samples or extras; such a step
    is then computed as in federated averaging, bit for bit.
    """

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """New weights ``[N]`` of one client's cross-entropies, given the current ones.

        Runs under ``torch.func.vmap`` and is differentiated: detach values that must be constant.

        Args:
            weights: ``[N]``; see :class:`cfl.data.samples.ExtraSamples`.
            logits: ``[N, O]``.
            samples: of the same N samples.
        """


class SampleLoss(Protocol):
    """Adds a function of the logits to a client's loss (DER, CFeD). ``reweighs_added_only``: as for SampleWeights."""

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """A term ``[]`` of one client's loss; arguments as :meth:`SampleWeights.sample_weights`, also under vmap.

        A term without gradient must be 0.
        """


class ForwardPass(Protocol):
    """Computes logits and a term of the loss in one pass (L2P); at most one method of a run may have it.

    ``passes_forward`` (True): False if the method's options switch it off.
    """

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits ``[N, O]`` of one client's step, from which all other terms are computed, and a term ``[]`` of its
        loss; arguments as for :meth:`LocalObjective.local_loss`."""


class LocalObjective(Protocol):
    """Replaces a client's whole loss (FedCIL); at most one method of a run may have it."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """The loss ``[]`` of one client's step, with its gradient. Runs under ``torch.func.vmap``: take random numbers
        from the batch.

        Args:
            network: holds the client's parameters and buffers; in training mode.
            x: ``[N, C, H, W]``.
            samples: of the same N samples, the step's own and added ones.
        """


class Penalty(Protocol):
    """Adds a term of the weights to the loss, differentiated by autograd. For a quadratic term use a Regularizer."""

    def penalty(self, cohort: Cohort) -> Tensor | None:
        """A term ``[k]``, one number for every client, or None. A term without gradient must be 0."""


class Regularizer(Protocol):
    """Pulls weights towards anchors: every local step adds ``s (w - a)`` to the gradient (FedProx, EWC, FedCurv).

    ``pulls_with`` (""): name of the option that sets the strength, for the message when training diverges.
    """

    def pulls(self, cohort: Cohort) -> Mapping[str, Pull]:
        """Parameter name -> s and a for the cohort that has just started; empty for no pull."""


class RightMultiplication(Protocol):
    """Multiplies gradients ``G [o, d]`` of some weights from the right in every local step (GPM, RGO)."""

    def right_factors(self, cohort: Cohort) -> Mapping[str, RightFactor]:
        """Weight name -> factors ``[d, d]`` for the cohort that has just started; empty for none."""


class GradientTransform(Protocol):
    """Changes the gradients of a local step, between backward and the optimizer (A-GEM, Fed-A-GEM, SCAFFOLD).

    ``kind`` (``add``): ``project`` if the direction of the step must not change afterwards, as by clipping by value;
    ``look`` if the method reads gradients without changing them.
    ``shared_only`` (False): True if it does not change gradients of parameters that stay on their client.
    ``changes_gradients`` (True): False while the method has nothing to change, so that an engine need not keep
    gradients. The attribute is read when clients have started, and before the first cohort, when an engine is chosen.
    """

    def adjust_gradients(self, cohort: Cohort) -> None:
        """Change ``cohort.gradients`` (name -> ``[k, ...]``) in place.

        They are the gradients of the whole loss, all methods' penalties included, as the methods before have left them,
        with the pulls and right factors of this method applied, and before clipping."""


class LearningRateFactors(Protocol):
    """Gives each client its own learning rate (LearningRateDecay)."""

    def step_factors(self, cohort: Cohort) -> Tensor | None:
        """Factors ``[k]`` of the learning rate for the cohort that has just started, or None for 1. Only for
        :data:`cfl.engines.scaled_steps.LINEAR_OPTIMIZERS`; not included in ``cohort.lr``."""


class FrozenParameters(Protocol):
    """Freezes parameters for all clients (FOT's first layer)."""

    def frozen_parameters(self, cohort: Cohort) -> Collection[str]:
        """Names of the frozen parameters for the cohort that has just started.

        They are sent, and counted, all the same. The optimizer gets no gradient of them, so that weight decay and
        momentum do not move them either. If all parameters are frozen, no local step is computed. Running statistics
        then do not change, replay buffers get no samples, and there is no training loss.
        """


# The server.


class ServerTransform(Protocol):
    """Changes the server's step before it is taken (FOT projects it)."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """The step to take in place of ``step``: parameter name -> ``[...]``, for all parameters."""


# Where tasks end.


class BoundaryFinder(Protocol):
    """Finds where tasks end (FoundBoundaries); at most one method of a run may have it."""

    @property
    def rounds_of_ended(self) -> range | None:
        """The rounds of the task whose end was found after the last round, or None if no end was found."""

    def keeps_in(self, round: int) -> bool:
        """Whether clients compute, in this round, results that methods use once the end of the task is found."""


class FoundTasks(Protocol):
    """Works with tasks whose ends another method finds, after the tasks' data are gone (EWC, FOT). The method is then
    ``task_free``, and ``end_found_task`` is called in place of ``end_task``."""

    def follow_found_tasks(self, finder: BoundaryFinder) -> None:
        """Use the ends of tasks that ``finder`` finds. Called before ``setup``."""

    def end_found_task(self, plan: RoundPlan, rounds: range) -> None:
        """Called after ``end_round`` of the round ``plan`` if the end of a task was found then.

        Args:
            plan: a round of the next task.
            rounds: the rounds of the task that has ended, as found.
        """


# What leaves the clients.


class NoisySums(Protocol):
    """Adds Gaussian noise to sums of messages, or has clients add it (DPFedAvg, FOT's mechanism).

    The ledger counts the noise that the method declares (:mod:`cfl.privacy.ledger`).
    """

    def releases(self, plan: RoundPlan) -> Mapping[str, Noise]:
        """Topic -> noise in its sum, for the sums that the server reads during this round and directly after it.
        Also called for later rounds, with the method's present state."""


class UpdateProtection(Protocol):
    """Bounds what a client's update adds to the sum, and adds noise to the sum (DPFedAvg); at most one method of a run
    may have it."""

    def bounded_updates(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """The messages that clients send in place of ``updates``, parameter name -> ``[k, ...]``. ``updates`` may be
        changed in place. Further entries of the result are summed, too. Every client has the weight 1."""

    def protected_mean(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameter name -> mean update, from the sums of :meth:`bounded_updates`; zeros if no client took part."""


IN_LOCAL_STEPS = (
    BatchExtension,
    SampleWeights,
    SampleLoss,
    ForwardPass,
    LocalObjective,
    Penalty,
    Regularizer,
    RightMultiplication,
    GradientTransform,
    LearningRateFactors,
)
"""Capabilities that make local steps cost more."""


@cache
def members(capability: Any) -> tuple[str, ...]:
    """Names of the members that make up a capability."""
    return tuple(n for n in {**vars(capability), **vars(capability).get("__annotations__", {})} if n[0] != "_")


def has(method: object, *any_of: Any) -> bool:
    """Whether a method, or a class of methods, has at least one of these capabilities.

    Members are looked up by name, in the method and its class; properties of the method are not evaluated.
    """
    return any(all(has_member(method, name) for name in members(capability)) for capability in any_of)


def has_member(method: object, name: str) -> bool:
    """Whether a method, or a class of methods, has a member that is not switched off by None."""
    kind = method if isinstance(method, type) else method.__class__
    return (not isinstance(method, type) and name in vars(method)) or getattr(kind, name, None) is not None


def crosses_tasks(method: object) -> bool:
    """Whether clients may use samples of earlier tasks, or generated ones, while they train on a later task."""
    return has(method, Replay, BatchExtension)


def keeps_state(method: object) -> bool:
    """Whether a method goes on with what it has kept of earlier rounds, learning rates and updates' bounds aside."""
    return bool(declared_state(type(method))) and not has(method, LearningRateFactors, UpdateProtection)


def adds_to_gradients(method: Method) -> bool:
    """Whether a method may change gradients in another way than by factors."""
    looks = () if method.kind == "look" else (GradientTransform,)
    return has(method, Regularizer, *looks)
