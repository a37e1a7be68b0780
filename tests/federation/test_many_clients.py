"""A hundred thousand clients, few of them sampled: the cost of a round depends on the sampled clients only."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.partition_rows import partition_rows
from support.tiny import fit, permuted, tiny_client, tiny_data, weights

from cfl.callbacks import RoundCheckpoint, RoundProgress, RunRecord
from cfl.data import schedule
from cfl.data.enough_samples import check_every_client_trains
from cfl.data.participation import AllClients, Joining, RandomShare
from cfl.data.partitions import IID, ClassesPerClient, Dirichlet, Partition, Shards, client_indices
from cfl.data.report import partition_figure, write_partition_csv
from cfl.data.round_loader import RoundLoader
from cfl.data.schedule import Schedule
from cfl.data.types import ImageSet, PixelTransform, Task
from cfl.methods import PersonalLayers
from cfl.models import MLP
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError

POPULATION, SAMPLES = 100_000, 1_000_000


def tasks_of(samples: int, classes: int = 10, tasks: int = 2) -> list[Task]:
    labels = np.random.default_rng(0).permutation(np.arange(samples) % classes)
    stored = ImageSet(torch.zeros(samples, 1, 1, 1, dtype=torch.uint8), torch.from_numpy(labels))
    return [Task(f"task {t}", stored, stored, classes, PixelTransform((0.0,), (1.0,))) for t in range(tasks)]


def memory_of(make: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of ``make``, the bytes held after it, and the most bytes held meanwhile."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, held, most


@pytest.mark.parametrize("partition", [IID(), Shards(2), ClassesPerClient(2), Dirichlet(5.0, 1)], ids=lambda p: p.name)
def test_a_partition_takes_little_more_than_an_index_per_sample(partition: Partition) -> None:
    """A partition takes 8 bytes for each sample, and for each client 8 (its first sample) + 4 (number of its share)."""
    tasks = tasks_of(SAMPLES)
    members = AllClients().members(POPULATION, 2, seed=0)
    dealt, held, _ = memory_of(lambda: client_indices(tasks, partition, members, POPULATION, 0, True))
    assert sum(len(dealt[1][client]) for client in range(0, POPULATION, 1000)) > 0
    assert 2 * 8 * SAMPLES <= held < 2 * (8 * SAMPLES + 20 * POPULATION)


def test_tasks_that_share_one_deal_share_its_memory() -> None:
    tasks, seldom = tasks_of(SAMPLES, tasks=10), RandomShare(0.3)
    members = seldom.members(POPULATION, 10, seed=0)
    _, held, _ = memory_of(lambda: client_indices(tasks, IID(), members, POPULATION, 0, False))
    assert held < 8 * SAMPLES + 8 * POPULATION + 10 * 4 * POPULATION + 10**6
    for everyone in (AllClients(), Joining(10, 30_000)):
        _, held, _ = memory_of(lambda rule=everyone: rule.members(POPULATION, 10, seed=0))
        assert held < 9 * POPULATION


class Watched(Mapping[int, np.ndarray]):
    """A million clients of ten samples each, created when looked up. Iterating over all clients fails."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}

    def __getitem__(self, client: int) -> np.ndarray:
        self.asked[client] = self.asked.get(client, 0) + 1
        return np.arange(10 * client, 10 * client + 10)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("walked through all clients")

    def __len__(self) -> int:
        raise AssertionError("counted all clients")


def test_a_round_asks_for_its_own_clients_only() -> None:
    settings = Schedule(1, 50, local_epochs=2, batch_size=4, cohort_width=8)
    bound, watched = settings.bind([np.arange(10**6)], seed=0), Watched()
    plan = bound.round(0)
    loader = RoundLoader(plan, watched, settings, seed=0)
    batches = list(loader)
    assert len(batches) == len(loader) == 7 * 6
    assert set(watched.asked) == set(plan.clients)
    assert max(watched.asked.values()) <= 2
    seen = {i for batch in batches for i in batch.index[batch.mask].tolist()}
    assert seen == {i for client in plan.clients for i in range(10 * client, 10 * client + 10)}


def test_a_rounds_clients_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's clients are drawn once, although loader, orchestrator, record, checkpoint and progress use them."""
    drawn: list[int] = []

    def counting(seed: int, purpose: str, *indices: int) -> np.random.Generator:
        drawn.append(indices[0])
        assert purpose == "sample clients"
        return numpy_generator(seed, purpose, *indices)

    monkeypatch.setattr(schedule, "numpy_generator", counting)
    data = tiny_data(num_clients=30, schedule={"clients_per_round": 4}, stream=permuted(train=120))
    callbacks = [RunRecord(str(tmp_path)), RoundProgress(), RoundCheckpoint()]
    fit(tiny_client(data), data, callbacks=callbacks, enable_checkpointing=True)
    assert drawn == list(range(6))


