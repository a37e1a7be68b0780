"""What a method is: a set of plain parameters, some moments of a round, and capabilities.

A method author reads this file. ``{}`` (no method) is federated averaging. Methods compose: each moment comes for every
method in the order of the ``methods`` mapping (:mod:`cfl.methods.composition`).

One round, as a method sees it::

    begin_task        before the first round of a task: the global model is about to be sent out
    start_clients     K clients have received the global model (or loaded their own)
    finish_clients    clients have taken their last local step; their updates are about to be sent
    end_round         the global model has moved
    end_task          after end_round of a task's last round: extra communication over the same channel

Before all that, once: ``setup``. What a method does in local steps, to the server's step, or in
tests is a capability: it has the members of one of the Protocols of :mod:`cfl.methods.capabilities`, and is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods import capabilities, declared_state
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """What a method adds to the run folder.

    Attributes:
        figures: for the run's summary, under their final names.
        rows: of the method's own table, all tasks so far; all with the same columns.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Method:
    """Base of all methods; every moment does nothing.

    Class attributes are declarations that are checked before training:

    Attributes:
        scenarios: scenarios under which the method means something; ``density`` for one that looks neither at labels
            nor at classes.
        individual_uplinks: whether the server must see single clients' messages, which rules out secure aggregation.
        optimizers: names of the torch optimizers under which the method's guarantee holds, or None for any.
        common_order: whether all clients must learn the same tasks in the same order.
        client_clocks: whether clients may change tasks each in its own round. A cohort's clients are always at the same
            task and have begun it together; ``begin_task`` and ``end_task`` are then called for each part of a round
            (``RoundPlan.parts``) whose clients begin or end a task, hence several times or, where none of those is
            sampled, never for a task.
        task_free: whether the method declares to need neither task ids nor boundaries, as general continual learning
            does. It is then shown none: ``begin_task`` and ``end_task`` are not called, and rounds, cohorts and batches
            come without what tells tasks apart (:mod:`cfl.methods.task_free`).
        looks_back: whether it takes something from tasks that have ended. With ``data.exposure: joint`` none ever ends:
            all of them are trained on from the first round to the last.
        state: names of the attributes that the next round depends on, beside those of the base classes. They are saved
            in checkpoints, under their names without a leading underscore, and restored from them. Each is there from
            :meth:`setup` on. It holds a tensor, a plain value, a dict, list or tuple of these, a set of values that can
            be sorted, or an object with ``state_dict`` and ``load_state_dict``. A mapping from the key in the
            checkpoint to the attribute, such as ``_old.tensors``, is for those whose names differ.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain"})
    individual_uplinks: bool = False
    optimizers: ClassVar[frozenset[str] | None] = None
    common_order: ClassVar[bool] = False
    client_clocks: ClassVar[bool] = False
    task_free: bool = False
    looks_back: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...] | Mapping[str, str]] = ()

    context: Context
    """What it is given of the run, from :meth:`setup` on."""
    name: str = ""
    """Under which the configuration has it, from :meth:`setup` on."""
    source: int = 1
    """Tells the samples that it adds from others' (:class:`cfl.data.samples.ExtraSamples`), from :meth:`setup` on."""

    # Moments.

    def setup(self, context: Context) -> None:
        """Take the context and allocate state; raise ConfigError for settings that cannot work with it."""
        self.context = context
        for number, (name, method) in enumerate(context.methods.items(), 1):
            if method is self:
                self.name, self.source = name, number

    def begin_task(self, plan: RoundPlan) -> None:
        """``plan`` is a task's first round, and nobody has been sent anything yet; not for ``task_free`` methods."""

    def start_clients(self, cohort: Cohort) -> None:
        """Clients have been given their parameters."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """The clients at ``positions`` of the cohort have taken their last local step.

        Without those that have trained to NaN or infinity: everything of them is dropped in this round.
        """

    def end_round(self, plan: RoundPlan) -> None:
        """The global model has moved."""

    def end_task(self, plan: RoundPlan) -> None:
        """A task's last round is over; not for ``task_free`` methods."""

    # For its own code.

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
        twins = [name for name, method in self.context.methods.items() if isinstance(method, kind)]
        if len(twins) > 1:
            raise ConfigError("methods", twins, instead)

    # What is said of it.

    @property
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging; asked after :meth:`setup`.

        A method whose options can switch its capabilities off says so.
        """
        return capabilities.has(self, *capabilities.IN_LOCAL_STEPS)

    def client_storage(self) -> int:
        """Bytes that a client has to keep for this method between rounds, at most, as things are at the end of a run.

        What is kept in another form here (places instead of pixels) counts as what it stands for.
        """
        return 0

    def report(self) -> Report:
        """The method's figures and rows so far, for the run folder; may be asked after any round."""
        return Report()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on: tensors and plain values only; what :attr:`state` names."""
        return declared_state.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        declared_state.restore(self, state)
