"""Tensors that clients keep for each task, also when clients are at different tasks."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.federation.client_states import ClientStates
from cfl.federation.task_states import TaskStates


def rows(*values: float) -> dict[str, Tensor]:
    """A tensor ``x`` of two equal values for each client."""
    return {"x": torch.tensor(values)[:, None].expand(-1, 2)}


def test_a_client_is_at_the_task_it_has_begun_last() -> None:
    tasks = TaskStates(ClientStates(), "some")
    assert tasks.latest([4, 0]) == [-1, -1]
    tasks.begin([4, 2], 0)
    tasks.begin([2], 3)
    assert tasks.latest([2, 4, 7, 0]) == [3, 0, -1, -1]


def test_what_is_filed_is_each_clients_own_of_its_task() -> None:
    states = ClientStates()
    tasks = TaskStates(states, "some")
    tasks.store([5, 1, 3], [0, 2, 0], rows(1.0, 2.0, 3.0))
    tasks.store([5], [2], rows(4.0))
    expected = {(5, 0): 1.0, (1, 2): 2.0, (3, 0): 3.0, (5, 2): 4.0}
    for client in range(6):
        for task in range(4):
            found = tasks.stored(client, task)
            if (client, task) in expected:
                assert found is not None
                assert found["x"].tolist() == [expected[client, task]] * 2
            else:
                assert found is None
    assert tasks.counts(4) == {5: 2, 1: 1, 3: 1}
    assert tasks.counts(2) == {5: 1, 3: 1}
    assert TaskStates(states, "other").counts(4) == {}


def test_filing_again_replaces() -> None:
    """Filing again replaces a client's tensors, for example if its first round in a task was left out."""
    tasks = TaskStates(ClientStates(), "some")
    tasks.store([5, 6], [1, 1], rows(1.0, 2.0))
    tasks.store([5], [1], rows(9.0))
    assert [(tasks.stored(client, 1) or {})["x"][0].item() for client in (5, 6)] == [9.0, 2.0]


def test_it_is_part_of_the_clients_states() -> None:
    states, copied = ClientStates(), ClientStates()
    tasks = TaskStates(states, "some")
    tasks.begin([3], 2)
    tasks.store([3], [1], rows(8.0))
    copied.load_state_dict(states.state_dict())
    other = TaskStates(copied, "some")
    assert other.latest([3, 1]) == [2, -1]
    assert (other.stored(3, 1) or {})["x"].tolist() == [8.0, 8.0]
