"""Scores test samples with the global model, or with every client's own, and adds them to the run's matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from cfl.data.evaluation import EvaluationBatch
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.federation.repeated_tests import RepeatedTests
from cfl.metrics.task_matrix import TaskMatrix
from cfl.models.base import Network
from cfl.models.density import densities_differ
from cfl.models.functional import call_with
from cfl.models.in_parts import SAMPLES, gains_by_parts, in_parts
from cfl.models.memory_format import channels_last, gains_by_channels_last
from cfl.runtime import distributed
from cfl.runtime.error_context import ErrorContext
from cfl.runtime.moving import moved
from cfl.runtime.precision import full_precision

Owners = Sequence[tuple[int | None, int]]
"""(client, task) of each matrix entry that a test is added to; the client is None if there is one matrix for all."""


class Scoring:
    """An evaluation: :meth:`begin`, :meth:`score` for every batch, :meth:`finish`.

    Args:
        federation: has the models and the matrices. Its network must be in evaluation mode.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._rows: Mapping[int | None, int] = {}
        self._same_tests = RepeatedTests()
        self._tasks_alike = Counter(federation.data.same_tests)
        self._channels_last: bool | None = None
        self._in_parts: bool | None = None

    def begin(self, untrained: bool, everyone: bool) -> None:
        """Choose the matrix rows that this evaluation fills, and clear them.

        Args:
            untrained: evaluate the models before any training. In a resumed run no rows are then filled or cleared.
            everyone: evaluate all clients, including those that are in the middle of a task.
        """
        self._same_tests.clear()  # of another model
        self._in_parts = None  # untrained, a network may answer every sample alike
        self.federation.measure_by_owner()
        self._rows = matrix_rows.due(self.federation, everyone or untrained)
        if untrained:
            self._rows = dict.fromkeys(self._rows, -1) if self.federation.round == 0 else {}
        self._for_rows(lambda matrix, row, owners: matrix.clear_row(row, owners))

    def finish(self) -> None:
        """Add up what the processes have counted since :meth:`begin`."""
        self._same_tests.clear()
        self._for_rows(lambda matrix, row, owners: matrix.add_up(row, owners))

    def _for_rows(self, act: Callable[[TaskMatrix, int, list[int] | None], None]) -> None:
        for row in sorted(set(self._rows.values())):
            owners = [owner for owner, theirs in self._rows.items() if theirs == row and owner is not None]
            for matrix in self.federation.matrices:
                act(matrix, row, owners or None)

    def score(self, batch: EvaluationBatch) -> None:
        """Add one task's test batch to the run's matrices.

        Raises:
            RuntimeError: scoring failed. The message names task and round, and the failure is its cause.
        """
        where = ErrorContext(lambda: f"testing on task {batch.task} failed after {self.federation.round} rounds")
        with where, full_precision():
            self._score(batch)

    def _score(self, batch: EvaluationBatch) -> None:
        federation = self.federation
        if batch.start == batch.stop:
            return
        learners: Sequence[tuple[int | None, int]] = [(None, batch.task)]
        if federation.measures_clients:
            learners = federation.data.learners(batch.task)
        learners = [(client, task) for client, task in learners if client in self._rows]
        if not learners:
            return
        with federation.model.evaluation_statistics():
            if federation.model.has_personal_models:
                self._score_personal(batch, learners)
            else:
                self._score_global(batch, learners)

    def _score_global(self, batch: EvaluationBatch, learners: Sequence[tuple[int | None, int]]) -> None:
        federation = self.federation
        server = federation.model.state_tensors()
        model = federation.model_for(batch.task, server)
        for whose, owners in answering_alike(federation, batch.task, learners):
            scores = self.answers(batch, model, model is server, whose)
            for owner, task in owners:
                self._count(scores, batch, owner, task)

    def _score_personal(self, batch: EvaluationBatch, learners: Sequence[tuple[int | None, int]]) -> None:
        """Score the personal models of this process's share of the clients.

        On a CPU a model that equals the last one is not run again: clients that have not trained yet have equal models.
        Elsewhere each comparison would wait for the device."""
        federation = self.federation
        compares = cast(Tensor, batch.x).device.type == "cpu" and not densities_differ(federation.network)
        last: tuple[dict[str, Tensor], Tensor] | None = None

        def scores_of(client: int, task: int | None) -> Tensor:
            nonlocal last
            model = federation.model_for(batch.task, federation.model_of(client, task))
            if not compares or last is None or not all(torch.equal(last[0][name], model[name]) for name in model):
                last = model, self.answers(batch, model, is_network=False, whose=(client,))
            return last[1]

        for owner, task in learners[distributed.rank() :: distributed.count()]:
            client = cast(int, owner)
            told = task if federation.measure.tells_tasks else None
            self._count(scores_of(client, told), batch, client, task)
            if federation.known is not None and not federation.measure.tells_tasks:
                federation.known.add(
                    self._rows[client], task, scores_of(client, task), cast(Tensor, batch.y), None, client
                )

    def answers(
        self, batch: EvaluationBatch, model: dict[str, Tensor], is_network: bool, whose: Sequence[int] = (0,)
    ) -> Tensor:
        """Scores ``[B, O]`` of a test batch under a model.

        If the network predicts no vector, these are its :meth:`cfl.models.base.Network.answers`, such as
        log-likelihoods ``[B]``. If they differ by client, they are the mean over the clients ``whose``.

        Args:
            batch: the test batch.
            model: name -> tensor.
            is_network: whether ``model`` is what the network holds.
            whose: the clients over which scores are averaged if they differ by client.
        """
        network, x = cast(Network, self.federation.network), cast(Tensor, batch.x)
        if network.predicts != "vector":
            return call_with(network, model, network.answers, x, whose)
        with self.federation.repeated_tests.of(batch):
            found = self.federation.methods.classify(batch.task, model, x)
        if found is not None:
            return found
        if self._channels_last is None:
            self._channels_last = gains_by_channels_last(network, x)
        x = channels_last(x) if self._channels_last else x
        if self._in_parts is None and len(x) > SAMPLES:
            self._in_parts = gains_by_parts(network, x)

        def pass_through(part: Tensor) -> Tensor:
            return cast(Tensor, network(part) if is_network else functional_call(network, model, (part,)))

        compute = partial(in_parts, pass_through, x) if self._in_parts else partial(pass_through, x)
        return self._once_for_same_tests(batch, compute) if is_network else compute()

    def _once_for_same_tests(self, batch: EvaluationBatch, compute: Callable[[], Tensor]) -> Tensor:
        """Return ``compute()``, or what it returned for another task with the same test inputs."""
        first = self.federation.data.same_tests[batch.task]
        if self._tasks_alike[first] == 1:
            return compute()
        with self._same_tests.of(replace(batch, task=first)):
            return self._same_tests.once("scores", compute)

    def _count(self, scores: Tensor, batch: EvaluationBatch, client: int | None, task: int) -> None:
        federation, row, y = self.federation, self._rows[client], cast(Tensor, batch.y)
        own, tested = federation.data.outputs.own[batch.task], federation.data.outputs.test_after(row)
        allowed = None if tested is None else tested[batch.task]
        for matrix in (federation.measured, *federation.own_measures.values()):
            matrix.add(row, task, scores, y, allowed, client)
        if federation.known is not None and federation.measure.tells_tasks:
            federation.known.add(row, task, scores, y, own, client)
        if federation.by_owner is not None and (owners := batch.owners) is not None:
            owners = owners if client is None else owners.where(owners == client, -1)
            federation.by_owner.add_by_owner(row, task, scores, y, allowed, owners)
        for shares in federation.methods.identified:
            found = moved(own, scores.device)[scores.argmax(1)]
            shares.update(row, task, found.sum(), len(scores), client)


