"""The server's update rule, compared with numbers computed by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.federation.server import Server


def server(lr: float = 1.0, momentum: float = 0.0, start: float = 10.0) -> Server:
    parameters = {"w": torch.full((2,), start, dtype=torch.float64)}
    buffers = {"mean": torch.zeros(2), "batches": torch.tensor(3)}
    return Server(parameters, buffers, lr, momentum)


def update(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def weights(of: Server) -> list[float]:
    return of.parameters["w"].tolist()


def test_by_default_the_global_model_becomes_the_clients_mean() -> None:
    ours = server()
    held = ours.parameters["w"]
    ours.apply(update(1.0, -2.5), {})
    assert weights(ours) == [11.0, 7.5]
    assert ours.parameters["w"] is held, "in place: the network shares these tensors"


def test_learning_rate() -> None:
    ours = server(lr=0.25)
    ours.apply(update(1.0, -2.0), {})
    ours.apply(update(4.0, 0.0), {})
    assert weights(ours) == [11.25, 9.5]


def test_momentum_by_hand() -> None:
    """v <- m v + d, w <- w + lr v with m = 1/2, lr = 1/4 and d = 8, 4, 0."""
    ours = server(lr=0.25, momentum=0.5)
    expected = [
        10.0 + 0.25 * 8.0,  # v = 8
        12.0 + 0.25 * 8.0,  # v = 4 + 4 = 8
        14.0 + 0.25 * 4.0,  # v = 4 + 0 = 4
    ]
    for value, after in zip((8.0, 4.0, 0.0), expected, strict=True):
        ours.apply(update(value, -value), {})
        assert weights(ours) == [after, 20.0 - after]


def test_transforms_come_last_and_in_order() -> None:
    """A transform gets the step with momentum, and its changes do not enter the stored momentum."""
    seen: list[list[float]] = []

    def record(step: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(step["w"].tolist())
        return step

    def keep_first(step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w": step["w"] * torch.tensor([1.0, 0.0])}

    def add_one(step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w": step["w"] + 1}

    ours = server(lr=0.5, momentum=0.5)
    ours.apply(update(8.0, 8.0), {}, [record, keep_first, add_one, record])
    ours.apply(update(0.0, 0.0), {}, [record, add_one, keep_first, record])
    # v = 8, then 4; step = 4, then 2.
    assert seen == [[4.0, 4.0], [5.0, 1.0], [2.0, 2.0], [3.0, 0.0]]
    assert weights(ours) == [10.0 + 5 + 3, 10.0 + 1 + 0]


def test_a_transform_that_works_in_place_does_not_reach_the_stored_momentum() -> None:
    def freeze(step: dict[str, Tensor]) -> dict[str, Tensor]:
        step["w"].zero_()
        return step

    for lr in (1.0, 0.5):
        ours = server(lr=lr, momentum=0.5)
        received = update(8.0, 8.0)
        ours.apply(received, {}, [freeze])
        assert weights(ours) == [10.0, 10.0]
        ours.apply(update(0.0, 0.0), {})
        assert weights(ours) == [10.0 + lr * 4.0] * 2


def test_buffers_are_taken_over_as_they_are() -> None:
    """Buffers are replaced without learning rate or momentum. Counts are rounded to integers."""
    ours = server(lr=0.1, momentum=0.9)
    mean, batches = ours.buffers["mean"], ours.buffers["batches"]
    ours.apply({}, {"mean": torch.tensor([0.5, -0.5]), "batches": torch.tensor(7.6)})
    ours.apply({}, {"mean": torch.tensor([1.5, 2.0]), "batches": torch.tensor(9.6)})
    assert ours.buffers["mean"] is mean
    assert ours.buffers["batches"] is batches
    assert mean.tolist() == [1.5, 2.0]
    assert batches.dtype == torch.int64
    assert batches.item() == 10


def test_parameters_that_are_not_sent_stay() -> None:
    ours = server(momentum=0.5)
    ours.parameters["own"] = torch.ones(3)
    ours.apply(update(1.0, 1.0), {})
    assert ours.parameters["own"].tolist() == [1.0, 1.0, 1.0]


def test_momentum_survives_a_checkpoint() -> None:
    ours = server(lr=0.5, momentum=0.9)
    ours.apply(update(3.0, 1.0), {})
    state = ours.state_dict()
    restored = server(lr=0.5, momentum=0.9)
    restored.parameters["w"].copy_(ours.parameters["w"])
    restored.load_state_dict(state)
    for _ in range(2):
        ours.apply(update(-1.0, 2.0), {})
    for _ in range(2):
        restored.apply(update(-1.0, 2.0), {})
    assert weights(restored) == weights(ours)
    fresh = server(lr=0.5, momentum=0.9)
    fresh.parameters["w"].copy_(torch.tensor([11.5, 10.5]))
    for _ in range(2):
        fresh.apply(update(-1.0, 2.0), {})
    assert weights(fresh) != weights(ours)


def test_a_saved_state_is_not_changed_by_going_on() -> None:
    ours = server(momentum=0.5)
    ours.apply(update(8.0, 8.0), {})
    state = ours.state_dict()
    ours.apply(update(8.0, 8.0), {})
    assert state["velocity"]["w"].tolist() == [8.0, 8.0]
