"""A round's batches: each sample of each client once per epoch, in an order that is the same for all cohort widths."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cfl.data.cohort_dealing import deal_cohorts, local_steps
from cfl.data.cohorts import CohortBatch
from cfl.data.enough_samples import check_every_client_trains
from cfl.data.round_loader import RoundLoader
from cfl.data.schedule import RoundPlan, Schedule
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError

SIZES = {1: 17, 2: 4, 5: 9, 6: 1, 8: 12, 9: 4, 11: 30}
CASES = [
    {"batch_size": 4, "local_epochs": 1},
    {"batch_size": 4, "local_epochs": 3},
    {"batch_size": 1, "local_epochs": 2},
    {"batch_size": 50, "local_epochs": 2},
]
WIDTHS = [1, 2, 3, 5, 7, 20]


def shares(sizes: dict[int, int] = SIZES) -> dict[int, np.ndarray]:
    """Disjoint shares of a training set, not in order."""
    order = np.random.default_rng(5).permutation(sum(sizes.values()))
    parts = np.split(order, np.cumsum(list(sizes.values()))[:-1])
    return dict(zip(sizes, parts, strict=True))


def loader(
    width: int, round: int = 4, seed: int = 0, sizes: dict[int, int] = SIZES, **options: Any
) -> tuple[RoundLoader, dict[int, np.ndarray]]:
    indices = shares(sizes)
    plan = RoundPlan(round=round, task=2, round_in_task=1, clients=tuple(sorted(sizes)), last_of_task=False)
    return RoundLoader(plan, indices, Schedule(cohort_width=width, **options), seed), indices


def steps_of(batches: list[CohortBatch]) -> dict[int, list[list[int]]]:
    """For each client, the samples of each of its local steps, without padding."""
    steps: dict[int, list[list[int]]] = {}
    for batch in batches:
        for row, client in enumerate(batch.clients):
            samples = batch.index[row][batch.mask[row]].tolist()
            if samples:
                steps.setdefault(client, []).append(samples)
    return steps


def joined(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_sample_of_every_client_once_per_epoch(width: int, options: dict[str, int]) -> None:
    rounds, indices = loader(width, **options)
    steps = steps_of(list(rounds))
    size, epochs = options["batch_size"], options["local_epochs"]
    assert set(steps) == set(SIZES)
    for client, own in indices.items():
        per_epoch = -(-len(own) // size)
        assert len(steps[client]) == per_epoch * epochs
        for epoch in range(epochs):
            passes = steps[client][epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(step) for step in passes[:-1]] == [size] * (per_epoch - 1)
            assert sorted(joined(passes)) == sorted(own.tolist())


@pytest.mark.parametrize("width", WIDTHS)
def test_drop_last_leaves_out_the_partial_batch_of_every_epoch(width: int) -> None:
    sizes = {client: size for client, size in SIZES.items() if size >= 4}
    rounds, indices = loader(width, sizes=sizes, batch_size=4, local_epochs=3, drop_last=True)
    steps = steps_of(list(rounds))
    left_out = set()
    for client, own in indices.items():
        assert len(steps[client]) == 3 * (len(own) // 4)
        for epoch in range(3):
            passes = joined(steps[client][epoch * (len(own) // 4) : (epoch + 1) * (len(own) // 4)])
            assert len(set(passes)) == len(passes) == len(own) // 4 * 4
            assert set(passes) <= set(own.tolist())
            left_out.add((client, *sorted(set(own.tolist()) - set(passes))))
    # Epochs leave out different samples: client 1 has 17, so each of its three epochs leaves out one.
    assert len([out for out in left_out if out[0] == 1]) > 1


@pytest.mark.parametrize("options", [*CASES, {"batch_size": 4, "drop_last": True}], ids=str)
def test_the_order_does_not_depend_on_the_width(options: dict[str, Any]) -> None:
    sizes = {c: n for c, n in SIZES.items() if n >= 4} if options.get("drop_last") else SIZES
    alone = steps_of(list(loader(1, sizes=sizes, **options)[0]))
    for width in WIDTHS[1:]:
        assert steps_of(list(loader(width, sizes=sizes, **options)[0])) == alone


def test_the_order_is_keyed_by_seed_round_client_and_epoch() -> None:
    steps = steps_of(list(loader(3, round=7, seed=11, batch_size=5, local_epochs=2)[0]))
    for client, own in shares().items():
        flat = joined(steps[client])
        for epoch in range(2):
            order = numpy_generator(11, "shuffle", 7, client, epoch).permutation(len(own))
            assert flat[epoch * len(own) : (epoch + 1) * len(own)] == own[order].tolist()


def test_other_clients_rounds_seeds_and_epochs_are_shuffled_differently() -> None:
    own = {client: np.arange(40) for client in (0, 1)}

    def orders(round: int, seed: int) -> set[tuple[int, ...]]:
        plan = RoundPlan(round, 0, round, (0, 1), False)
        batches = list(RoundLoader(plan, own, Schedule(batch_size=40, local_epochs=2, cohort_width=2), seed))
        return {tuple(step) for steps in steps_of(batches).values() for step in steps}

    assert len(orders(0, 0) | orders(1, 0) | orders(0, 1)) == 12


def test_a_loader_can_be_walked_again() -> None:
    rounds, _ = loader(3, batch_size=4)
    first, second = list(rounds), list(rounds)
    assert all(
        torch.equal(a.index, b.index) and torch.equal(a.mask, b.mask) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_padding_repeats_samples_of_the_clients_own(width: int, options: dict[str, int]) -> None:
    """Padding holds only the client's own samples, because networks that mix samples would leak another client's."""
    rounds, indices = loader(width, **options)
    for batch in rounds:
        assert batch.index.shape == batch.mask.shape == (len(batch.clients), batch.index.shape[1])
        assert batch.padded == (not bool(batch.mask.all()))
        for row, client in enumerate(batch.clients):
            assert set(batch.index[row].tolist()) <= set(indices[client].tolist())
        assert bool(batch.mask.any(0).all()), "a column that everybody pads"
        assert bool(batch.mask.any(1).any()), "a step that nobody takes"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_opening_closing_and_the_end_of_the_round(width: int, options: dict[str, int]) -> None:
    rounds, _ = loader(width, **options)
    batches = list(rounds)
    assert len(batches) == len(rounds)
    assert [batch.last_of_round for batch in batches] == [False] * (len(batches) - 1) + [True]
    schedule = rounds.schedule
    closed: list[int] = []
    opened: list[int] = []
    for position, batch in enumerate(batches):
        follows = position > 0 and batches[position - 1].cohort == batch.cohort
        assert batch.opens != follows
        assert batch.step == (batches[position - 1].step + 1 if follows else 0)
        assert batch.cohort == (batches[position - 1].cohort + (not follows) if position else 0)
        if batch.opens:
            opened += batch.clients
        else:
            assert batch.clients == batches[position - 1].clients
        assert batch.sizes == tuple(SIZES[client] for client in batch.clients)
        assert batch.task == 2
        assert torch.equal(batch.task_ids, torch.full_like(batch.index, 2))
        for row in batch.closes:
            assert batch.step + 1 == local_steps(SIZES[batch.clients[row]], schedule)
            assert bool(batch.mask[row].any())
        closed += [batch.clients[row] for row in batch.closes]
    assert sorted(closed) == sorted(opened) == sorted(SIZES)


@pytest.mark.parametrize("width", WIDTHS)
def test_cohorts_are_balanced_and_alike_in_size(width: int) -> None:
    cohorts = deal_cohorts(SIZES, Schedule(cohort_width=width))
    widths = [len(cohort) for cohort in cohorts]
    assert len(cohorts) == -(-len(SIZES) // width)
    assert max(widths) <= width
    assert max(widths) - min(widths) <= 1
    assert sorted(joined(cohorts)) == sorted(SIZES)
    for larger, smaller in pairwise(cohorts):
        assert min(SIZES[c] for c in larger) >= max(SIZES[c] for c in smaller)


def test_client_ids_are_plain_integers() -> None:
    """Client ids are no NumPy integers: in a checkpoint, these would prevent loading as weights only."""
    for batch in loader(3, batch_size=4)[0]:
        assert {type(client) for client in batch.clients} == {int}
        assert {type(size) for size in batch.sizes} == {int}
        assert {type(row) for row in batch.closes} <= {int}


def test_moving_a_batch_keeps_everything() -> None:
    batch = next(iter(loader(3, batch_size=4)[0]))
    moved = batch.to("cpu")
    assert torch.equal(moved.index, batch.index)
    assert torch.equal(moved.mask, batch.mask)
    assert (moved.clients, moved.closes, moved.step) == (batch.clients, batch.closes, batch.step)
    away = batch.to("meta")
    assert (away.index.device.type, away.mask.device.type) == ("meta", "meta")
    assert (away.clients, away.closes, away.step) == (batch.clients, batch.closes, batch.step)


@pytest.mark.parametrize(
    ("size", "options", "steps"),
    [
        (10, {"batch_size": 4}, 3),
        (8, {"batch_size": 4}, 2),
        (10, {"batch_size": 4, "drop_last": True}, 2),
        (10, {"batch_size": 4, "local_epochs": 3}, 9),
        (10, {"batch_size": 4, "local_epochs": 3, "drop_last": True}, 6),
        (3, {"batch_size": 4, "drop_last": True}, 0),
    ],
)
def test_local_steps(size: int, options: dict[str, Any], steps: int) -> None:
    assert local_steps(size, Schedule(**options)) == steps


def test_a_client_without_a_batch_is_refused() -> None:
    indices = [{0: np.arange(9)}, {0: np.arange(9), 3: np.arange(5)}]
    check_every_client_trains(indices, Schedule(batch_size=5, drop_last=True))
    with pytest.raises(ConfigError, match=r"schedule\.drop_last.*client 3 has 5 samples of task 1.*batch of 6"):
        check_every_client_trains(indices, Schedule(batch_size=6, drop_last=True))
    with pytest.raises(ConfigError, match="client 3 has 5 samples of round 1, which"):
        check_every_client_trains(indices, Schedule(batch_size=6, drop_last=True), "round")
    check_every_client_trains(indices, Schedule(batch_size=6))
    indices[1][3] = np.arange(0)
    for drop_last in (False, True):
        with pytest.raises(ConfigError, match=r"data\.partition.*client 3 has no sample of task 1"):
            check_every_client_trains(indices, Schedule(drop_last=drop_last, batch_size=1))


@pytest.mark.parametrize("width", [2, 8, 64])
def test_little_of_what_is_computed_is_padding(width: int) -> None:
    """At most 10 % of a cohort's batches is padding, for clients whose sizes differ a hundredfold."""
    generator = np.random.default_rng(0)
    sizes = {client: int(n) for client, n in enumerate(np.exp(generator.uniform(0, np.log(100), 60)).astype(int))}
    schedule = Schedule(cohort_width=width, batch_size=7, local_epochs=2)
    schedule.settle_width(width, most_padding=0.1)
    indices = {client: np.arange(n) for client, n in sizes.items()}
    rounds = RoundLoader(RoundPlan(0, 0, 0, tuple(sizes), False), indices, schedule, 0)
    assert sorted(client for group in rounds.cohorts for client in group) == list(sizes)
    assert max(map(len, rounds.cohorts)) <= width
    computed, used = Counter[int](), Counter[int]()
    for batch in rounds:
        computed[batch.cohort] += batch.mask.numel()
        used[batch.cohort] += int(batch.mask.sum())
    assert all(computed[cohort] - used[cohort] <= 0.1 * computed[cohort] for cohort in computed)
    assert len(rounds.cohorts) < len(sizes)
