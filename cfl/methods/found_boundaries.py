"""Finds where tasks end, from the sum of the clients' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cfl.data.exposure import OWN_PACE
from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods.base import Method, Report
from cfl.methods.components.client_model import client_model, evaluating
from cfl.methods.components.page_hinkley import PageHinkley
from cfl.methods.components.validation_loss import validation_loss
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers, check_numbers


class FoundBoundaries(Method):
    """Finds where tasks end from clients' losses, and tells the methods beside it.

    Every client of a round computes the loss of the received model on the samples that it is about to train on. The
    server reads the mean of these losses. A rise of the mean counts as the beginning of a new task (the Page-Hinkley
    test, :class:`cfl.methods.components.page_hinkley.PageHinkley`). After the round, the methods beside it that work
    with found tasks (:class:`cfl.methods.capabilities.FoundTasks`: EWC, FOT) are told of the boundary. They see neither
    the stream's boundaries nor its tasks. FedCurv, Fed-A-GEM and other task-free methods need no boundaries. This
    method does not change training itself.

    A boundary is found after the first round of the new task at the earliest, when the old task's samples are gone.
    Methods therefore use results that clients have computed before, every ``keep_every`` rounds.

    It cannot find a new task on which the model's loss is hardly higher, tasks of fewer rounds than ``warm_up``, and
    boundaries of single clients: if clients change tasks at different times, the mean rises a little in many rounds. A
    rise for any other reason counts as a new task by mistake.

    The defaults were chosen on streams of digits; the documentation's page of results on found boundaries has delays,
    misses and false alarms.

    Sends: a number per client and round, read as a sum. Extra memory per client: none. Extra compute: a forward pass
    over a client's samples per round. Scenarios: all.

    Args:
        tolerance: standard deviations by which the mean loss may lie above its running mean without any effect, at
            least 0.
        threshold: a boundary is found when the sum of what exceeds ``tolerance`` is larger than this, in standard
            deviations, above 0.
        window: rounds over which running mean and standard deviation are taken, at least 2.
        warm_up: rounds after a boundary in which none is found, at least 2.
        floor: the least standard deviation as a share of the first round's loss, above 0.
        keep_every: clients compute the results that methods keep once in this number of rounds, at least 1.
        batch_size: samples per forward pass; affects results only if the batch's own statistics are used.

    Raises:
        ConfigError: for other values, or two such methods.
    """

    scenarios = EVERY_SCENARIO
    task_free = True
    looks_back = True
    client_clocks = True
    state = ("_test", "_rows")

    def __init__(
        self,
        tolerance: float = 1.0,
        threshold: float = 6.0,
        window: int = 5,
        warm_up: int = 5,
        floor: float = 0.02,
        keep_every: int = 2,
        batch_size: int = 250,
    ) -> None:
        key = self.key
        check_numbers(key, "[0, inf)", tolerance=tolerance)
        check_numbers(key, "(0, inf)", threshold=threshold, floor=floor)
        check_integers(key, 2, window=window, warm_up=warm_up)
        check_integers(key, 1, keep_every=keep_every, batch_size=batch_size)
        self.keep_every, self.batch_size = keep_every, batch_size
        self._test = PageHinkley(tolerance, threshold, window, warm_up, floor)
        self._rows: list[dict[str, Any]] = []
        self._ended: range | None = None

    def setup(self, context: Context) -> None:
        """Refuse two of these methods, training on all samples so far, and samples of several tasks at a time whose
        outputs in the loss differ.

        Raises:
            ConfigError: ``methods``, ``data.scenario`` or ``data.exposure``.
        """
        super().setup(context)
        self.refuse_twins(FoundBoundaries, "one FoundBoundaries; two would number tasks twice")
        if context.exposure in OWN_PACE and context.scenario == "task":
            why = "clients have samples of several tasks at a time, each with outputs of its own"
            valid = f"domain or class with data.exposure: {context.exposure} and {self.key}: {why}"
            raise ConfigError("data.scenario", "task", valid)
        if context.exposure in ("cumulative", "streaming-cumulative"):
            why = "the loss on all samples so far hardly rises with a task"
            valid = f"sequential, unannounced, asynchronous or streaming with {self.key}: {why}"
            raise ConfigError("data.exposure", context.exposure, valid)

    @property
    def rounds_of_ended(self) -> range | None:
        """The rounds of the task whose end was found after the last round, or None if no end was found."""
        return self._ended

    def keeps_in(self, round: int) -> bool:
        """Whether clients compute, in this round, results that methods use once the end of the task is found."""
        return round % self.keep_every == 0

    # A round.

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Let clients compute the loss of the model that they have received, and send it."""
        context = self.context
        clients = [cohort.clients[position] for position in positions]
        losses = torch.zeros(len(clients), dtype=torch.float64)
        with evaluating(context):
            for row, client in enumerate(clients):
                losses[row] = validation_loss(
                    context.network,
                    client_model(context, client),
                    context.client_batches(cohort.task, client, self.batch_size, context.device),
                    context.outputs_in_loss(cohort.task, client),
                    client,
                    context.measure,
                )
        context.channel.uplink(self._topic, {"loss": losses}, [1.0] * len(losses), clients)

    def end_round(self, plan: RoundPlan) -> None:
        """Compare the clients' mean loss with those of earlier rounds."""
        sums, clients = self.context.channel.sum(self._topic)
        loss = float(sums["loss"]) / clients
        began = max((row["since"] for row in self._rows if row["found"]), default=0)
        statistic, since = self._test.observe(loss, plan.round)
        self._ended = None if since is None else range(began, since)
        self._rows.append(
            {
                "round": plan.round,
                "clients": round(clients),
                "loss": loss,
                "statistic": statistic,
                "found": since is not None,
                "since": since,
            }
        )

    @property
    def _topic(self) -> str:
        return f"{self.name} loss"

    # Reports.

    def report(self) -> Report:
        """The number of boundaries found, as ``boundaries_found``.

        A row per round: clients, their mean loss of the received model on the samples that they were about to train on,
        the test's statistic, whether a boundary was found, and the round with which the new task began.
        """
        return Report({"boundaries_found": sum(row["found"] for row in self._rows)}, self._rows)
