"""What a method may do, and when.

A method is a set of plain parameters and a few of these hooks; ``{}`` (no method) is federated averaging. Methods
compose: each hook runs for every method in the order of the ``methods`` mapping.

One round, as a method sees it::

    open_cohort           K clients have received the global model (or loaded their own)
      penalty             every local step, added to the client's loss
      adjust_gradients    every local step, between backward and the optimizer
    close_clients         clients have finished; their updates are about to be sent
    transform_step        the server is about to move the global model
    end_round             the global model has moved
    end_task              after end_round of a task's last round: extra communication over the same channel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from cfl.data.scenarios import Scenario

if TYPE_CHECKING:
    from cfl.cohort import Cohort
    from cfl.federation import Federation
    from cfl.schedule import RoundPlan


class Method:
    """Base of all methods; every hook does nothing.

    Class attributes are declarations that are checked before training:

    Attributes:
        scenarios: scenarios under which the method means something.
        individual_uplinks: whether the server must see single clients' messages, which rules out secure aggregation.
        optimizers: names of the torch optimizers under which the method's guarantee holds, or None for any.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain"})
    individual_uplinks: ClassVar[bool] = False
    optimizers: ClassVar[frozenset[str] | None] = None

    federation: Federation

    def setup(self, federation: Federation) -> None:
        """Learn the federation and allocate state; raise ConfigError for settings that cannot work with it."""
        self.federation = federation

    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client: kept between rounds, never sent."""
        return False

    def open_cohort(self, cohort: Cohort) -> None:
        """Clients have been given their parameters."""

    def penalty(self, cohort: Cohort) -> Tensor | None:
        """A term ``[k]`` to be added to each client's loss, or None."""
        return None

    def adjust_gradients(self, cohort: Cohort) -> None:
        """Change ``cohort.gradients`` (name -> ``[k, ...]``) in place."""

    def close_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """The clients at ``positions`` of the cohort have taken their last local step."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the global step (name -> ``[...]``, added to the global parameters) to the one to take."""
        return step

    def end_round(self, plan: RoundPlan) -> None:
        """The global model has moved."""

    def end_task(self, plan: RoundPlan) -> None:
        """A task's last round is over."""

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
