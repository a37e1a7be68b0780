"""What a method may do, and when.

A method is a set of plain parameters and a few of these hooks; ``{}`` (no method) is federated averaging. Methods
compose: each hook runs for every method in the order of the ``methods`` mapping, ``decode`` in the reverse one.

One round, as a method sees it::

    begin_task            before the first round of a task: the global model is about to be sent out
    encode                the model as the task's clients compute with it; ``decode`` undoes that
    open_cohort           K clients have received the global model (or loaded their own)
      extend_batch        every local step, before anything is computed: more samples, or more known of them
      forward_pass        every local step, for a method that wants more of it than logits
      weigh, sample_loss  every local step, as a function of the logits; or ``local_loss`` in the place of all that
      observe             every local step, with its logits
      penalty             every local step, added to the client's loss
      adjust_gradients    every local step, between backward and the optimizer
      step_factors        once per cohort: clients that take the optimizer's steps with another learning rate
      frozen_parameters   once per cohort: what its clients leave as they have received it
    close_clients         clients have finished; their updates are about to be sent
    transform_step        the server is about to move the global model
    end_round             the global model has moved
    end_task              after end_round of a task's last round, likewise: extra communication over the same channel
    recall                every test batch, where models are personal: the model that a client answers with
    classify              every test batch: other scores than the network's; the first method that has some counts

Before all that, once: ``extend_network``, ``setup`` and ``check_optimizer``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods.task_free import sealed_federation
from cfl.runtime.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Method:
    """Base of all methods; every hook does nothing.

    Class attributes are declarations that are checked before training:

    Attributes:
        scenarios: scenarios under which the method means something; ``density`` for one that looks neither at labels
            nor at classes.
        individual_uplinks: whether the server must see single clients' messages, which rules out secure aggregation.
        optimizers: names of the torch optimizers under which the method's guarantee holds, or None for any.
        clipping_by_value: whether its guarantee holds where gradients are clipped by value, which turns them.
        common_order: whether all clients must learn the same tasks in the same order.
        own_clocks: whether clients may change tasks each in its own round. A cohort's clients are always at the same
            task and have begun it together; ``begin_task`` and ``end_task`` are then called for each part of a round
            (``RoundPlan.parts``) whose clients begin or end a task, hence several times or, where none of those is
            sampled, never for a task.
        replays: whether the method needs ``federation.buffer``.
        replays_logits: whether the buffer has to keep logits with the samples.
        reweighs_added_only: whether ``weigh`` and ``sample_loss`` do nothing to a step that has its own samples alone.
        replaces_own_loss: whether ``weigh`` drops the cross-entropy of a step's own samples, in whose place
            ``sample_loss`` puts a term; at most one method of a run may say so.
        task_free: whether the method declares to need neither task ids nor boundaries, as general continual learning
            does. It is then shown none: ``begin_task`` and ``end_task`` are not called, and rounds, cohorts and batches
            come without what tells tasks apart (:mod:`cfl.methods.task_free`).
        task_free_with: the setting that makes the method ``task_free``, as its option and value, if one does.
        topics: under which a ``task_free`` method keeps what its clients have between rounds (``federation.clients``),
            beside its name in the configuration. It is shown no others.
        looks_back: whether it takes something from tasks that have ended. With ``data.exposure: joint`` none ever ends:
            all of them are trained on from the first round to the last.
        crosses_tasks: whether clients compute with samples of earlier tasks, or with what stands for them, while they
            are at a later one.
        changes_shared_only: whether it leaves alone what stays on the clients: parameters, and their gradients.
        pulls_with: the option that says how hard the method pulls at weights, if one does: local steps diverge where
            it is too large for the learning rate.
        passes_forward: whether local steps go through :meth:`forward_pass`; at most one method of a run may say so.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain"})
    individual_uplinks: bool = False
    optimizers: ClassVar[frozenset[str] | None] = None
    clipping_by_value: ClassVar[bool] = True
    common_order: ClassVar[bool] = False
    own_clocks: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    replays_logits: bool = False
    reweighs_added_only: bool = False
    replaces_own_loss: bool = False
    task_free: bool = False
    task_free_with: ClassVar[str] = ""
    topics: ClassVar[frozenset[str]] = frozenset()
    looks_back: ClassVar[bool] = False
    crosses_tasks: ClassVar[bool] = False
    changes_shared_only: ClassVar[bool] = False
    pulls_with: ClassVar[str] = ""
    passes_forward: bool = False

    federation: Federation
    name: str = ""
    """Under which the configuration has it, from :meth:`setup` on."""
    source: int = 1
    """Tells the samples that it adds from others' (:class:`cfl.data.samples.Added`), from :meth:`setup` on."""

    def extend_network(self, network: nn.Module) -> None:
        """Add parameters to the network that has just been made, before anybody has seen it.

        Torch's random numbers are seeded here by the run's seed, and what is drawn has no effect elsewhere.
        """

    def setup(self, federation: Federation) -> None:
        """Learn the federation and allocate state; raise ConfigError for settings that cannot work with it."""
        self.federation = federation
        for number, (name, method) in enumerate(federation.methods.items(), 1):
            if method is self:
                self.name, self.source = name, number

    def federation_view(self, federation: Federation, topics: frozenset[str]) -> Federation:
        """What :meth:`setup` is called with: the federation, or of it what a ``task_free`` method is shown.

        Args:
            federation: the whole of it.
            topics: the method's own among what clients keep.
        """
        return sealed_federation(federation, topics, self) if self.task_free else federation

    @classmethod
    def overrides(cls, *hooks: str) -> bool:
        """Whether the class has one of these hooks of its own, not the one that does nothing."""
        return any(getattr(cls, hook) is not getattr(Method, hook) for hook in hooks)

    @property
    def key(self) -> str:
        """Where its options stand in a configuration: under the name it was given, before :meth:`setup` its class's."""
        return f"methods.{self.name or re.sub('(?<=[a-z])(?=[A-Z])', '_', type(self).__name__).lower()}"

    def ours(self, samples: Samples) -> Tensor:
        """Bool, which samples of a step are a client's own or added by this method, padding included."""
        return (samples.source == 0) | (samples.source == self.source)

    def refuse_twins(self, kind: type[Method], instead: str) -> None:
        """Raise ConfigError if two methods of this kind are used, which would share their clients' state.

        Args:
            kind: the class.
            instead: what there may be, e.g. ``one EWC``.
        """
        twins = [name for name, method in self.federation.methods.items() if isinstance(method, kind)]
        if len(twins) > 1:
            raise ConfigError("methods", twins, instead)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Look at one like those that clients will have, before training.

        For what :attr:`optimizers` cannot say, such as options; raise ConfigError for those under which the method's
        guarantee does not hold.
        """

    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client: kept between rounds, never sent."""
        return False

    def begin_task(self, plan: RoundPlan) -> None:
        """``plan`` is a task's first round, and nobody has been sent anything yet; not for ``task_free`` methods."""

    def encode(self, task: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The server's model as the clients and tests of ``task`` compute with it: a permutation of its numbers.

        Args:
            task: from 0; for ``task_free`` methods, here as in :meth:`recall` and :meth:`classify`, sealed.
            tensors: parameters and buffers by name, ``[..., *shape]`` with any leading axes; not to be changed.
        """
        return tensors

    def decode(self, task: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Undo :meth:`encode`; also for updates, since both are linear."""
        return tensors

    def open_cohort(self, cohort: Cohort) -> None:
        """Clients have been given their parameters."""

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add samples to a local step (``batch.with_added``), or what a loss wants to know of the step's own
        (``batch.with_extras``)."""
        return batch

    def weigh(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """Map the factors of one client's N cross-entropies to those to use.

        Runs under ``torch.func.vmap`` and is differentiated, so detach what shall not be.

        Args:
            weights: ``[N]``; see :class:`cfl.data.samples.Added`.
            logits: ``[N, O]``.
            samples: of the same N samples.
        """
        return weights

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """A term ``[]`` of one client's loss; arguments as for :meth:`weigh`, likewise under vmap."""
        return logits.new_zeros(())

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits ``[N, O]`` of one client's step, and a term ``[]`` of its loss that the same pass gives.

        For losses that depend on more of the network than its logits; these go on to all other terms as always. Only
        where :attr:`passes_forward` says so. Runs under ``torch.func.vmap``; arguments as for :meth:`local_loss`.
        """
        raise NotImplementedError

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        """The whole loss ``[]`` of one client's step, in the place of everything that is a function of its logits.

        For methods that train more than a classifier. At most one method of a run may define it. Runs under
        ``torch.func.vmap``, so that random numbers must come with the batch (``extend_batch``, ``with_extras``).

        Args:
            network: holds the client's parameters and buffers; in training mode.
            x: ``[N, C, H, W]``.
            samples: of the same N samples, the step's own and added ones.
        """
        raise NotImplementedError

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` is wanted in the cohort that has just opened; keeping logits costs a little."""
        return True

    def observe(self, cohort: Cohort, batch: CohortBatch, logits: Tensor) -> None:
        """A step has been computed; refused beside a method that replaces the local loss.

        Args:
            cohort: its parameters may have moved already.
            batch: the step.
            logits: ``[k, B, O]`` of the step's own samples, detached; padded ones may be anything.
        """

    def penalty(self, cohort: Cohort) -> Tensor | None:
        """A term ``[k]`` to be added to each client's loss, or None; of another shape it is refused."""
        return None

    def adjust_gradients(self, cohort: Cohort) -> None:
        """Change ``cohort.gradients`` (name -> ``[k, ...]``) in place."""

    def step_factors(self, cohort: Cohort) -> Tensor | None:
        """Factors ``[k]`` of the learning rate with which the clients of the cohort that has opened take their local
        steps, or None for 1. Only for :data:`cfl.engines.scaled_steps.LINEAR_OPTIMIZERS`; not part of ``cohort.lr``.
        """
        return None

    def frozen_parameters(self, cohort: Cohort) -> Collection[str]:
        """Names of the parameters that no client of the cohort that has opened moves.

        The optimizer is given no gradient of these, so that neither weight decay nor momentum moves them either;
        ``cohort.gradients`` is without them.
        """
        return ()

    def close_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """The clients at ``positions`` of the cohort have taken their last local step.

        Without those that have trained to NaN or infinity, who are left out of the round with all that they have.
        """

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the global step (name -> ``[...]``, added to the global parameters) to the one to take."""
        return step

    @property
    def moves_model_after_round(self) -> bool:
        """Whether it changes the global model once more in ``end_round``, behind everybody's ``transform_step``."""
        return False

    def end_round(self, plan: RoundPlan) -> None:
        """The global model has moved."""

    def end_task(self, plan: RoundPlan) -> None:
        """A task's last round is over; not for ``task_free`` methods."""

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which a client answers test images of one of its tasks; for personal models only.

        Args:
            client: its id.
            task: its place in the client's own sequence, from 0; may be one that the client has yet to learn. None
                where the client is not told: it answers with what it has for the task that it is at.
            model: the client's parameters and buffers by name, in the server's order; not to be changed.
        """
        return model

    def as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model fresh from local training, as its client answers images of the present task with it.

        Args:
            model: the client's parameters and buffers by name; not to be changed.
        """
        return model

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores ``[B, O]`` of test images in the place of the network's logits, or None to leave these alone.

        Args:
            task: whose images they are, for those who may know it.
            model: parameters and buffers by name, as the task's tests compute with them.
            x: ``[B, C, H, W]``.
        """
        return None

    def client_storage(self) -> int:
        """Bytes that a client has to keep for this method between rounds, at most, as things are at the end of a run.

        What is kept in another form here (places instead of pixels) counts as what it stands for.
        """
        return 0

    @property
    def tells_tasks_apart(self) -> bool:
        """Whether :meth:`recall` may answer one task otherwise than another."""
        return self.overrides("recall") and not self.task_free

    @property
    def changes_gradients(self) -> bool:
        """Whether local steps must leave gradients behind for :meth:`penalty` or :meth:`adjust_gradients`.

        Asked when a cohort has opened, and before the first one, when an engine is chosen. A method that has nothing to
        add at the moment says no, so that the engine may take plain SGD's step at once.
        """
        return self.overrides("penalty", "adjust_gradients")

    @property
    def refines_gradients(self) -> bool:
        """Whether :meth:`adjust_gradients` may leave other gradients than it was given."""
        return self.overrides("adjust_gradients")

    @property
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging; asked after :meth:`setup`.

        A method whose options can switch its hooks off says so.
        """
        added = ("extend_batch", "forward_pass", "weigh", "sample_loss", "local_loss", "penalty")
        return self.overrides(*added, "adjust_gradients", "step_factors")

    def task_rows(self) -> list[dict[str, Any]]:
        """Rows for the method's own table in the run folder, all tasks so far."""
        return []

    def summary(self) -> dict[str, Any]:
        """Figures for the run's summary, under their final names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
