"""Which rows of a run's matrices an evaluation fills, which rows are complete, and the figures of the last of these."""

from __future__ import annotations

import math

from cfl.federation.federation import Federation
from cfl.metrics.task_matrix import TaskMatrix
from cfl.metrics.transfer import average_accuracy


def current(federation: Federation) -> dict[int | None, int]:
    """Clients, and the matrix row of each: that of its current task, which is its last one once it has left.

    Returns:
        Client -> row; or None -> row if there is one matrix for all clients.
    """
    if not federation.measures_clients:
        return {None: federation.last_task}
    last, own_clocks = max(federation.round - 1, 0), federation.schedule.client_clocks
    clients = federation.members(0) if own_clocks else range(federation.data.num_clients)
    return {client: federation.schedule.task_at(last, client) for client in clients}


def due(federation: Federation, everyone: bool) -> dict[int | None, int]:
    """Clients to evaluate after the last round, and the row that each fills, as in :func:`current`.

    Args:
        everyone: evaluate all clients. If False and clients have their own clocks, only those whose task has just
            ended. Clients that had left before the round are not evaluated: their last row is of an earlier model.
    """
    rows, schedule = current(federation), federation.schedule
    if not schedule.client_clocks:
        return rows
    last = max(federation.round - 1, 0)
    clients = schedule.present(last).tolist() if everyone else schedule.due(schedule.round(last))
    return {client: rows[client] for client in clients}


def last_complete(federation: Federation) -> int | None:
    """The last task after which all clients have been evaluated, or None. Clients with their own clocks finish a
    task in different rounds."""
    evaluated = ~federation.measured.compute().isnan().all(-1)
    if federation.schedule.client_clocks:
        evaluated = evaluated[federation.members(0)].all(0)
    elif federation.measures_clients:
        evaluated = evaluated.any(0)
    return max(evaluated.nonzero().flatten().tolist(), default=None)


def figures(federation: Federation, matrix: TaskMatrix) -> dict[str, float | None]:
    """ACC, FGT and the other figures of one of the federation's matrices after :func:`last_complete`; see
    :meth:`cfl.metrics.task_matrix.TaskMatrix.summary`."""
    row = last_complete(federation)
    return dict.fromkeys(federation.measure.formulas) if row is None else matrix.summary(after=row)


def own_figures(federation: Federation, after: int | None) -> dict[str, float | None]:
    """Mean, FGT, BWT and FWT of all of a user's measures after a task, as ``measures.top5`` and ``measures.top5.fgt``.

    Args:
        federation: has their matrices.
        after: the row t, 0 .. T-1; None after no task: all figures are then left out.
    """
    matrices = [] if after is None else federation.own_measures.values()
    return {key: value for matrix in matrices for key, value in matrix.summary(after).items()}


def means(federation: Federation) -> list[float]:
    """Mean of the measure after each task, such as ACC, up to :func:`last_complete`, NaN where not evaluated.

    With a matrix per client it is the mean over the clients for which the figure is defined. If some clients do not
    hold every task, this differs from the figure of the mean matrix.
    """
    matrix, row = federation.measured.compute(), last_complete(federation)
    known = range(0 if row is None else row + 1)
    means = [average_accuracy(matrix, after=t).nanmean().item() for t in known]
    return means + [math.nan] * (federation.data.num_tasks - len(means))
