"""Steps replayed as CUDA graphs, emulated on the CPU (``support/emulated_graphs.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emulated_graphs import emulate
from support.tiny import DECAY, MOMENTUM, ConvNet, double, dropping, fit, mlp, tiny_client, unequal, weights
from torch import Tensor

from cfl.engines import EngineOptions, graphs
from cfl.engines.graphs import Graphs
from cfl.methods import AGEM, EWC, SCAFFOLD, FedProx
from cfl.models import Network

METHODS: dict[str, Any] = {
    "plain": dict,
    "fedprox": lambda: {"fedprox": FedProx(0.1)},
    "scaffold": lambda: {"scaffold": SCAFFOLD(any_optimizer=True)},
    "ewc": lambda: {"ewc": EWC(5.0)},
    "agem": lambda: {"agem": AGEM(4)},
}


def trained(network: Any, optimizer: Any, methods: Any, width: int) -> dict[str, Tensor]:
    data = unequal(width)
    return weights(fit(tiny_client(data, double(network), optimizer, methods(), EngineOptions("vmap")), data))


NETWORKS: dict[str, Any] = {"mlp": mlp, "conv": ConvNet, "dropout": dropping}
CASES = [("plain", "mlp"), ("plain", "conv"), *((method, "dropout") for method in METHODS)]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("methods", "network"), CASES)
@pytest.mark.parametrize("optimizer", [MOMENTUM, DECAY], ids=["momentum", "a step at once"])
def test_replays_change_nothing(
    monkeypatch: pytest.MonkeyPatch, width: int, network: str, methods: str, optimizer: Any
) -> None:
    """Replayed steps train to the weights of plain steps. Unequal clients give full, partial and masked steps."""
    expected = trained(NETWORKS[network], optimizer, METHODS[methods], width)
    counts = emulate(monkeypatch)
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 2)
    found = trained(NETWORKS[network], optimizer, METHODS[methods], width)
    assert counts["captures"] > 0
    assert counts["replays"] > counts["captures"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Reads(Network):
    """A network whose forward pass reads a number from the device, which CUDA graphs cannot capture."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = torch.nn.Linear(input_shape[1] * input_shape[2], num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)


def test_a_step_that_cannot_be_captured_is_computed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(Reads, DECAY, dict, 1)
    counts = emulate(monkeypatch)
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 2)
    found = trained(Reads, DECAY, dict, 1)
    assert counts["captures"] == counts["restored"] > 0
    assert counts["replays"] == 0
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_step_that_fails_while_it_warms_up_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, weight, calls = emulate(monkeypatch), torch.ones(1, 3, requires_grad=True), []

    def losses(given: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return weight.sum(1)

    assert Graphs(eager=True).losses(losses, {}, [weight], (0.5, 0.0)) is None
    assert weight.tolist() == [[1.0, 1.0, 1.0]]
    assert counts["captures"] == 0


def test_the_latest_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, weight = emulate(monkeypatch), torch.ones(1, 3, requires_grad=True)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    kept = Graphs(eager=True)

    def captures_of(size: int) -> int:
        before = counts["captures"]
        found = kept.losses(lambda given: (weight * given["x"]).sum(1), {"x": torch.full((size, 3), 2.0)}, [weight])
        assert found is not None
        assert found.tolist() == [6.0] * size
        return counts["captures"] - before

    assert [captures_of(size) for size in (1, 2, 1, 3, 1, 2)] == [1, 1, 0, 1, 0, 1]


def test_a_graph_keeps_no_engine_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    weight = torch.ones(1, 3, requires_grad=True)
    kept = Graphs(eager=True)
    kept.losses(lambda given: weight.sum(1), {}, [weight])
    (step,) = kept._graphs.values()
    assert step._compute is None
