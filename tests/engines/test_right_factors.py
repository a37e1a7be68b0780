"""Right factors: an engine that multiplies gradients itself gives the same result as a method that does so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.tiny import StridedNet, double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data, weights
from torch import Tensor

from cfl.engines import EngineOptions
from cfl.engines.layers import Pass
from cfl.methods import GPM, RGO, FedProx, Method

CASES: dict[str, Any] = {
    "gpm": partial(GPM, threshold=0.9),
    "gpm, free biases": partial(GPM, threshold=0.9, freeze_affine=False),
    "rgo": partial(RGO, share=0.5),
}


def run(make: Any, engine: EngineOptions, network: Any, scenario: str, optimizer: Any = sgd) -> dict[str, Tensor]:
    stream = permuted(3, train=70) if scenario == "domain" else split(3, classes=6, train=70)
    data = tiny_data(stream, num_clients=5, schedule={"clients_per_round": 3, "cohort_width": 3, "rounds_per_task": 2})
    return weights(fit(tiny_client(data, network, optimizer, {"tried": make()}, engine), data))


@pytest.mark.parametrize(
    ("network", "batch_last"),
    [(mlp, None), (partial(StridedNet, dropout=0.3), False), (partial(StridedNet, dropout=0.3), True)],
    ids=["linear", "convolutional", "convolutional, batch last"],
)
@pytest.mark.parametrize("scenario", ["domain", "task"])
@pytest.mark.parametrize("optimizer", [sgd, partial(torch.optim.SGD, lr=0.1, momentum=0.5)], ids=["plain", "momentum"])
@pytest.mark.parametrize("name", CASES)
def test_the_engines_way_gives_the_methods_result(
    name: str,
    optimizer: Any,
    scenario: str,
    network: Any,
    batch_last: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run(CASES[name], EngineOptions("vmap"), network, scenario, optimizer)
    used = []
    monkeypatch.setattr("cfl.methods.composition.multiply_gradients", _unexpected)
    seen = Pass.__init__

    def watched(self: Pass, *given: Any, **named: Any) -> None:
        seen(self, *given, **named)
        used.append(bool(self.factors))

    monkeypatch.setattr(Pass, "__init__", watched)
    engine = EngineOptions("workers", workers=2, batch_last=batch_last)
    found = run(CASES[name], engine, network, scenario, optimizer)
    assert any(used)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def _unexpected(*_: Any) -> None:
    raise AssertionError("the engine should have multiplied")


class Steps(Callback):
    """Notes by task whether the engine takes SGD's steps itself."""

    def __init__(self) -> None:
        self.fused_sgd: dict[int, set[bool]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        taken = pl_module.work.context.fused_sgd is not None
        self.fused_sgd.setdefault(pl_module.require_cohort().task, set()).add(taken)


@pytest.mark.parametrize("network", [mlp, double(mlp)], ids=["hand-written", "by autograd"])
def test_steps_are_taken_at_once_while_nothing_is_multiplied(network: Any) -> None:
    """The engine takes SGD's steps itself during the first task, when GPM multiplies nothing, also beside a penalty.

    This holds for networks with and without a hand-written step.
    """
    steps, data = Steps(), tiny_data(permuted(2), schedule={"rounds_per_task": 2})
    methods: dict[str, Method] = {"gpm": GPM(threshold=0.9, freeze_affine=False), "prox": FedProx(0.1)}
    fit(tiny_client(data, network, sgd, methods, EngineOptions("workers", 1)), data, callbacks=[steps])
    assert steps.fused_sgd == {0: {True}, 1: {False}}


class Shifted(Method):
    """Adds a constant to gradients, which a projection before and after it changes differently."""

    def adjust_gradients(self, cohort: Any) -> None:
        for gradient in cohort.gradients.values():
            gradient.add_(0.01)


def test_beside_another_method_that_changes_gradients_the_order_of_methods_holds() -> None:
    def trained(engine: EngineOptions, methods: dict[str, Method]) -> dict[str, Tensor]:
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 2})
        return weights(fit(tiny_client(data, mlp, sgd, methods, engine), data))

    vmap, workers = EngineOptions("vmap"), EngineOptions("workers", workers=2)
    expected = trained(vmap, {"gpm": GPM(threshold=0.9), "shifted": Shifted()})
    found = trained(workers, {"gpm": GPM(threshold=0.9), "shifted": Shifted()})
    torch.testing.assert_close(expected, found, rtol=0, atol=2e-5)
    reverse = trained(workers, {"shifted": Shifted(), "gpm": GPM(threshold=0.9)})
    assert max(float((reverse[key] - tensor).abs().max()) for key, tensor in expected.items()) > 1e-3
