"""Steps replayed as CUDA graphs compute what the captured steps computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import DECAY, MOMENTUM, ConvNet, double, fit, mlp, tiny_client, unequal, weights

from cfl.engines import graphs
from cfl.engines.graphs import GraphedStep, Graphs
from cfl.methods import FedProx
from cfl.randomness import counter_bits
from cfl.randomness.counter_bits import random_words

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("network", [mlp, ConvNet])
@pytest.mark.parametrize("methods", [dict, lambda: {"fedprox": FedProx(0.1)}], ids=["plain", "with a method"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, DECAY], ids=["momentum", "a step at once"])
def test_replays_change_nothing(
    monkeypatch: pytest.MonkeyPatch, width: int, network: Any, methods: Any, optimizer: Any
) -> None:
    """Replayed steps train to the weights of plain steps, for clients of unequal size: full, partial and masked steps.

    Each is captured the first time that it is computed.
    """
    found = []
    for worth in (1, 10**9):
        monkeypatch.setattr(graphs, "WORTH_CAPTURING", worth)
        data = unequal(width)
        client = tiny_client(data, double(network), optimizer, methods())
        found.append(weights(fit(client, data, accelerator="gpu")))
        captured = client.require_work().engine._graphs._graphs  # type: ignore[attr-defined]
        assert bool(captured) == (worth == 1)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


def test_graphs_read_nothing_that_a_cache_may_drop() -> None:
    """Replays draw the numbers drawn without a graph, even after the cached counters were freed and overwritten."""
    weight, keys = torch.ones(2, 64, device="cuda", requires_grad=True), torch.arange(2, device="cuda")

    def losses(given: Any) -> Any:
        return ((random_words(given["keys"], 64) & 255) * weight).sum(1)

    graph = Graphs(eager=True)
    graph.losses(losses, {"keys": keys}, [weight])
    counter_bits._counters.clear()
    others = [torch.full((64,), 7, device="cuda") for _ in range(1000)]
    replayed = graph.losses(losses, {"keys": keys + 5}, [weight])
    torch.testing.assert_close(replayed, losses({"keys": keys + 5}))
    assert len(others) == 1000


def test_a_step_that_draws_random_numbers_is_not_captured() -> None:
    weight = torch.ones(2, 3, device="cuda", requires_grad=True)
    noisy = Graphs(eager=True).losses(lambda given: (torch.rand_like(weight) * weight).sum(1), {}, [weight])
    assert noisy is None


def test_gradients_of_an_earlier_replay_are_refused() -> None:
    weight = torch.ones(2, 3, device="cuda", requires_grad=True)
    graph = Graphs(eager=True)
    x = torch.arange(6.0, device="cuda").view(2, 3)

    def step() -> Any:
        return graph.losses(lambda given: (given["x"] * weight).sum(1), {"x": x}, [weight])

    first = step()
    second = step()
    second.sum().backward()
    torch.testing.assert_close(weight.grad, x)
    with pytest.raises(RuntimeError, match="earlier step"):
        first.sum().backward()
    assert isinstance(next(iter(graph._graphs.values())), GraphedStep)
