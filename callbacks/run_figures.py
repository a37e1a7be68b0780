"""Computes the figures of a round for ``rounds.csv``, and those of the whole run for ``summary.json``."""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from cfl.data.schedule import RoundPlan
from cfl.federation import matrix_rows
from cfl.federation.channel import payload_bytes
from cfl.federation.federation import Federation
from cfl.methods.returned_values import check_report
from cfl.metrics.task_matrix import TaskMatrix
from cfl.models.base import num_parameters
from cfl.reporting.experiment import method_name
from cfl.runtime import distributed
from cfl.training.client import Client
from cfl.training.evaluation import mean_matrix, over_clients

_log = logging.getLogger(__name__)


def round_figures(client: Client, plan: RoundPlan, evaluated: bool) -> dict[str, Any]:
    """The row of a finished round: column -> value, empty where nothing was evaluated."""
    federation = client.require_federation()
    channel, figure = federation.channel, federation.measure.figure
    row: dict[str, Any] = {
        "round": plan.round,
        "task": plan.task,
        "round_in_task": plan.round_in_task,
        "clients": len(plan.clients),
        "loss": client.mean_loss,
        "uplink_bytes": channel.total_uplink_bytes,
        "downlink_bytes": channel.total_downlink_bytes,
        "skipped_clients": sum(1 for entry in channel.skipped if entry[0] == plan.round),
        "seconds": federation.seconds,
        figure: federation.curve[plan.round] if evaluated else "",
    }
    beside, own = federation.measured.beside(), {one.key: one for one in federation.own_measures.values()}
    of_tasks: dict[str, list[Any]] = dict.fromkeys((figure, *beside, *own), [""] * federation.data.num_tasks)
    means: dict[str, float | None] = {}
    if evaluated:
        matrices = {figure: mean_matrix(federation)}
        several = beside | {key: matrix.compute() for key, matrix in own.items()}
        matrices |= {name: over_clients(federation, matrix) for name, matrix in several.items()}
        rows = {name: matrix[plan.task].tolist() for name, matrix in matrices.items()}
        of_tasks = {name: [value if math.isfinite(value) else None for value in row] for name, row in rows.items()}
        means = matrix_rows.own_figures(federation, plan.task)
    row |= {key: means.get(key) for key in own}
    row |= {f"{name}_task_{task}": value for name, values in of_tasks.items() for task, value in enumerate(values)}
    return row


def run_figures(
    federation: Federation, benchmark: str, config_hash: str, versions: Mapping[str, str], device: torch.device
) -> dict[str, Any]:
    """The figures of a run by their names in ``summary.json``, without those of callbacks and methods.

    Methods cannot replace these figures; see :func:`figures_by_default` for those that they can.

    Args:
        federation: the federation after its last round.
        benchmark: name of the benchmark.
        config_hash: hash of the experiment.
        versions: versions of the program and its libraries.
        device: the device of training. The network has been moved back to the CPU by now.
    """
    data, channel = federation.data, federation.channel
    after = matrix_rows.last_complete(federation)
    figures: dict[str, Any] = {
        "method": method_name(federation.methods),
        "benchmark": benchmark,
        "partition": data.partition.name,
        "participation": data.participation.name,
        "scenario": data.scenario,
        "seed": data.seed,
        **matrix_rows.figures(federation, federation.measured),
        **({} if after is None else federation.measured.details(after)),
        "uplink_bytes": channel.total_uplink_bytes,
        "downlink_bytes": channel.total_downlink_bytes,
        "uplink_bytes_by_topic": dict(channel.uplink_bytes),
        "downlink_bytes_by_topic": dict(channel.downlink_bytes),
        "seconds": federation.seconds,
        "rounds": federation.round,
        "tasks": data.num_tasks,
        "clients": data.num_clients,
        "config_hash": config_hash,
        "parameters": num_parameters(federation.network),
        "server_sees": "single clients' messages" if channel.individual_allowed else "sums only",
        "skipped_clients": len(channel.skipped),
        "skipped_messages": Counter(topic for _, topic, _ in channel.skipped_messages),
        "data_unlike_published": data.stream.unlike_published,
        "data_digests": data.digests,
        "processes": distributed.count(),
        "engine": federation.engine,
        "client_storage_bytes": federation.client_storage(),
        "extra_local_computation": federation.computes_more_locally,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": str(device),
        "versions": versions,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    for suffix, matrix in known_tasks(federation).items():
        figures |= {f"{key}{suffix}": value for key, value in matrix_rows.figures(federation, matrix).items()}
    if federation.own_measures:
        figures |= matrix_rows.own_figures(federation, after)
        figures["measures"] = {name: matrix.better for name, matrix in federation.own_measures.items()}
    figures |= figures_by_owner(federation)
    if channel.integers is not None:
        figures["integer_sums"] = channel.integers.summary()
    return figures


def figures_by_owner(federation: Federation) -> dict[str, float | None]:
    """Figures of clients' models on their own test samples, ``acc_worst_client_by_owner`` and others, in percent.

    They are those of a run with a matrix per client, but each client is tested on the samples that it owns. Empty if
    the data do not say whose test samples are.
    """
    if federation.by_owner is None:
        return {}
    found = matrix_rows.figures(federation, federation.by_owner)
    return {f"{key}_by_owner": found.get(key) for key in ("acc", "acc_std_clients", "acc_worst_client")}


def rows_by_owner(federation: Federation) -> list[dict[str, Any]]:
    """Accuracy of each client's model on its own test samples: a row per matrix row, task and client with samples.

    An evaluation within a task is replaced by the next one. A client has the global model unless models are personal.
    Tasks are numbered as in the matrices. Empty if the data do not say whose test samples are.
    """
    if federation.by_owner is None:
        return []
    counts = federation.by_owner.counts[:, :-1].cpu()
    after, task, client = places = counts.permute(1, 2, 0).nonzero().T
    columns = *places, counts[client, after, task], federation.by_owner.compute()[client, after, task]
    named = {task.train.client_names for task in federation.data.tasks if task.train.clients is not None}
    names = named.pop() if len(named) == 1 else ()
    return [
        {
            "after_task": after,
            "task": task,
            "client": client,
            "name": names[client] if names else client,
            "samples": samples,
            "accuracy": accuracy,
        }
        for after, task, client, samples, accuracy in zip(*(column.tolist() for column in columns), strict=True)
    ]


def figures_by_default(federation: Federation) -> dict[str, Any]:
    """Figures that a run has where no method reports them: bytes of all clients' models, and the used input space."""
    one = payload_bytes(dict(federation.network.named_parameters()))
    return {"model_bytes": federation.data.num_clients * one, "used_space": None}


def methods_figures(methods: Mapping[str, Any], of_run: Collection[str] = ()) -> dict[str, Any]:
    """The methods' figures for the summary; a figure that several have gets the method's name as prefix.

    A figure whose name is among ``of_run``, those of the run, is left out with a warning."""
    found = {name: check_report(name, method.report()).figures for name, method in methods.items()}
    several = Counter(key for figures in found.values() for key in figures)
    kept: dict[str, Any] = {}
    for name, figures in found.items():
        for key, value in figures.items():
            shown = key if several[key] == 1 else f"{name}_{key}"
            if shown in of_run:
                text = "methods.%s reports %s, which every run has: the method's value is left out"
                _log.warning(text, name, shown)
            else:
                kept[shown] = value
    return kept


def known_tasks(federation: Federation) -> dict[str, TaskMatrix]:
    """Suffix of file names -> the matrix with the tasks of test samples known, if there is one."""
    return {} if federation.known is None else {federation.measure.known: federation.known}
