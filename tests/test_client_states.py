"""What clients keep between rounds."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from cfl.client_states import ClientStates

DEFAULT = {"w": torch.zeros(2, 3), "count": torch.tensor(7)}


def stacked(clients: list[int]) -> dict[str, Tensor]:
    """Values that tell the client: w is full of its id, count is 100 times it."""
    ids = torch.tensor(clients)
    return {"w": ids.float().view(-1, 1, 1).expand(-1, 2, 3).clone(), "count": 100 * ids}


def filled(clients: list[int]) -> ClientStates:
    states = ClientStates()
    states.scatter("model", clients, stacked(clients))
    return states


def test_what_was_scattered_is_gathered_in_any_order_and_company() -> None:
    states = filled([5, 2, 9])
    for asked in ([5, 2, 9], [9, 5], [2]):
        found, expected = states.gather("model", asked, DEFAULT), stacked(asked)
        for name, value in expected.items():
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype


def test_a_client_that_has_nothing_gets_the_default() -> None:
    found = filled([5]).gather("model", [3, 5], DEFAULT)
    assert found["count"].tolist() == [7, 500]
    assert torch.equal(found["w"][0], DEFAULT["w"])
    assert ClientStates().gather("model", [3], DEFAULT)["count"].tolist() == [7]


def test_gathered_and_scattered_memory_is_not_shared() -> None:
    """Cohorts train in memory that is used again; a client's kept tensors must not follow."""
    states, given = ClientStates(), stacked([5, 2])
    states.scatter("model", [5, 2], given)
    given["w"].fill_(-1)
    states.gather("model", [5, 2, 3], DEFAULT)["w"].fill_(-2)
    assert torch.equal(states.gather("model", [5, 2], DEFAULT)["w"], stacked([5, 2])["w"])
    assert not DEFAULT["w"].any()


def test_scattering_again_replaces_those_clients_only() -> None:
    states = filled([5, 2])
    states.scatter("model", [2], stacked([8]))
    assert states.gather("model", [5, 2], DEFAULT)["count"].tolist() == [500, 800]


def test_topics_are_separate() -> None:
    states = filled([5])
    states.scatter("buffer", [5], stacked([1]))
    assert states.gather("model", [5], DEFAULT)["count"].tolist() == [500]
    assert states.gather("buffer", [5], DEFAULT)["count"].tolist() == [100]
    assert states.gather("other", [5], DEFAULT)["count"].tolist() == [7]


def test_one_clients_tensors() -> None:
    states = filled([5, 2])
    assert torch.equal(states.get("model", 2)["w"], torch.full((2, 3), 2.0))
    assert states.get("model", 3) is None
    assert states.get("other", 2) is None


def test_tensors_that_require_gradients_are_kept_as_plain_values() -> None:
    states, weight = ClientStates(), torch.ones(1, 2, requires_grad=True)
    states.scatter("model", [0], {"w": weight * 3})
    kept = states.get("model", 0)["w"]
    assert not kept.requires_grad
    assert kept.tolist() == [3.0, 3.0]


def test_bytes() -> None:
    assert ClientStates().bytes() == 0
    assert filled([5, 2, 9]).bytes() == 3 * (6 * 4 + 8)


def test_a_checkpoint_holds_every_client_and_topic() -> None:
    states = filled([5, 2])
    states.scatter("buffer", [5], stacked([1]))
    file = io.BytesIO()
    torch.save(states.state_dict(), file)
    file.seek(0)
    restored = filled([7])
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.gather("model", [2, 5, 7], DEFAULT)["count"].tolist() == [200, 500, 7]
    assert restored.gather("buffer", [5, 2], DEFAULT)["count"].tolist() == [100, 7]
    restored.scatter("model", [2], stacked([8]))
    assert states.gather("model", [2], DEFAULT)["count"].tolist() == [200]
