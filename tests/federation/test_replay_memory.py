"""The reservoir is uniform, drawing is without replacement, and neither depends on the other clients of a cohort."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cfl.federation.client_states import ClientStates
from cfl.federation.replay_memory import RULES, Table, append, choose, empty_table, reservoir, slots
from cfl.randomness.counter_bits import random_words_at


def empty(clients: int, size: int) -> Table:
    return ClientStates().gather("memory", range(clients), empty_table(size))


def keys(clients: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + clients) * 7919 + 13


def test_a_reservoir_is_uniform_over_all_that_was_offered() -> None:
    clients, size, offered = 4000, 5, 40
    table = empty(clients, size)
    for part in torch.arange(offered).split(8):
        reservoir(table, 0, part.expand(clients, -1), keys(clients))
    held = torch.bincount(table["index"].flatten(), minlength=offered) / clients
    share = size / offered
    assert (held - share).abs().max() < 5 * (share * (1 - share) / clients) ** 0.5
    # Pairs of samples are held together as often as in a uniform draw.
    expected = size * (size - 1) / (offered * (offered - 1))
    for a, b in PAIRS:
        together = float(((table["index"] == a).any(1) & (table["index"] == b).any(1)).float().mean())
        assert abs(together - expected) < 5 * (expected * (1 - expected) / clients) ** 0.5
    assert (table["index"].sort(1).values.diff(dim=1) > 0).all()


PAIRS = [(0, 1), (0, 39), (38, 39), (10, 20)]


def test_the_reservoir_is_algorithm_r_sample_by_sample() -> None:
    """The reservoir equals Algorithm R for each sample, in any division into batches, alone or beside other clients."""
    clients, size, offered = 6, 3, 23
    stream = torch.arange(100, 100 + clients * offered).view(clients, offered)
    expected = torch.full((clients, size), -1)
    for client in range(clients):
        for n in range(offered):
            draw = int(random_words_at(int(keys(clients)[client]), torch.tensor([n])) & (2**63 - 1))
            place = n if n < size else draw % (n + 1)
            if place < size:
                expected[client, place] = stream[client, n]
    for cut in (1, 4, 23):
        table = empty(clients, size)
        for part in stream.split(cut, 1):
            reservoir(table, 2, part, keys(clients))
        assert torch.equal(table["index"], expected)
        assert table["seen"].tolist() == [offered] * clients
        assert (table["task"] == 2).all()
    alone = empty(1, size)
    reservoir(alone, 2, stream[3:4], keys(clients)[3:4])
    assert torch.equal(alone["index"], expected[3:4])


def test_padding_is_not_offered() -> None:
    padded = torch.tensor([[4, 5, -1, -1], [1, 2, 3, 9]])
    for put in (lambda table: reservoir(table, 1, padded, keys(2)), lambda table: append(table, 1, padded)):
        table = empty(2, 6)
        put(table)
        assert table["index"].tolist() == [[4, 5, -1, -1, -1, -1], [1, 2, 3, 9, -1, -1]]
        assert table["task"].tolist() == [[1, 1, -1, -1, -1, -1], [1, 1, 1, 1, -1, -1]]
        assert table["seen"].tolist() == [2, 4]


@pytest.mark.parametrize("rule", RULES)
def test_a_client_that_has_been_offered_nothing_yet_may_have_nothing_to_offer(rule: Any) -> None:
    """Absent samples, numbered -1, do not change the slots of the other samples."""
    keys = torch.tensor([5, 7])
    found = slots(rule, 2, torch.tensor([[-1, -1, -1], [-1, 0, 1]]), keys)
    assert torch.equal(found[1, 1:], slots(rule, 2, torch.tensor([[0, 1]]), keys[1:])[0])


def test_appending_goes_on_behind_what_is_held_until_the_memory_is_full() -> None:
    table = empty(1, 3)
    append(table, 0, torch.tensor([[7, 8]]))
    append(table, 1, torch.tensor([[5, 6]]))
    assert (table["index"].tolist(), table["task"].tolist()) == ([[7, 8, 5]], [[0, 0, 1]])


def test_what_is_chosen_is_filled_distinct_and_uniform() -> None:
    clients, size, count = 3000, 6, 2
    table = empty(clients, size)
    append(table, 0, torch.tensor([[10, 11, 12, 13, -1]]).expand(clients, -1))
    tasks, index, mask = choose(table, count, keys(clients))
    assert mask.all()
    assert (tasks == 0).all()
    assert (index[:, 0] != index[:, 1]).all()
    share = torch.bincount(index.flatten(), minlength=14)[10:] / clients
    assert (share - 0.5).abs().max() < 5 * 0.5 / clients**0.5


def test_a_client_with_less_than_asked_for_gives_all_it_has() -> None:
    table = empty(3, 4)
    append(table, 1, torch.tensor([[3, 4, 5], [6, -1, -1], [-1, -1, -1]]))
    tasks, index, mask = choose(table, 4, keys(3))
    assert mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert sorted(index[0].tolist()) == [3, 4, 5]
    assert (index[1, 0], tasks[1, 0]) == (6, 1)
    assert choose(empty(2, 4), 3, keys(2))[2].shape == (2, 0)


def test_tables_survive_the_way_through_the_clients_states() -> None:
    states = ClientStates()
    table = states.gather("memory", [5, 9], empty_table(2))
    reservoir(table, 0, torch.tensor([[1, 2, 3], [4, -1, -1]]), keys(2))
    states.scatter("memory", [5, 9], table)
    other = ClientStates()
    other.load_state_dict(states.state_dict())
    again = other.gather("memory", [9, 7], empty_table(2))
    assert again["index"].tolist() == [[4, -1], [-1, -1]]
    assert again["seen"].tolist() == [1, 0]


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_samples_fill_the_reservoir(size: int) -> None:
    table = empty(1, size)
    reservoir(table, 0, torch.arange(size).view(1, -1), keys(1))
    assert table["index"].tolist() == [list(range(size))]
