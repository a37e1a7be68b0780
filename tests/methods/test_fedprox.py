"""FedProx against the proximal term written out and differentiated by autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.close import assert_close, farthest
from support.naive import Hook, federated_averaging, plain_network
from support.naive_fisher import Before
from support.tiny import (
    NetworkFactory,
    double,
    fit,
    five_unequal,
    mlp,
    norm_net,
    permuted,
    runs_in_double,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from test_ewc import After, ConstantGradients
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import IID
from cfl.engines import EngineOptions
from cfl.methods import EWC, FedProx, Method, PersonalLayers
from cfl.runtime.errors import ConfigError

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def data_of(width: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round, two tasks of two rounds with two local epochs."""
    return five_unequal(width=width, schedule={"rounds_per_task": 2, "local_epochs": 2}, **options)


run = runs_in_double(data_of)


def proximal_term(mu: float, personal: Callable[[str], bool] = lambda name: False) -> Hook:
    """``mu / 2 ||w - w_t||^2``. The hook takes ``w_t`` from a client's network at its first call for it."""
    received: dict[nn.Module, dict[str, Tensor]] = {}

    def penalty(network: nn.Module, client: int) -> Tensor:
        own = {n: p for n, p in network.named_parameters() if not personal(n)}
        if network not in received:
            received[network] = {n: p.detach().clone() for n, p in own.items()}
        return mu / 2 * torch.stack([((p - received[network][n]) ** 2).sum() for n, p in own.items()]).sum()

    return penalty


def naive_run(
    data: FederatedDataModule, network: NetworkFactory = mlp, optimizer: Any = sgd, **options: Any
) -> dict[str, Tensor]:
    start = tiny_client(data, double(network)).network.state_dict()
    return federated_averaging(plain_network(data, double(network), start), data, optimizer, **options)[0]


# The term.


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("optimizer", [sgd, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
def test_it_is_averaging_of_clients_that_minimise_the_loss_with_the_term(optimizer: Any, width: int) -> None:
    expected = naive_run(data_of(), optimizer=optimizer, penalty=proximal_term(3.0))
    assert_close(weights(run({"prox": FedProx(3.0)}, data_of(width), optimizer=optimizer)), expected)
    assert farthest(naive_run(data_of(), optimizer=optimizer), expected) > 1e-2


@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_with_normalisation_it_leaves_running_statistics_alone(engine: Any) -> None:
    expected = naive_run(data_of(partition=IID()), norm_net, penalty=proximal_term(3.0))
    found = run({"prox": FedProx(3.0)}, data_of(partition=IID()), norm_net, engine=EngineOptions(engine))
    assert_close(weights(found), expected)


@pytest.mark.parametrize(("scenario", "class_loss"), [("task", "all"), ("class", "seen")])
def test_where_tasks_have_outputs_of_their_own(scenario: Any, class_loss: str) -> None:
    options = {"stream": split(2, classes=4, train=120), "scenario": scenario, "class_loss": class_loss}
    decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)
    expected = naive_run(data_of(**options), optimizer=decayed, penalty=proximal_term(3.0))
    assert_close(weights(run({"prox": FedProx(3.0)}, data_of(**options), optimizer=decayed)), expected)


def test_personal_parameters_are_free() -> None:
    def personal(name: str) -> bool:
        return name.startswith("head.")

    data = data_of()
    start = tiny_client(data, double(mlp)).network.state_dict()
    network = plain_network(data, double(mlp), start)
    expected, kept = federated_averaging(network, data, sgd, stays_local=personal, penalty=proximal_term(3.0, personal))
    federation = run({"prox": FedProx(3.0), "own": PersonalLayers(["head.*"])}, data)
    assert_close(
        {n: weights(federation)[n] for n in expected if not personal(n)},
        {n: v for n, v in expected.items() if not personal(n)},
    )
    for client, own in kept.items():
        assert_close(federation.clients.get("model", client) or {}, own)


def test_it_comes_before_clipping() -> None:
    def clip(network: nn.Module, client: int) -> None:
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.4)

    expected = naive_run(data_of(), penalty=proximal_term(3.0), change_gradients=clip)
    assert_close(weights(run({"prox": FedProx(3.0)}, gradient_clip_val=0.4)), expected, 1e-6)  # torch's 1e-6 in norms
    assert farthest(naive_run(data_of(), penalty=proximal_term(3.0)), expected) > 1e-3