def answering_alike(federation: Federation, stream_task: int, owners: Owners) -> list[tuple[Sequence[int], Owners]]:
    """Groups of clients whose scores of the global model are the same, with the matrix entries that these are added to.

    Usually there is one group. If the network is another density at every client (MADE with ``synchronised: false``),
    the global model is scored with each client's own masks. A client's matrix then takes that client's score, and a
    single matrix for all takes the mean over the clients that hold the task. Each client then needs a pass over the
    test samples.

    Args:
        federation: has the global model.
        stream_task: the task whose test samples are scored.
        owners: the matrix entries that the scores are added to.
    """
    if not densities_differ(federation.network):
        return [((0,), owners)]
    found: list[tuple[Sequence[int], Owners]] = []
    for client, task in owners:
        whose = federation.members(stream_task) if client is None else [client]
        found.append((whose, [(client, task)]))
    return found


def over_clients(federation: Federation, values: Tensor) -> Tensor:
    """The mean over clients, the first dimension, if there is a matrix per client; otherwise the values as they are."""
    return values.nanmean(0) if federation.measures_clients else values


def mean_matrix(federation: Federation) -> Tensor:
    """The measured matrix ``[T, T]``, such as accuracies in percent; the mean over clients if each has a matrix."""
    return over_clients(federation, federation.measured.compute())
