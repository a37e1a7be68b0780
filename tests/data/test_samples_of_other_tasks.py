"""Samples of other tasks that clients keep to train on are counted as storage and as computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli
from support.tiny import fit, mlp, norm_net, permuted, sgd, split, tiny_client, tiny_data

from cfl.data.exposure import Exposure
from cfl.data.participation import RandomShare
from cfl.data.partitions import Dirichlet
from cfl.data.samples_of_other_tasks import samples_of_other_tasks
from cfl.data.sequences import DisjointTasks
from cfl.methods import FedCurv


@pytest.mark.parametrize("exposure", ["sequential", "cumulative", "joint"])
@pytest.mark.parametrize(
    "options",
    [
        {"partition": Dirichlet(0.5, 3)},
        {"participation": RandomShare(0.5), "num_clients": 6},
        {"sequences": DisjointTasks(count=2), "num_clients": 2},
    ],
    ids=["unequal", "not everybody everywhere", "sequences"],
)
def test_it_is_what_a_client_trains_on_but_for_the_current_tasks(exposure: Exposure, options: dict[str, Any]) -> None:
    data = tiny_data(split(4, classes=8, train=160), exposure=exposure, **options)
    most = 0
    for task in range(data.num_tasks):
        for client in data.trained_on(task):
            own = set(data.client_global_index(task, client).tolist())
            most = max(most, len(set(data.global_index_trained_on(task, client).tolist()) - own))
    assert samples_of_other_tasks(data) == most
    assert (most == 0) == (exposure == "sequential")


def test_clients_that_meet_every_sample_once_keep_none() -> None:
    assert samples_of_other_tasks(tiny_data(exposure="asynchronous")) == 0


def test_cumulative_training_of_a_single_task_keeps_nothing() -> None:
    data = tiny_data(permuted(1), exposure="cumulative")
    federation = fit(tiny_client(data, mlp, sgd), data)
    assert (federation.client_storage(), federation.computes_more_locally) == (0, False)


@pytest.mark.parametrize("exposure", ["sequential", "cumulative", "joint"])
def test_it_adds_to_what_else_a_client_keeps(exposure: Exposure) -> None:
    """Kept samples add to a client's other storage: 40 samples of 16 + 2 bytes, a quarter of two tasks with 80."""
    data = tiny_data(permuted(3), exposure=exposure, schedule={"rounds_per_task": 1})
    federation = fit(tiny_client(data, norm_net, sgd), data, {"batchnorm": "local"})
    statistics = sum(b.numel() * b.element_size() for b in federation.network.buffers())
    samples = 0 if exposure == "sequential" else 40 * (16 + 2)
    assert federation.client_storage() == statistics + samples
    assert federation.computes_more_locally == (exposure != "sequential")


def test_methods_that_compute_more_do_so_under_any_exposure() -> None:
    data = tiny_data()
    assert fit(tiny_client(data, mlp, sgd, {"fedcurv": FedCurv(strength=1.0)}), data).computes_more_locally


def test_a_run_reports_both(tmp_path: Path) -> None:
    """A run's summary reports storage and computation. Each of four clients keeps 24 of the first task's 96 samples."""
    assert tiny_cli.fit(tmp_path / "run", "--data.exposure", "cumulative") == 0
    summary = tiny_cli.summary(tmp_path / "run")
    assert summary["client_storage_bytes"] == 24 * (16 + 2)
    assert summary["extra_local_computation"] is True
