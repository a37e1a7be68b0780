"""The base class of methods. Read this file first to write a method.

A method has options, functions that are called at certain moments of a round, and capabilities. With no method
(``methods: {}``) training is federated averaging. Several methods compose: each moment calls them in the order of the
``methods`` mapping (:mod:`cfl.methods.composition`).

The moments of a round, after ``setup``, which is called once before training::

    begin_task        before the first round of a task, before the global model is sent
    start_clients     K clients have received the global model (or loaded their own)
    finish_clients    clients have taken their last local step; their updates are sent next
    end_round         the server has updated the global model
    end_task          after end_round of a task's last round; extra communication over the same channel

All other work of a method, such as changes of local steps, of the server's step or of tests, is a capability. A method
has a capability if it defines the members of a Protocol of :mod:`cfl.methods.capabilities`; they are then called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods import capabilities, declared_state
from cfl.methods.context import Context
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.runtime.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """Figures and table rows that a method adds to the run folder.

    Attributes:
        figures: entries of the run's summary, under their final names.
        rows: rows of the method's own table, for all tasks so far. All rows have the same columns. The list may be the
            method's own, so readers must not change it.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Method:
    """Base class of all methods; its functions do nothing.

    Class attributes are declarations that are checked before training:

    Attributes:
        scenarios: scenarios in which the method works; ``density`` only if it uses neither labels nor classes;
            ``regression`` and ``detection`` only if it uses no classes.
        individual_uplinks: whether the server must see single clients' messages, which rules out secure aggregation.
        moves_model_after_round: whether :meth:`end_round` changes the global model again, after all ``transform_step``
            (CFeD, FedCIL). If not declared, such a change is refused.
        optimizers: names of the torch optimizers under which the method's guarantee holds, or None for any.
        common_order: whether all clients must learn the same tasks in the same order.
        client_clocks: whether clients may change tasks in different rounds. The clients of a cohort are always at the
            same task and began it together. ``begin_task`` and ``end_task`` are called for each part of a round
            (``RoundPlan.parts``) whose clients begin or end a task: several times for a task or, if none of these
            clients is sampled, never.
        task_free: whether the method needs neither task ids nor task boundaries, as in general continual learning. If
            so, ``begin_task`` and ``end_task`` are not called, and rounds, cohorts and batches hide from the method
            which task they belong to (:mod:`cfl.methods.task_free`).
        looks_back: whether the method uses something of tasks that have ended. With ``data.exposure: joint`` no task
            ends: all are trained on from the first round to the last.
        asks_after_tasks: whether :meth:`end_task`, if the class defines it, lets clients compute or send something
            after a task's last round. A run in which no client joins the last round of a task is then refused.
        state: names of the attributes that the next round depends on, in addition to those of the base classes. They
            are saved in checkpoints, under their names without a leading underscore, and restored from them. Each
            attribute must exist after :meth:`setup`. It must hold a tensor, a plain value, a dict, list or tuple of
            these, a set of values that can be sorted, or an object with ``state_dict`` and ``load_state_dict``. To use
            other keys, make ``state`` a mapping from the checkpoint's key to the attribute, such as ``_old.tensors``.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain"})
    individual_uplinks: bool = False
    moves_model_after_round: bool = False
    optimizers: ClassVar[frozenset[str] | None] = None
    common_order: ClassVar[bool] = False
    client_clocks: ClassVar[bool] = False
    task_free: bool = False
    looks_back: ClassVar[bool] = False
    asks_after_tasks: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...] | Mapping[str, str]] = ()

    # Defaults of attributes that belong to capabilities. :mod:`cfl.methods.capabilities` explains them.
    identified: AccuracyMatrix | None = None
    reweighs_added_only: bool = False
    replaces_own_loss: bool = False
    passes_forward: bool = True
    pulls_with: ClassVar[str] = ""
    kind: ClassVar[Literal["add", "project", "look"]] = "add"
    shared_only: ClassVar[bool] = False

    context: Context
    """The method's access to its run, set by :meth:`setup`."""
    name: str = ""
    """The method's name in the configuration, set by :meth:`setup`."""
    source: int = 1
    """Number that marks samples that the method adds (:class:`cfl.data.samples.ExtraSamples`), set by :meth:`setup`."""

    # Moments.

    def setup(self, context: Context) -> None:
        """Store the context and allocate state; raise ConfigError for settings that cannot work."""
        self.context = context
        for number, (name, method) in enumerate(context.methods.items(), 1):
            if method is self:
                self.name, self.source = name, number

    def begin_task(self, plan: RoundPlan) -> None:
        """Called before the first round ``plan`` of a task, before anything is sent; not for ``task_free`` methods."""

    def start_clients(self, cohort: Cohort) -> None:
        """Called when the cohort's clients have received the model, before they train."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Called when the clients at ``positions`` of the cohort have taken their last local step.

        Clients that trained to NaN or infinity are not among them: everything they sent this round is dropped.
        """

    def end_round(self, plan: RoundPlan) -> None:
        """Called when the server has updated the global model; not after a round that no client joined."""

    def end_task(self, plan: RoundPlan) -> None:
        """Called after ``end_round`` of a task's last round; not for ``task_free`` methods."""

    # For use in subclasses.

    @property
    def key(self) -> str:
        """Key of the method's options in the configuration; before :meth:`setup` it is made from the class's name."""
        return f"methods.{self.name or re.sub('(?<=[a-z])(?=[A-Z])', '_', type(self).__name__).lower()}"

    def ours(self, samples: Samples) -> Tensor:
        """Bool: which samples of a step are the client's own or were added by this method, padding included."""
        return (samples.source == 0) | (samples.source == self.source)

    def refuse_twins(self, kind: type[Method], instead: str) -> None:
        """Raise ConfigError if a run has two methods of a class, because they would share their clients' state.

        Args:
            kind: the class.
            instead: what is valid, e.g. ``one EWC``.
        """
        twins = [name for name, method in self.context.methods.items() if isinstance(method, kind)]
        if len(twins) > 1:
            raise ConfigError("methods", twins, instead)

    # Reported about the method.

    @property
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging; called after :meth:`setup`.

        Override it if options can switch off the method's capabilities.
        """
        return capabilities.has(self, *capabilities.IN_LOCAL_STEPS)

    @property
    def changes_gradients(self) -> bool:
        """Whether the method changes gradients now; see :class:`cfl.methods.capabilities.GradientTransform`."""
        return True

    def client_storage(self) -> int:
        """Most bytes that a client stores for this method between rounds, at the end of a run.

        Samples count with the bytes of their pixels, also if the simulation stores only their indices.
        """
        return 0

    def report(self) -> Report:
        """The method's figures and rows so far, for the run folder; may be called after any round.

        Also called before the first round, to check what it returns; it may raise an error then.
        """
        return Report()

    def state_dict(self) -> dict[str, Any]:
        """The attributes named by :attr:`state`, as tensors and plain values."""
        return declared_state.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        declared_state.restore(self, state)
