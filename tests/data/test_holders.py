"""``Holders``: clients without samples of a task do not take part in it. Without this rule they are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import fit, mlp, permuted, sgd, split, tiny_client, tiny_data, weights

from cfl.callbacks import RunRecord
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import AllClients, Holders, Joining, Participation, RandomShare
from cfl.data.partitions import IID, Dirichlet
from cfl.data.sequences import RandomTasks
from cfl.runtime.errors import ConfigError

skewed = partial(Dirichlet, 0.05, min_samples=0, balance=False)


def skewed_data(participation: Participation | None, **options: Any) -> FederatedDataModule:
    options = {"num_clients": 6, "partition": skewed(), "seed": 3, **options}
    schedule = {"clients_per_round": 0.5, "rounds_per_task": 2, **options.pop("schedule", {})}
    stream = options.pop("stream", None) or permuted(3)
    return tiny_data(stream, participation=participation, schedule=schedule, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": {"drop_last": True}},
        {"validation": 0.3},
        {"repartition": False, "num_clients": 12},
        {"stream": split(2, classes=8), "repartition": False},
        {"stream": split(4, classes=8), "sequences": RandomTasks(2), "num_clients": 5},
        {"stream": split(4, classes=8), "sequences": RandomTasks(2, "holders"), "num_clients": 9},
    ],
    ids=["anew", "drop-last", "validation", "dealt-once", "dealt-as-one", "sequences", "sequences-of-holders"],
)
@pytest.mark.parametrize("of", [AllClients(), RandomShare(0.7)], ids=lambda of: of.name)
def test_who_has_a_batch_takes_part(of: Participation, options: dict[str, Any]) -> None:
    """Exactly the clients with a batch take part, with the samples dealt without the rule. Rounds sample only them."""
    if isinstance(of, RandomShare) and (options.keys() == {"stream", "repartition"}):
        pytest.skip("different training sets are dealt as one to clients that take part in all tasks only")
    data = skewed_data(Holders(of), **options)
    least = 8 if data.schedule.drop_last else 1
    away = 0
    for task, clients in enumerate(of.members(data.num_clients, data.num_tasks, data.seed)):
        dealt = {c: data.dealt[data.stream_task(task, c)].get(c, np.empty(0)) for c in clients.tolist()}
        expected = [c for c, own in dealt.items() if len(own) >= least]
        away += len(dealt) - len(expected)
        assert data.members[task].tolist() == expected == list(data.indices[task])
        for client in range(data.num_clients):
            own = data.client_global_index(task, client)
            assert len(own) == (len(dealt[client]) if client in expected else 0)
    assert away, "the partition leaves nobody without samples: nothing is tested"
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        holders = data.members[plan.task].tolist()
        assert set(plan.clients) <= set(holders)
        assert len(plan.clients) == max(1, round(0.5 * len(holders)))


def test_where_everybody_holds_every_task_it_changes_nothing() -> None:
    found, expected = (
        weights(fit(tiny_client(data, mlp, sgd), data))
        for data in (skewed_data(rule, partition=IID()) for rule in (Holders(), None))
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_number_of_rounds_is_known_before_a_file_is_read() -> None:
    data = skewed_data(Holders(), schedule={"rounds_per_task": [1, 2, 4], "clients_per_round": 3})
    assert data.num_rounds == data.rounds.num_rounds == 7
    assert [data.rounds.task_of(number) for number in range(7)] == [0, 1, 1, 2, 2, 2, 2]
    assert not data.rounds.client_clocks
    assert "tasks" not in vars(data)
    assert data.rounds.round(0).clients
    assert "tasks" in vars(data)


def test_a_number_of_clients_is_the_most_that_a_round_has() -> None:
    data = skewed_data(Holders(), schedule={"clients_per_round": 5})
    held = [len(members) for members in data.members]
    assert min(held) < 5
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        assert len(plan.clients) == min(5, held[plan.task])
    assert data.rounds.most_clients == min(5, max(held))


def test_how_many_samples_are_enough() -> None:
    data, all_of_them = (skewed_data(Holders(min_samples=count)) for count in (12, 1))
    for members, others, held in zip(data.members, all_of_them.members, data.dealt, strict=True):
        assert members.tolist() == [client for client, own in held.items() if len(own) >= 12]
        assert set(members.tolist()) <= set(others.tolist())
    assert data.participation.name != all_of_them.participation.name


def test_the_partition_report_shows_who_takes_part(tmp_path: Path) -> None:
    data = skewed_data(Holders())
    fit(tiny_client(data, mlp, sgd), data, callbacks=[RunRecord(dir=str(tmp_path / "run"))])
    rows = (tmp_path / "run" / "partition.csv").read_text().splitlines()[1:]
    found = [tuple(map(int, row.split(",")[:2])) for row in rows]
    assert found == [(task, client) for task, members in enumerate(data.members) for client in members.tolist()]


def test_without_it_such_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no sample of task .* data\.participation: Holders"):
        _ = skewed_data(None).indices


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"schedule": {"clock_spread": 0.5}}, "data.participation"),
        ({"exposure": "asynchronous"}, "data.participation"),
        ({"schedule": {"clients_per_round": 7}}, "schedule.clients_per_round"),
        ({"schedule": {"drop_last": True, "batch_size": 1000}}, "data.participation"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as found:
        skewed_data(Holders(Joining(6, 0)), **options).setup("fit")
    assert found.value.key == key


def test_one_rule_has_the_bound() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.participation\.of = 'holders-all-1000' .*min_samples = 1000, the larger"
    ):
        Holders(Holders(min_samples=1000), min_samples=2)


def test_fewer_samples_than_one_are_no_bound() -> None:
    with pytest.raises(ConfigError, match=r"data\.participation\.min_samples"):
        Holders(min_samples=0)
