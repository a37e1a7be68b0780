"""Participation: how many clients take part and which, drawn uniformly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.tiny import permuted, tiny_data

from cfl.data.participation import AllClients, Joining, Participation, RandomShare
from cfl.data.schedule import Schedule
from cfl.runtime.errors import ConfigError


def test_all_clients() -> None:
    members = AllClients().members(5, 3, seed=0)
    assert [m.tolist() for m in members] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(
    ("share", "num_clients", "count"),
    [
        (0.6, 208, 125),  # FOT, Table 10: C clients take part of C / 0.6
        (0.6, 83, 50),
        (0.6, 250, 150),
        (0.5, 5, 2),
        (1.0, 7, 7),
        (0.01, 10, 1),
    ],
)
def test_random_share_draws_that_many_distinct_clients(share: float, num_clients: int, count: int) -> None:
    for members in RandomShare(share).members(num_clients, 4, seed=1):
        assert members.dtype == np.int64
        assert len(members) == count
        assert (np.diff(members) > 0).all()
        assert members.min() >= 0
        assert members.max() < num_clients


def test_random_share_is_uniform_over_clients_and_pairs() -> None:
    draws = RandomShare(0.4).members(10, 4000, seed=0)
    together = np.zeros((10, 10))
    for members in draws:
        together[np.ix_(members, members)] += 1
    together /= len(draws)
    np.testing.assert_allclose(np.diag(together), 0.4, atol=0.035)  # four and a half standard errors
    pairs = together[~np.eye(10, dtype=bool)]
    np.testing.assert_allclose(pairs, 4 * 3 / (10 * 9), atol=0.03)


def test_random_share_is_keyed_by_seed_and_task() -> None:
    long, short = RandomShare(0.3).members(30, 6, seed=2), RandomShare(0.3).members(30, 2, seed=2)
    assert all(np.array_equal(a, b) for a, b in zip(long[:2], short, strict=True))
    assert len({tuple(m) for m in long}) == 6
    assert not np.array_equal(long[0], RandomShare(0.3).members(30, 1, seed=3)[0])


@pytest.mark.parametrize(
    ("share", "clients", "count"), [(0.25, 10, 2), (0.35, 10, 4), (0.5, 7, 4), (0.5, 5, 2), (0.01, 9, 1)]
)
def test_shares_are_rounded_in_rounds_as_in_tasks(share: float, clients: int, count: int) -> None:
    members = RandomShare(share).members(clients, 3, seed=0)
    assert [len(own) for own in members] == [count] * 3
    everyone = AllClients().members(clients, 3, seed=0)
    assert len(Schedule(1, clients_per_round=share).bind(everyone, 0).round(0).clients) == count


def test_joining_clients_stay_and_never_exceed_the_federation() -> None:
    members = Joining(30, 10).members(120, 12, seed=0)  # the published run grows from 30 to 120 clients in ten tasks
    assert [len(m) for m in members] == [30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 120, 120]
    assert all(np.array_equal(m, np.arange(len(m))) for m in members)
    assert [len(m) for m in Joining(3, 0).members(5, 3, seed=0)] == [3, 3, 3]


def test_names_tell_settings_apart() -> None:
    rules: list[Participation] = [AllClients(), RandomShare(0.6), RandomShare(0.5), Joining(3, 2), Joining(3, 1)]
    assert [rule.name for rule in rules] == ["all", "share-0.6", "share-0.5", "joining-3+2", "joining-3+1"]


def test_bad_settings_are_refused() -> None:
    for share in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(ConfigError, match=r"data\.participation\.share = .*in \(0, 1\]"):
            RandomShare(share)
    with pytest.raises(ConfigError, match=r"data\.participation\.initial = 0 .*at least 1"):
        Joining(0, 1)
    with pytest.raises(ConfigError, match=r"data\.participation\.per_task = -1 .*at least 0"):
        Joining(1, -1)
    with pytest.raises(ConfigError, match=r"data\.participation\.initial = 6 .*between 1 and data\.num_clients = 5"):
        Joining(6, 1).members(5, 2, seed=0)


class Mine(Participation):
    """A participation that returns a given value."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def members(self, num_clients: int, num_tasks: int, seed: int) -> Any:
        return self.found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "NoneType"),
        ([[0, 1]], "1 tasks"),
        ([[0.0], [1]], r"float64 \[1\] for task 0"),
        ([[0], []], r"float64 \[0\] for task 1"),
        ([[0], 1], r"int64 \[\] for task 1"),
        ([[0, 4], [0]], "2 clients for task 0, the first 0 and the last 4"),
        ([[0], [-1, 0]], "2 clients for task 1, the first -1 and the last 0"),
        ([[2, 1], [0]], "2 clients for task 0, the first 2 and the last 1"),
        ([[0], [1, 1]], "2 clients for task 1, the first 1 and the last 1"),
    ],
    ids=str,
)
def test_clients_that_there_are_not_are_refused(found: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.participation = 'Mine, which gives {said}' cannot work; valid: "):
        tiny_data(permuted(2), num_clients=4, participation=Mine(found)).setup("fit")


def test_a_rule_of_ones_own_needs_no_name_and_may_give_lists() -> None:
    data = tiny_data(permuted(2), num_clients=4, participation=Mine([[0, 2], np.array([3], dtype=np.uint8)]))
    data.setup("fit")
    assert data.participation.name == "mine"
    assert [clients.tolist() for clients in data.members] == [[0, 2], [3]]
    assert {clients.dtype for clients in data.members} == {np.dtype(np.int64)}
