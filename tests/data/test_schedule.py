"""Rounds, tasks and client sampling: the plan of a round is a function of seed and round only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cfl.data.schedule import BoundSchedule, Schedule
from cfl.runtime.errors import ConfigError

MEMBERS = [np.arange(10), np.array([1, 3, 4, 8]), np.array([0, 2, 5, 6, 7, 9])]


def bound(seed: int = 0, members: list[np.ndarray] | None = None, **options: Any) -> BoundSchedule:
    settings = {"rounds_per_task": [2, 1, 3], "clients_per_round": 3, **options}
    return Schedule(**settings).bind(MEMBERS if members is None else members, seed)


def test_rounds_run_through_the_tasks_in_order() -> None:
    schedule = bound()
    plans = [schedule.round(r) for r in range(schedule.num_rounds)]
    assert schedule.num_rounds == 6
    assert schedule.num_tasks == 3
    assert [(p.round, p.task, p.round_in_task, p.last_of_task) for p in plans] == [
        (0, 0, 0, False),
        (1, 0, 1, True),
        (2, 1, 0, True),
        (3, 2, 0, False),
        (4, 2, 1, False),
        (5, 2, 2, True),
    ]
    assert [schedule.task_of(r) for r in range(6)] == [p.task for p in plans]


def test_one_number_of_rounds_is_that_of_every_task() -> None:
    schedule = bound(rounds_per_task=4)
    assert schedule.num_rounds == 12
    assert [schedule.task_of(r) for r in range(12)] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("round", [-1, 6])
def test_there_is_no_round_outside(round: int) -> None:
    with pytest.raises(IndexError, match=r"0\.\.5"):
        bound().round(round)


def test_a_round_samples_distinct_members_of_its_task() -> None:
    schedule = bound(seed=3)
    for r in range(6):
        clients = schedule.round(r).clients
        assert len(clients) == 3
        assert list(clients) == sorted(set(clients))
        assert set(clients) <= set(MEMBERS[schedule.task_of(r)].tolist())
        assert all(type(client) is int for client in clients)


@pytest.mark.parametrize(
    ("asked", "sizes"), [(1.0, [10, 4, 6]), (0.5, [5, 2, 3]), (0.3, [3, 1, 2]), (0.01, [1, 1, 1]), (1, [1, 1, 1])]
)
def test_a_fraction_is_of_the_clients_that_hold_the_task(asked: float, sizes: list[int]) -> None:
    """The integer 1 is one client, the fraction 1.0 all of them."""
    schedule = bound(rounds_per_task=1, clients_per_round=asked)
    assert [len(schedule.round(r).clients) for r in range(3)] == sizes
    assert schedule.most_clients == max(sizes)


def test_sampling_is_uniform_over_clients_and_pairs() -> None:
    schedule = bound(rounds_per_task=4000, members=[np.arange(10)], clients_per_round=4)
    together = np.zeros((10, 10))
    for r in range(4000):
        clients = schedule.round(r).clients
        together[np.ix_(clients, clients)] += 1
    together /= 4000
    np.testing.assert_allclose(np.diag(together), 0.4, atol=0.035)  # four and a half standard errors
    np.testing.assert_allclose(together[~np.eye(10, dtype=bool)], 4 * 3 / (10 * 9), atol=0.03)


def test_a_plan_does_not_depend_on_what_was_asked_before() -> None:
    forwards, backwards, longer = bound(seed=1), bound(seed=1), bound(seed=1, rounds_per_task=[2, 1, 30])
    plans = [forwards.round(r) for r in range(6)]
    np.random.default_rng(0).random(7)
    assert [backwards.round(r) for r in reversed(range(6))] == plans[::-1]
    assert [forwards.round(r) for r in range(6)] == plans
    # More rounds change nothing of the earlier ones, except which round is a task's last.
    assert [longer.round(r).clients for r in range(6)] == [p.clients for p in plans]


def test_rounds_and_seeds_sample_differently() -> None:
    def samples(seed: int) -> list[tuple[int, ...]]:
        schedule = bound(seed=seed, rounds_per_task=20, members=[np.arange(30)])
        return [schedule.round(r).clients for r in range(20)]

    assert len(set(samples(0))) > 15
    assert all(a != b for a, b in zip(samples(0), samples(1), strict=True))


@pytest.mark.parametrize(
    ("every", "evaluated"), [(0, [1, 2, 5]), (1, [0, 1, 2, 3, 4, 5]), (2, [1, 2, 4, 5]), (9, [1, 2, 5])]
)
def test_evaluation_comes_every_so_many_rounds_of_a_task_and_at_its_end(every: int, evaluated: list[int]) -> None:
    schedule = bound(evaluate_every=every)
    assert [r for r in range(6) if schedule.evaluates_after(schedule.round(r))] == evaluated


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("local_epochs", 0),
        ("batch_size", 0),
        ("cohort_width", 0),
        ("evaluate_every", -1),
        ("rounds_per_task", 0),
        ("rounds_per_task", []),
        ("rounds_per_task", [3, 0]),
        ("rounds_per_task", 2.5),
        ("rounds_per_task", [1, 2.5]),
        ("rounds_per_task", "3"),
        ("clients_per_round", 0),
        ("clients_per_round", 0.0),
        ("clients_per_round", 1.5),
        ("clients_per_round", -0.5),
        ("client_dropout", 1.0),
        ("client_dropout", -0.1),
        ("dropout_stage", "training"),
        ("dropout_stage", "check"),  # client_dropout is 0
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(**{key: value})
    assert caught.value.key == f"schedule.{key}"
    assert caught.value.value == value


def test_a_list_needs_one_number_per_task() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.rounds_per_task.*list of 3"):
        bound(rounds_per_task=[2, 2])


def test_more_clients_than_hold_a_task_are_refused_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.clients_per_round = 5 .*at most 4.*task 1"):
        bound(clients_per_round=5)


@pytest.mark.parametrize(("share", "sampled", "others"), [(0.0, 0, 0), (0.2, 1, 1), (0.3, 1, 2), (0.9, 2, 6)])
def test_a_share_of_the_sampled_clients_and_of_all_others_drops_out(share: float, sampled: int, others: int) -> None:
    """The share is rounded to whole clients of the 3 sampled ones and of the 7 others. At least one of each remains."""
    schedule = bound(client_dropout=share)
    for r in range(6):
        gone, clients = schedule.dropouts(r), set(schedule.round(r).clients)
        assert len(gone & clients) == sampled
        assert len(gone - clients) == others
        assert gone <= set(range(10))


@pytest.mark.parametrize(
    ("schedule", "valid"),
    [
        ({"client_dropout": 0.16}, r"0, or more than 0\.167: nobody would drop out of a round of 3"),
        ({"client_dropout": 0.9, "clients_per_round": 1}, "0: nobody would drop out of a round of 1"),
        ({"client_dropout": 0.05, "sampling": "poisson"}, r"more than 0\.05: .* a round of 10"),
    ],
)
def test_a_share_with_which_nobody_drops_out_is_refused(schedule: dict[str, Any], valid: str) -> None:
    with pytest.raises(ConfigError, match=rf"schedule\.client_dropout .*{valid}"):
        bound(**schedule)


def test_dropouts_are_a_function_of_seed_and_round_and_change_no_sample() -> None:
    one, other, plain = bound(client_dropout=0.4), bound(client_dropout=0.4), bound()
    backwards = [other.dropouts(r) for r in reversed(range(6))][::-1]
    assert [one.dropouts(r) for r in range(6)] == backwards
    assert [one.round(r) for r in range(6)] == [plain.round(r) for r in range(6)]
    assert backwards != [bound(1, client_dropout=0.4).dropouts(r) for r in range(6)]


def test_every_client_drops_out_as_often_as_others() -> None:
    schedule = bound(members=[np.arange(10)], rounds_per_task=3000, clients_per_round=10, client_dropout=0.3)
    counts = np.bincount([client for r in range(3000) for client in schedule.dropouts(r)], minlength=10)
    assert counts.sum() == 9000
    assert np.abs(counts - 900).max() < 5 * (3000 * 0.3 * 0.7) ** 0.5


def test_of_few_clients_everyone_joins_but_nobody_more_often() -> None:
    """Poisson sampling's rate is at most 1, if fewer clients hold a task than ``clients_per_round``."""
    members = [np.arange(10), np.array([1, 4])]
    bound = Schedule(1, 3, sampling="poisson").bind([np.arange(10)] * 2, 0, lambda: members)
    assert [bound.sampling_rate(round) for round in (0, 1)] == [0.3, 1.0]
    assert bound.expected_clients(1) == 2.0
