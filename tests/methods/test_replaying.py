"""What methods that replay samples have in common: hand-written steps, other optimizers, what is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.naive_replay import SCENARIOS, replay_client, replay_data
from support.tiny import fit, mlp, weights
from test_replay import CASES

from cfl.engines import EngineOptions
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import AGEM, DER, FedAGEM, Method
from cfl.models import MLP

BUFFERED: dict[str, Callable[[], Method]] = {"A-GEM": partial(AGEM, 3), "DER++": partial(DER, 1.0, 0.5, 3)}
REPLAYING = BUFFERED | {name: make for name, (make, _) in CASES.items()}


@pytest.mark.parametrize("scenario", ["domain", "task"])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("name", REPLAYING)
def test_hand_written_steps_agree_with_autograd(name: str, stack: int, scenario: str) -> None:
    """In single precision, because networks in float64 are not trained by hand-written steps. With dropout."""
    network = partial(MLP, hidden=[8], dropout=0.25)
    found = []
    for engine in (EngineOptions("vmap"), EngineOptions("workers", 2, stack)):
        data = SCENARIOS[scenario]()
        client = replay_client(data, {"replay": REPLAYING[name]()}, network, ReplayBuffer(5), engine)
        found.append(weights(fit(client, data)))
        assert engine.kind == "vmap" or client.require_work().engine.chain is not None  # type: ignore[attr-defined]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), partial(torch.optim.Adam, lr=0.01)],
    ids=["momentum", "adam"],
)
@pytest.mark.parametrize("name", [*BUFFERED, "Fed-A-GEM"])
def test_other_optimizers_run(name: str, optimizer: Any) -> None:
    """Both engines have the same result, which is not that of a run without the method."""
    make = BUFFERED.get(name, partial(FedAGEM, 4))
    found = []
    for engine, methods in (("vmap", {"it": make()}), ("workers", {"it": make()}), ("workers", {})):
        data = replay_data()
        options = EngineOptions(engine, 1, 1, False) if engine == "workers" else EngineOptions("vmap")
        client = replay_client(data, methods, mlp, engine=options, optimizer=optimizer)
        found.append(weights(fit(client, data)))
    assert all(value.isfinite().all() for value in found[0].values())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)
    assert max(float((value - found[2][key]).abs().max()) for key, value in found[0].items()) > 1e-3


@pytest.mark.parametrize("name", [*BUFFERED, "equal"])
def test_nothing_but_the_model_is_sent(name: str) -> None:
    counts = []
    for methods in ({}, {"replay": REPLAYING[name]()}):
        data = replay_data()
        counts.append(fit(replay_client(data, methods, mlp), data).channel.state_dict())
    assert counts[0] == counts[1]
