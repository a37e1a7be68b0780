"""The federation alone owns the round counter, the methods and the buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback
from support.tiny import Rounds, fit, mlp, prompted_net, sgd, split, tiny_client, tiny_data, weights

from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.data.datamodule import FederatedDataModule
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import DER, FOT, L2P, SCAFFOLD, DPFedAvg, FedProx, Method
from cfl.methods.composition import Composition
from cfl.models import Network
from cfl.privacy.accounting import is_installed
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import difference
from cfl.training.client import Client


class Counts(Callback):
    """Notes in every step the round's number by the data module, the federation and Lightning."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        data, federation = trainer.datamodule, pl_module.federation
        self.seen.append((data.next_round, federation.round, trainer.current_epoch))


def test_the_data_follow_the_federations_counter() -> None:
    """The data module follows the federation's round counter, also that of a second federation on the same data."""
    data, counts = tiny_data(), Counts()
    assert data.next_round == 0
    first = fit(tiny_client(data), data, callbacks=[counts])
    assert data.next_round == first.round == data.num_rounds
    second = tiny_client(data)
    assert fit(second, data, callbacks=[counts]).round == data.next_round
    assert len(set(counts.seen)) == data.num_rounds
    assert all(len(set(rounds)) == 1 for rounds in counts.seen)


def masked(own: bool) -> FederatedDataModule:
    return tiny_data(split(2, classes=4), scenario="class", class_loss="own" if own else "all")


def test_a_second_run_on_the_same_data_trains_as_on_new_ones() -> None:
    """L2P leaves other tasks' outputs out of the loss, a budget ends a run early: both for their own run only."""
    used, left = masked(own=False), Rounds()
    fit(tiny_client(used, prompted_net, methods={"l2p": L2P(strength=0.0)}), used, callbacks=[left])
    with_masks = Rounds()
    fit(tiny_client(alone := masked(own=True), prompted_net), alone, callbacks=[with_masks])
    assert difference(left.models, with_masks.models) is None
    if is_installed():
        protected = tiny_client(used, methods={"dp": DPFedAvg(noise_multiplier=1.0)})
        assert fit(protected, used, callbacks=[PrivacyBudget(budget=8.0)]).stopped
    found, expected = (fit(tiny_client(data), data) for data in (used, masked(own=False)))
    assert difference(weights(found), weights(expected)) is None
    assert found.curve == expected.curve


@pytest.mark.parametrize("make", [SCAFFOLD, partial(FOT, threshold=0.5), FedProx])
def test_a_method_of_an_earlier_run_is_refused(make: Callable[[], Method]) -> None:
    """It would go on with the state of that run."""
    data, method = tiny_data(), make()
    fit(tiny_client(data, methods={"mine": method}), data)
    name = type(method).__name__
    with pytest.raises(ConfigError, match=rf"^methods\.mine = '{name} of an earlier run'.*a new {name} for every run"):
        fit(tiny_client(data, methods={"mine": method}), data)


def test_a_counter_that_is_not_lightnings_is_refused() -> None:
    data = tiny_data()

    class Ahead(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.federation.round = 1

    with pytest.raises(RuntimeError, match=r"round 1 of the federation is epoch 0; .* a new Client"):
        fit(tiny_client(data), data, callbacks=[Ahead()])


def half_frozen(*given: Any) -> Network:
    network = mlp(*given)
    next(network.parameters()).requires_grad_(False)
    return network


def test_the_module_reads_the_federations() -> None:
    data, buffer = tiny_data(), ReplayBuffer(4)
    client = Client(half_frozen, sgd, {"der": DER()}, data.input_shape, data.num_outputs, buffer=buffer)
    methods, frozen = client.methods, client.frozen
    assert client.buffer is buffer
    assert len(frozen) == 1
    federation = fit(client, data)
    assert client.methods is federation.methods is methods
    assert client.buffer is federation.buffer is buffer
    assert client.frozen is federation.model.frozen
    assert federation.model.frozen == frozen
    with pytest.raises(RuntimeError, match="methods: the federation has its own"):
        client.methods = Composition({"prox": FedProx()})
    with pytest.raises(RuntimeError, match="buffer: the federation has its own"):
        client.buffer = ReplayBuffer(5)