class AfterBoth(After):
    """Autograd of EWC's quadratic plus the proximal term, in the server's coordinates."""

    def __init__(self, ewc: EWC, before: Before, mu: float) -> None:
        super().__init__(ewc, before)
        self.mu = mu

    def penalty_of(self, client: int, parameters: dict[str, Tensor]) -> Tensor:
        received = self.context.state_tensors()  # they change only at the end of a round
        moved = sum(((p - received[n]) ** 2).sum() for n, p in parameters.items())
        return super().penalty_of(client, parameters) + self.mu / 2 * moved


@pytest.mark.parametrize("first", ["ewc", "prox"])
def test_together_with_ewc_it_adds_the_gradient_of_the_sum(first: str) -> None:
    ewc, prox, before = EWC(5.0), FedProx(2.0), Before()
    after = AfterBoth(ewc, before, 2.0)
    both: dict[str, Method] = {"ewc": ewc, "prox": prox} if first == "ewc" else {"prox": prox, "ewc": ewc}
    run({"before": before, **both, "after": after})
    assert after.checked > 10


# Effects of the term.


def test_under_a_constant_pull_a_round_ends_where_the_closed_form_says() -> None:
    """Gradient descent along ``g + mu (w - w_t)`` ends a round of n steps at ``w_t - g / mu (1 - (1 - lr mu)^n)``."""
    schedule = {"rounds_per_task": [1, 3], "clients_per_round": 1}
    for mu in (0.5, 4.0):
        models: list[dict[str, Tensor]] = []

        class Copy(Method):
            def end_task(self, plan: Any, models: list[dict[str, Tensor]] = models) -> None:
                models.append(weights(self.context))

        data = tiny_data(permuted(2), num_clients=1, schedule=schedule)
        run({"constant": ConstantGradients(), "prox": FedProx(mu), "copy": Copy()}, data)
        steps = -(-len(data.indices[1][0]) // 8)
        expected = 3 * 0.01 / mu * (1 - (1 - 0.1 * mu) ** steps)
        for name, value in models[0].items():
            torch.testing.assert_close(value - models[1][name], torch.full_like(value, expected), rtol=1e-9, atol=0)


def test_a_greater_mu_keeps_clients_nearer() -> None:
    data = data_of()
    start = {n: t.clone() for n, t in tiny_client(data, double(mlp)).network.state_dict().items()}
    once = {"rounds_per_task": 1, "local_epochs": 3}
    ways = []
    for mu in (0.0, 1.0, 4.0):
        federation = run({"prox": FedProx(mu)}, tiny_data(permuted(1), schedule=once))
        ways.append(sum(float((weights(federation)[n] - start[n]).square().sum()) for n in start))
    assert ways[0] > 1.1 * ways[1] > 1.1**2 * ways[2]


# A trial could choose a stack of clients, which adds the same numbers in another order.
@pytest.mark.parametrize(
    "engine", [EngineOptions("vmap"), EngineOptions("workers", 2, stack=1)], ids=["vmap", "workers"]
)
def test_without_mu_it_is_federated_averaging_bit_for_bit(engine: EngineOptions) -> None:
    """In float32. Workers fuse SGD's step in both runs."""
    models, fused_sgd = [], []
    for methods in ({}, {"prox": FedProx(0.0)}):
        data = data_of()
        client = tiny_client(data, mlp, sgd, methods, engine)
        models.append(weights(fit(client, data)))
        fused_sgd.append(client.require_work().context.fused_sgd)
    assert farthest(models[0], models[1]) == 0
    assert fused_sgd[0] == fused_sgd[1] == (None if engine.kind == "vmap" else (0.1, 0.0))


# What is refused.


def test_it_is_refused_where_there_is_no_global_model() -> None:
    with pytest.raises(ConfigError, match=r"methods\.prox\.mu.*0 where all parameters stay on their client"):
        run({"own": PersonalLayers(), "prox": FedProx(1.0)})
    assert run({"own": PersonalLayers(), "prox": FedProx(0.0)}).finished
