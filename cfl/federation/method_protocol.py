"""What the federation, and whoever works with it, relies on in a method.

The methods themselves are in a room above: :class:`cfl.methods.base.Method` has all of this, and says when each hook is
called and with what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.objective import LossMethod


class FederatedMethod(LossMethod, Protocol):
    """A method of a run, as the federation calls it and as other methods look at it."""

    # Declarations, checked before training.

    @property
    def scenarios(self) -> frozenset[Scenario]:
        """Scenarios under which it means something."""

    @property
    def common_order(self) -> bool:
        """Whether all clients must learn the same tasks in the same order."""

    @property
    def own_clocks(self) -> bool:
        """Whether clients may change tasks each in its own round."""

    @property
    def replays(self) -> bool:
        """Whether it needs the clients' buffers."""

    @property
    def task_free_with(self) -> str:
        """The option and value that make it task-free, if any do."""

    @property
    def topics(self) -> frozenset[str]:
        """Under which it keeps what its clients have between rounds, beside its name."""

    @property
    def looks_back(self) -> bool:
        """Whether it takes something from tasks that have ended."""

    @property
    def crosses_tasks(self) -> bool:
        """Whether clients compute with samples of earlier tasks while they are at a later one."""

    @property
    def changes_shared_only(self) -> bool:
        """Whether it leaves alone what stays on the clients."""

    @property
    def refines_gradients(self) -> bool:
        """Whether it may leave other gradients than it was given."""

    @property
    def moves_model_after_round(self) -> bool:
        """Whether it changes the global model once more when a round has ended."""

    @property
    def tells_tasks_apart(self) -> bool:
        """Whether a client may answer one task otherwise than another."""

    @property
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging."""

    # Before the first round. The federation is ``Any`` here, because it imports this module.

    def federation_view(self, federation: Any, topics: frozenset[str]) -> Any:
        """What :meth:`setup` is called with."""

    def setup(self, federation: Any) -> None:
        """Learn the federation and allocate state."""

    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client."""

    # Rounds.

    def begin_task(self, plan: RoundPlan) -> None:
        """A task's first round is about to begin."""

    def encode(self, task: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The server's model as the clients and tests of a task compute with it."""

    def decode(self, task: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Undo :meth:`encode`."""

    def close_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Some clients of a cohort have taken their last local step."""

    def open_cohort(self, cohort: Cohort) -> None:
        """Clients have been given their parameters."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the global step to the one to take."""

    def end_round(self, plan: RoundPlan) -> None:
        """The global model has moved."""

    def end_task(self, plan: RoundPlan) -> None:
        """A task's last round is over."""

    # Tests.

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with which a client answers one of its tasks."""

    def as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """A model fresh from local training, as its client answers the present task with it."""

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores in the place of the network's logits, or None."""

    # Reports and checkpoints.

    def client_storage(self) -> int:
        """Bytes that a client has to keep for it between rounds."""

    def task_rows(self) -> list[dict[str, Any]]:
        """Rows for its own table in the run folder."""

    def summary(self) -> dict[str, Any]:
        """Figures for the run's summary."""

    def state_dict(self) -> dict[str, Any]:
        """Everything the next round depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