def test_others_do_not_change_what_sampled_clients_do() -> None:
    """The same sampled clients train to the same model, whether there are 6 or 6000 clients."""
    own = {client: np.arange(12 * client, 12 * client + 12) for client in range(6)}
    models = []
    for clients in (6, 6000):
        data = tiny_data(permuted(train=80), num_clients=6, schedule={"clients_per_round": 3})
        everyone = {**own, **{client: np.arange(70, 75) for client in range(6, clients)}}
        data.__dict__["indices"] = [everyone] * 2
        models.append(weights(fit(tiny_client(data), data)))
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_a_clients_model_takes_one_pass_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data()
    federation = fit(tiny_client(data, methods={"own": PersonalLayers(["head.*"])}), data)
    listed: list[MLP] = []
    buffers = MLP.named_buffers  # state_tensors alone lists them
    monkeypatch.setattr(MLP, "named_buffers", lambda network: listed.append(network) or buffers(network))
    own = federation.model_of(2, None)
    assert federation.measures_clients
    assert len(listed) == 1
    kept = federation.clients.get("model", 2)
    assert kept is not None
    expected = {**dict(federation.network.named_parameters()), **kept}
    assert all(torch.equal(own[name], value) for name, value in expected.items())
    assert set(kept) == {"head.weight", "head.bias"}


def test_an_idle_client_among_many_is_found() -> None:
    members = [np.arange(1000)]
    dealt = client_indices(tasks_of(10_000, tasks=1), Dirichlet(0.05, 0), members, 1000, 0, True)
    first = next(client for client, own in dealt[0].items() if len(own) == 0)
    with pytest.raises(ConfigError, match=f"client {first} has no sample of task 0"):
        check_every_client_trains(dealt, Schedule(batch_size=4))
    plain = [dict(dealt[0])]
    with pytest.raises(ConfigError, match=f"client {first} has no sample of task 0"):
        check_every_client_trains(plain, Schedule(batch_size=4))
    check_every_client_trains(
        client_indices(tasks_of(4000, tasks=1), IID(), members, 1000, 0, True), Schedule(batch_size=4, drop_last=True)
    )


# The partition report.


def test_the_table_is_written_without_being_held(tmp_path: Path) -> None:
    tasks = tasks_of(200_000)
    dealt = client_indices(tasks, IID(), [np.arange(20_000)] * 2, 20_000, 0, True)
    _, _, most = memory_of(lambda: write_partition_csv(tmp_path / "partition.csv", tasks, dealt))
    assert most < 10e6  # a list of all rows would be 26 MB
    assert (tmp_path / "partition.csv").read_text().count("\n") == 40_001


def test_compact_and_plain_mappings_are_reported_alike() -> None:
    """Both kinds of mappings give the same rows, also beyond one block of clients and for tasks dealt as one."""
    tasks = tasks_of(50_000)
    members = RandomShare(0.6).members(9000, 2, seed=0)
    for repartition in (True, False):
        dealt = client_indices(tasks, Dirichlet(1.0, 0), members, 9000, 0, repartition)
        rows = partition_rows(tasks, dealt)
        assert rows == partition_rows(tasks, [dict(of_client) for of_client in dealt])
        assert [row["client"] for row in rows] == [*members[0].tolist(), *members[1].tolist()]
        for row in rows[::7]:
            labels = tasks[0].train.labels[torch.from_numpy(dealt[row["task"]][row["client"]])]
            assert [row[f"class_{k:02d}"] for k in range(10)] == labels.bincount(minlength=10).tolist()
        upside_down = [{client: own[::-1] for client, own in of_client.items()} for of_client in dealt]
        assert rows == partition_rows(tasks, upside_down)


def test_the_picture_of_many_clients_is_that_of_the_first() -> None:
    tasks = tasks_of(30_000)
    dealt = client_indices(tasks, IID(), [np.arange(3000)] * 2, 3000, 0, True)
    first = [{client: of_client[client] for client in range(150)} for of_client in dealt]
    many, few = partition_figure(tasks, dealt), partition_figure(tasks, first)
    assert many.get_suptitle() == "first 150 of 3000 clients"
    for ours, theirs in zip(many.axes[:2], few.axes[:2], strict=True):
        drawn = [ax.images[0].get_array().filled(0) for ax in (ours, theirs)]
        assert drawn[0].max() > 2
        assert np.array_equal(*drawn)
    assert np.array_equal(many.get_size_inches(), few.get_size_inches())
