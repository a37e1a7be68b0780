"""Learning rates that each client lowers when its validation loss stops falling, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.scaled_steps import LINEAR_OPTIMIZERS
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import TestedOtherwise, has
from cfl.methods.components.client_model import evaluating
from cfl.methods.components.validation_loss import validation_loss
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers, check_numbers

TOPIC = "learning rate"
BEGINNING = {
    "task": torch.tensor(-1),
    "rate": torch.tensor(1.0, dtype=torch.float64),
    "best": torch.tensor(math.inf, dtype=torch.float64),
    "waited": torch.tensor(0),
}
"""A client's state at the beginning of a task: task, factor of its learning rate, lowest loss, rounds since that loss.
"""


class LearningRateDecay(Method):
    """Lowers each client's learning rate when its own validation loss stops falling, and finally stops its training::

        v_c <- mean loss of c's trained model on the samples that it has set aside     (after each of its rounds)
        lr_c <- lr_c / factor        when v_c has not fallen below its lowest value for ``patience`` of c's rounds
        lr_c <- 0                    when that leaves it at ``floor`` or below

    (FedWeIT, Yoon et al., 2021, appendix B: factor 3, patience 5, floor 1e-7; its code: patience 3, floor 1e-10). Every
    task begins with the optimizer's learning rate. A loss of NaN counts as one that has not fallen.

    The validation samples are those of ``data.validation`` of the client's current task, whatever other samples it
    trains on. Their loss is that of the client's own model after local training, over the outputs of its task, in
    evaluation mode with its own running statistics (those of the batch if ``federated.batchnorm`` drops them), without
    any term that methods add to the training loss.

    All clients of a cohort share one optimizer. Another learning rate is obtained by rescaling the client's step
    (:class:`cfl.engines.scaled_steps.ScaledSteps`), which is exact for the optimizers that are allowed. If a client's
    rate has fallen, the engine does not fuse plain SGD's step with the gradient.

    Differs from the paper: the loss is computed once per round, also if a round has several local epochs. A client
    that has stopped does not begin its next task early. Until its rounds are over it receives models and returns them
    unchanged, running statistics included, and still computes its steps.

    Sends nothing of its own. Extra memory per client: four numbers; it trains on fewer samples. Extra compute: a
    forward pass over the validation samples per client and round, and two element-wise passes over the weights per
    local step once a rate has fallen. Scenarios: all; task boundaries must be known. Not with option II of SCAFFOLD,
    which computes gradients from updates of a known learning rate.

    Args:
        factor: number by which the learning rate is divided, at least 1; 1 changes nothing.
        patience: rounds of a client without a lower loss, at least 1.
        floor: the learning rate at or below which a client stops training for the task, at least 0.
        threshold: a loss counts as lower if it is below the lowest by this share of it, in [0, 1).
        batch_size: validation samples per forward pass; affects results only if the batch's own statistics are used.

    Raises:
        ConfigError: for other values, a floor that is not below the learning rate, a client without validation samples,
            or two such methods.
    """

    scenarios = EVERY_SCENARIO
    optimizers = LINEAR_OPTIMIZERS
    client_clocks = True
    asks_after_tasks = False
    state = ("_rows",)  # clients' rates are in ``context.clients``

    def __init__(
        self,
        factor: float = 3.0,
        patience: int = 3,
        floor: float = 1e-7,
        threshold: float = 0.0,
        batch_size: int = 250,
    ) -> None:
        key = self.key
        check_numbers(key, "[1, inf)", factor=factor)
        check_integers(key, 1, patience=patience)
        check_numbers(key, "[0, inf)", floor=floor)
        check_numbers(key, "[0, 1)", threshold=threshold)
        check_integers(key, 1, batch_size=batch_size)
        self.factor, self.patience, self.floor = factor, patience, floor
        self.threshold, self.batch_size = threshold, batch_size
        self._states: dict[str, Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    # Before training.

    def setup(self, context: Context) -> None:
        """Refuse a floor that is not below the learning rate, and a run in which a client has no validation samples."""
        super().setup(context)
        if context.optimizer is not None and self.factor > 1:
            lr = float(context.optimizer.param_groups[0]["lr"])
            if not self.floor < lr:
                raise ConfigError(f"{self.key}.floor", self.floor, f"a number below the learning rate, {lr:g}")
        self.refuse_twins(LearningRateDecay, "one LearningRateDecay, which knows the clients' learning rates")
        if self.factor == 1:
            return
        if context.validation == 0:
            raise ConfigError("data.validation", 0, "above 0 while LearningRateDecay is used")
        for task in range(context.num_tasks):
            for client in context.members(task):
                if not context.num_validating(task, client):
                    what = f"client {client} has too few samples of task {task} to set one aside"
                    valid = "a partition with two or more for every client that takes part, or Holders with min_samples"
                    raise ConfigError("data.validation", what, valid)

    # Local steps.

    def start_clients(self, cohort: Cohort) -> None:
        """Load these clients' rates; clients that begin the task have the full rate."""
        if self.factor == 1:
            return
        self._states = self.context.clients.gather(TOPIC, cohort.clients, BEGINNING)
        anew = self._states["task"] != cohort.task
        for name, value in BEGINNING.items():
            self._states[name][anew] = value

    def step_factors(self, cohort: Cohort) -> Tensor | None:
        """The clients' learning rates as factors of the optimizer's."""
        return None if self.factor == 1 else self._states["rate"]

    @property
    def computes_locally(self) -> bool:
        """Whether the rate can fall."""
        return self.factor > 1

    # After local training.

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Compute validation losses, and lower the rates of clients whose loss has stopped falling."""
        if self.factor == 1:
            return
        clients = [cohort.clients[position] for position in positions]
        trained = cohort.rows(positions, {**cohort.parameters, **cohort.buffers})
        state = {name: values[list(positions)] for name, values in self._states.items()}
        training = state["rate"] > 0
        losses = self._losses(cohort.task, clients, training.tolist(), trained)
        best = state["best"]
        least = torch.where(best.isfinite(), best - self.threshold * best.abs(), best)  # losses may be negative
        improved = losses < least
        waited = torch.where(improved, 0, state["waited"] + 1)
        falls = training & (waited >= self.patience)
        rate = torch.where(falls, state["rate"] / self.factor, state["rate"])
        kept = {
            "task": torch.full_like(state["task"], cohort.task),
            "rate": torch.where(cohort.lr * rate <= self.floor, 0.0, rate),
            "best": torch.where(improved, losses, best),
            "waited": torch.where(falls | ~training, 0, waited),
        }
        self.context.clients.scatter(TOPIC, clients, kept)

    def _losses(
        self, task: int, clients: Sequence[int], training: Sequence[bool], trained: dict[str, Tensor]
    ) -> Tensor:
        """``[k]`` float64 validation losses; NaN for clients that have stopped."""
        context = self.context
        found = torch.full((len(clients),), torch.nan, dtype=torch.float64)
        with evaluating(context):
            names = context.state_tensors()  # without running statistics if they are dropped
            for row, client in enumerate(clients):
                if training[row]:
                    found[row] = validation_loss(
                        context.network,
                        self._as_tested({name: trained[name][row] for name in names}),
                        context.validation_batches(task, client, self.batch_size, context.device),
                        context.outputs_in_loss(task, client),
                        client,
                        context.measure,
                    )
        return found

    def _as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """A client's model as other methods change it for tests."""
        for method in self.context.methods.values():
            if has(method, TestedOtherwise):
                model = cast(TestedOtherwise, method).as_tested(model)
        return model

    # Reports and checkpoints.

    def end_round(self, plan: RoundPlan) -> None:
        """If clients have their own clocks, record the rates of all clients whose task is over, sampled or not."""
        if self.context.client_clocks:
            self._record(plan)

    def end_task(self, plan: RoundPlan) -> None:
        """Record the rates of all clients, also if none has joined the round."""
        if not self.context.client_clocks:
            self._record(plan)

    def _record(self, plan: RoundPlan) -> None:
        context = self.context
        due = set(context.due(plan))
        if not due:  # the case in most rounds
            return
        ending: dict[int, list[int]] = {}
        for client in context.clients.holders(TOPIC):
            if client in due:
                ending.setdefault(context.task_at(plan.round, client), []).append(client)
        for task in sorted(ending):
            self._note(task, ending[task])

    def _note(self, task: int, clients: list[int]) -> None:
        states = self.context.clients.gather(TOPIC, clients, BEGINNING)
        own = states["task"] == task
        if not bool(own.any()):
            return
        rates = states["rate"][own]
        lowest = states["best"][own]
        finite = lowest[torch.isfinite(lowest)]
        self._rows.append(
            {
                "task": task,
                "clients": len(rates),
                "stopped": int((rates == 0).sum()),
                "mean_rate": rates.mean().item(),
                "validation_loss": finite.mean().item() if len(finite) else None,
            }
        )

    def report(self) -> Report:
        """``stopped_share``: share of clients and tasks whose training stopped before the task's end; ``mean_rate``:
        mean factor of learning rates at the ends of tasks.

        A row per task, at its end; with clocks of clients' own, at each of its ends: clients that trained in it, the
        number of these that have stopped, the mean factor of their learning rates, and the mean of their lowest
        validation losses.
        """
        clients = sum(row["clients"] for row in self._rows)
        figures = {"stopped_share": 0.0, "mean_rate": 1.0}
        if clients:
            figures = {
                "stopped_share": sum(row["stopped"] for row in self._rows) / clients,
                "mean_rate": sum(row["mean_rate"] * row["clients"] for row in self._rows) / clients,
            }
        return Report(figures, self._rows)

    def client_storage(self) -> int:
        """Bytes of the four numbers."""
        held = self.context.clients.holders(TOPIC)
        return sum(value.element_size() for value in BEGINNING.values()) * bool(held)
