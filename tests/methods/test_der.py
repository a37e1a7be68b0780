"""DER and DER++ at every client, against a loop that writes every client's steps out in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.naive_replay import EVEN, SCENARIOS, Settings, assert_is_the_loop, replay_client, replay_data
from support.tiny import Rounds, fit, mlp, norm_net, sgd, split, tiny_client
from torch import Tensor, nn

from cfl.data.samples import Samples
from cfl.engines import EngineOptions
from cfl.methods import DER, Method
from cfl.runtime.errors import ConfigError

WORKERS = EngineOptions("workers", 1, 1, False)  # all fixed: no choice by trial, so that runs repeat bit for bit


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_der_is_what_its_equation_says(scenario: str) -> None:
    """Equation 5, with the mean over samples and outputs."""
    assert_is_the_loop(SCENARIOS[scenario](), {"der": DER(0.7, 0.0, 3)}, Settings(der=3, alpha=0.7))


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_der_plus_plus_is_what_its_equation_says(scenario: str, engine: EngineOptions) -> None:
    """Equation 6: the term of the labels has a draw of its own."""
    settings = Settings(der=3, alpha=0.5, beta=0.6)
    assert_is_the_loop(SCENARIOS[scenario](), {"der": DER(0.5, 0.6, 3)}, settings, engine=engine)


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_the_squared_norm_that_papers_print(scenario: str) -> None:
    settings = Settings(der=3, alpha=0.2, over="sum")
    assert_is_the_loop(SCENARIOS[scenario](), {"der": DER(0.2, 0.0, 3, "sum")}, settings)


def test_labels_alone() -> None:
    assert_is_the_loop(replay_data(), {"der": DER(0.0, 0.6, 3)}, Settings(der=3, alpha=0.0, beta=0.6))


@pytest.mark.parametrize("size", [4, 40], ids=["full buffers", "buffers of unlike numbers"])
def test_more_samples_than_there_are(size: int) -> None:
    assert_is_the_loop(replay_data(), {"der": DER(1.0, 0.3, 50)}, Settings(der=50, beta=0.3), size=size)


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_batchnorm_normalises_own_and_drawn_samples_together(engine: EngineOptions) -> None:
    methods: dict[str, Method] = {"der": DER(0.5, 0.6, 3)}
    assert_is_the_loop(replay_data(**EVEN), methods, Settings(der=3, alpha=0.5, beta=0.6), norm_net, engine)


def test_outputs_that_nobody_replays_stay_as_they_were() -> None:
    """Weight decay moves the outputs of the task that is replayed, and no later one's."""
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    data, watch = replay_data(split(3, classes=6, train=120), schedule={"rounds_per_task": 1}), Rounds()
    client = replay_client(data, {"der": DER()}, mlp, optimizer=decaying)
    initial = client.network.state_dict()["head.weight"].clone()
    fit(client, data, None, [watch])
    first, second, third = (model["head.weight"] for model in watch.models)
    assert torch.equal(initial[2:], first[2:])
    assert torch.equal(first[4:], second[4:])
    assert not torch.equal(first[:2], second[:2])
    assert not torch.equal(second[2:4], third[2:4])


def samples(extras: dict[str, Tensor], mask: list[bool], allowed: Tensor | None = None) -> Samples:
    n = len(mask)
    zeros = torch.zeros(n, dtype=torch.int64)
    return Samples(zeros, torch.tensor(mask), torch.zeros(n), zeros, zeros, allowed, extras)


def test_the_term_by_hand() -> None:
    """Two of four samples count, with weight 1/2 each, over three outputs or over the two that are allowed."""
    der = DER(2.0)
    der.name = "der"
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [math.inf] * 3])
    kept = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 4.0], [9.0, 9.0, 9.0], [0.0] * 3])
    extras = {"der logits": kept, "der weight": torch.tensor([1.0, 1.0, 0.0, 1.0])}  # 2 x 1/2
    mask = [True, True, True, False]
    assert der.sample_loss(logits, samples(extras, mask)).item() == pytest.approx((14 + 18) / 3)
    allowed = torch.tensor([True, True, False]).expand(4, 3)
    assert der.sample_loss(logits, samples(extras, mask, allowed)).item() == pytest.approx((5 + 2) / 2)
    assert der.sample_loss(logits, samples({}, mask)).item() == 0
    printed = DER(2.0, over_outputs="sum")
    printed.name = "der"
    assert printed.sample_loss(logits, samples(extras, mask)).item() == pytest.approx(14 + 18)
    assert printed.sample_loss(logits, samples(extras, mask, allowed)).item() == pytest.approx(5 + 2)


class Whole(Method):
    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        loss: Tensor = network(x).square().mean()
        return loss


def test_logits_of_a_replaced_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="Whole and DER"):
        tiny_client(replay_data(), mlp, sgd, {"der": DER(), "whole": Whole()})
