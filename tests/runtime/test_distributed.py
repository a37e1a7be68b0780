"""Exchange between processes, and how a round's clients and test sets are divided among them."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cfl.data.cohort_dealing import deal_clients, local_steps
from cfl.data.evaluation import EvaluationLoader
from cfl.data.round_loader import RoundLoader
from cfl.data.schedule import RoundPlan, Schedule
from cfl.federation.channel import Channel
from cfl.federation.client_states import ClientStates
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.randomness.generators import torch_generator
from cfl.runtime import distributed
from cfl.testing.processes import TIMEOUT, Crew, Failed
from cfl.training.strategy import fair_threads


def connect(size: int) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT), rank=rank, world_size=size)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(3)
    crew.run(connect, 3)
    yield crew
    crew.close()


def some(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (10 * torch.randn(shape, generator=torch_generator(seed, "some"))).to(dtype)


def test_one_process_keeps_what_it_has() -> None:
    tensors = {"a": some(0, 2, 3)}
    assert (distributed.count(), distributed.rank()) == (1, 0)
    assert distributed.gather("x") == ["x"]
    assert distributed.from_first("x") == "x"
    assert distributed.add_up(tensors)["a"] is tensors["a"]
    assert distributed.share_out({7: tensors})[7]["a"] is tensors["a"]
    distributed.raise_if_one_failed()


# Sums.

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]


def contribution(rank: int) -> dict[str, Tensor]:
    """Return tensors of a process: all dtypes, empty, 0-dimensional, non-contiguous, and a name of rank 1 only."""
    tensors = {str(dtype): some(rank, 3, 2, dtype=dtype) for dtype in DTYPES}
    tensors |= {"scalar": some(10 + rank), "empty": some(rank, 0, 4), "turned": some(20 + rank, 4, 3).T}
    if rank == 1:
        tensors["alone"] = some(30, 5)
    return {} if rank == 2 else tensors


def sums() -> list[tuple[str, list[float], list[int], str]]:
    found = distributed.add_up(contribution(distributed.rank()))
    return [(name, t.double().flatten().tolist(), list(t.shape), str(t.dtype)) for name, t in found.items()]


def test_sums_over_processes(crew: Crew) -> None:
    results = crew.run(sums)
    assert results[0] == results[1] == results[2]
    ours, theirs = contribution(0), contribution(1)
    assert [name for name, *_ in results[0]] == [*ours, "alone"]
    for name, values, shape, dtype in results[0]:
        expected = theirs[name] + ours[name] if name in ours else theirs[name]
        assert values == pytest.approx(expected.double().flatten().tolist(), rel=1e-6)
        assert (shape, dtype) == (list(expected.shape), str(expected.dtype))


def reductions() -> int:
    calls = []
    original = dist.all_reduce

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    dist.all_reduce = counted
    try:
        tensors = {f"f{i}": torch.zeros(2) for i in range(9)}
        distributed.add_up(tensors | {f"i{i}": torch.zeros(3).long() for i in range(9)})
    finally:
        dist.all_reduce = original
    return len(calls)


def test_one_reduction_per_dtype(crew: Crew) -> None:
    assert crew.run(reductions) == [2, 2, 2]


def other_shapes() -> None:
    distributed.add_up({"a": torch.zeros(2 + distributed.rank())})


def test_tensors_that_do_not_fit_are_refused_everywhere(crew: Crew) -> None:
    crew.start(other_shapes)
    for outcome in crew.outcomes():
        assert isinstance(outcome, Failed)
        assert outcome.kind == "ValueError"
        assert "'a'" in outcome.message


# Values and tensors that every process gets.


def values() -> tuple[list[Any], Any]:
    me = distributed.rank()
    return distributed.gather({"me": me}), distributed.from_first(("first", me))


def test_values_of_all_and_of_the_first(crew: Crew) -> None:
    assert crew.run(values) == [([{"me": 0}, {"me": 1}, {"me": 2}], ("first", 0))] * 3


def belongings(rank: int) -> dict[Any, dict[str, Tensor]]:
    """Return tensors to share: odd numbers of bytes before wider dtypes, an empty tensor, and nothing from rank 1."""
    if rank == 1:
        return {}
    return {
        ("state", 3 + rank): {
            "flag": some(rank, 3) > 0,
            "half": some(rank, 5, dtype=torch.bfloat16),
            "double": some(rank, 2, 2, dtype=torch.float64),
            "none": some(rank, 0, 2),
            "count": torch.tensor(7 + rank),
            "turned": some(rank, 4, 3).T,
        },
        ("state", rank): {},
    }


def shared_belongings() -> list[Any]:
    found = distributed.share_out(belongings(distributed.rank()))
    return [
        (key, n, str(t.dtype), list(t.shape), t.double().flatten().tolist())
        for key in sorted(found)
        for n, t in found[key].items()
    ] + sorted(found)


def test_everybody_gets_everything(crew: Crew) -> None:
    expected = belongings(0) | belongings(2)
    listed = [
        (key, n, str(t.dtype), list(t.shape), t.double().flatten().tolist())
        for key in sorted(expected)
        for n, t in expected[key].items()
    ] + sorted(expected)
    assert crew.run(shared_belongings) == [listed] * 3


def twice() -> None:
    distributed.share_out({"same": {"a": torch.zeros(1)}})


def test_nothing_may_come_from_two_processes(crew: Crew) -> None:
    crew.start(twice)
    assert {outcome.kind for outcome in crew.outcomes()} == {"ValueError"}


# The channel.


def message(client: int) -> dict[str, Tensor]:
    return {"w": some(client, 1, 4, dtype=torch.float64), "n": torch.tensor([client])}


def send(clients: list[int]) -> dict[str, Any]:
    """Let clients send and receive by a channel, and return its results. Client 5 sends NaN and is left out."""
    channel = Channel("skip", individual_allowed=True)
    channel.load_state_dict({"uplink_bytes": {"update": 1000}, "downlink_bytes": {}, "skipped": [[0, 0, 2]]})
    channel.enter_round(1, 4)
    channel.downlink("model", {"w": torch.zeros(3)}, len(clients))
    for client in clients:
        payload = message(client)
        if client == 5:
            payload["w"][0, 1] = torch.nan
        channel.uplink("update", payload, [1.0 + client], [client])
        single = message(client)
        if client == 3:
            single["w"][0, 1] = torch.nan
        channel.uplink_individually("single", single, [client])
        if client > 5:
            channel.uplink("late", {"x": torch.ones(1, 2)}, [1.0], [client])
    update, weight = channel.sum("update")
    late, senders = channel.sum("late")
    messages = channel.collect_individually("single")
    channel.synchronise()
    channel.synchronise()  # a second call counts nothing twice
    return {
        "update": {name: value.tolist() for name, value in update.items()},
        "weights": (weight, senders),
        "late": late["x"].tolist(),
        "single": [(client, payload["w"].tolist()) for client, payload in messages.items()],
        "state": channel.state_dict(),
    }


def send_own() -> dict[str, Any]:
    return send([[6, 0, 5], [], [3, 7]][distributed.rank()])


def test_the_server_reads_what_all_clients_have_sent(crew: Crew) -> None:
    one = send([0, 3, 5, 6, 7])
    assert one["state"]["skipped"] == [[0, 0, 2], [4, 1, 5]]
    assert one["state"]["skipped_messages"] == [[4, "single", 3]]
    for found in crew.run(send_own):
        assert found["update"]["w"] == pytest.approx(one["update"]["w"], rel=1e-12)
        assert {k: v for k, v in found.items() if k != "update"} == {k: v for k, v in one.items() if k != "update"}


def all_skipped() -> None:
    channel = Channel("skip")
    channel.uplink("update", {"w": torch.full((1, 2), torch.nan)}, [1.0], [distributed.rank()])
    channel.sum("update")


def test_no_usable_message_in_any_process_is_an_error_in_all(crew: Crew) -> None:
    crew.start(all_skipped)
    assert [outcome.kind for outcome in crew.outcomes()] == ["BadUpdate"] * 3


# What clients keep; the accuracy matrix.


def keep() -> list[Any]:
    me, states = distributed.rank(), ClientStates()
    for round in (0, 1):
        if me != 1:
            clients = [me, 4 + me] if round == 0 else [(me + 2) % 4]  # clients 0 and 2 change places
            states.scatter("model", clients, {"w": torch.full((len(clients), 2), 10.0 * round + me)})
        states.synchronise()
    return [(client, states.get("model", client)["w"].tolist()) for client in states.holders("model")]  # type: ignore[index]


def test_what_clients_keep_follows_them(crew: Crew) -> None:
    assert crew.run(keep) == [[(0, [12.0, 12.0]), (2, [10.0, 10.0]), (4, [0.0, 0.0]), (6, [2.0, 2.0])]] * 3


def count(clients: int | None) -> dict[str, list[Any]]:
    """Return the matrix of evaluations before training, of row 0 and twice of row 1.

    Every process counts its share of 60 batches.
    """
    me, everybody = distributed.rank(), distributed.count()
    matrix = AccuracyMatrix(3, clients)
    for row, seed in ((-1, 0), (0, 1), (1, 2), (1, 3)):
        draws = random.Random(seed)
        matrix.clear_row(row)
        for number in range(60):
            total, task = draws.randrange(1, 9), draws.randrange(3)
            correct = torch.tensor(draws.randrange(total + 1))
            client = None if clients is None else draws.randrange(clients)
            if number % everybody == me:
                matrix.update(row, task, correct, total, client)
        matrix.add_up(row)
    return {name: value.tolist() for name, value in matrix.state_dict().items()}


@pytest.mark.parametrize("clients", [None, 4])
def test_accuracy_counts_are_added_up(crew: Crew, clients: int | None) -> None:
    assert crew.run(count, clients) == [count(clients)] * 3


# Threads.


def threads(cores: list[set[int]], machines: list[str]) -> int:
    me = distributed.rank()
    with (
        mock.patch.object(os, "sched_getaffinity", return_value=cores[me], create=True),
        mock.patch.object(platform, "node", return_value=machines[me]),
    ):
        return fair_threads()


@pytest.mark.parametrize(
    ("cores", "machines", "expected"),
    [
        ([set(range(8))] * 3, ["a", "a", "a"], [2, 2, 2]),
        ([set(range(8))] * 3, ["a", "b", "a"], [4, 8, 4]),
        ([set(range(4)), set(range(4, 10)), set(range(4))], ["a", "a", "a"], [2, 6, 2]),
        ([{0}] * 3, ["a", "a", "a"], [1, 1, 1]),
    ],
    ids=["one machine", "two machines", "bound to cores", "more processes than cores"],
)
def test_cores_are_divided_among_those_that_share_them(
    crew: Crew, cores: list[set[int]], machines: list[str], expected: list[int]
) -> None:
    assert crew.run(threads, cores, machines) == expected


# Dealing.


def test_clients_are_dealt_completely_and_evenly() -> None:
    draws = random.Random(0)
    for size in (1, 2, 3, 8):
        for number in (1, 2, 7, 40):
            steps = {client: draws.randrange(1, 30) for client in draws.sample(range(1000), number)}
            shares = deal_clients(steps, size)
            assert len(shares) == size
            assert sorted(client for share in shares for client in share) == sorted(steps)
            assert all(share == sorted(share) for share in shares)
            assert sum(1 for share in shares if share) == min(size, number)
            loads = [sum(steps[client] for client in share) for share in shares]
            # Bound of greedy dealing: the process with most steps had the fewest before it got its last client.
            assert max(loads) <= sum(loads) / size + max(steps.values())
            # Bound of dealing the longest first (Graham, 1969), where the best of all ways of dealing can be computed.
            if number <= 7 and size <= 3:
                best = min(
                    max(sum(s for s, where in zip(steps.values(), way, strict=True) if where == p) for p in range(size))
                    for way in product(range(size), repeat=number)
                )
                assert max(loads) <= best * (4 / 3 - 1 / (3 * size)) + 1e-9
            reordered = dict(reversed(list(steps.items())))
            assert deal_clients(reordered, size) == shares, "the order in which clients are named does not matter"


def test_equal_clients_are_dealt_in_turn() -> None:
    assert deal_clients(dict.fromkeys(range(7), 5), 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_the_longest_are_dealt_first() -> None:
    assert deal_clients({0: 1, 1: 1, 2: 2}, 2) == [[2], [0, 1]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1, 2, 10])
def test_every_process_has_as_many_batches_and_its_own_clients(size: int, width: int) -> None:
    schedule = Schedule(batch_size=4, local_epochs=2, cohort_width=width)
    lengths = {3: 40, 5: 3, 6: 17, 9: 4}
    held = {client: 100 * client + np.arange(length) for client, length in lengths.items()}
    plan = RoundPlan(2, 0, 2, tuple(held), False)

    def visits(loader: RoundLoader) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for batch in loader:
            for row, client in enumerate(batch.clients):
                if batch.mask[row].any():
                    found.setdefault(client, []).append(batch.index[row][batch.mask[row]].tolist())
        return found

    alone = visits(RoundLoader(plan, held, schedule, 0))
    loaders = [RoundLoader(plan, held, schedule, 0, process, size) for process in range(size)]
    batches = [list(loader) for loader in loaders]
    assert {len(loader) for loader in loaders} == {len(own) for own in batches} == {len(batches[0])}
    together: dict[int, list[list[int]]] = {}
    for loader, own in zip(loaders, batches, strict=True):
        assert [batch.last_of_round for batch in own] == [False] * (len(own) - 1) + [True]
        closed = [batch.clients[position] for batch in own for position in batch.closes]
        opened = [client for batch in own for client in batch.clients if batch.opens]
        assert sorted(closed) == sorted(opened) == sorted(visits(loader))
        assert not set(closed) & set(together)
        together |= visits(loader)
    assert together == alone
    assert {client: len(steps) for client, steps in together.items()} == {
        client: local_steps(length, schedule) for client, length in lengths.items()
    }


@pytest.mark.parametrize("every", [1, 2, 3, 20])
@pytest.mark.parametrize(("size", "batch"), [(10, 3), (9, 3), (1, 5), (0, 4)])
def test_test_sets_are_cut_into_shares(size: int, batch: int, every: int) -> None:
    whole = [(b.start, b.stop) for b in EvaluationLoader(0, size, batch)]
    shares = [EvaluationLoader(0, size, batch, first, every) for first in range(every)]
    assert [len(share) for share in shares] == [len(list(share)) for share in shares]
    assert sorted((b.start, b.stop) for share in shares for b in share) == whole
    assert [start for start, _ in whole] == list(range(0, size, batch))
    assert not whole or whole[-1][1] == size
