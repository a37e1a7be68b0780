"""A-GEM at every client, against a loop that writes every client's steps out in float64."""

from __future__ import annotations

import pytest
import torch
from support.naive_fisher import Before
from support.naive_replay import EVEN, SCENARIOS, Settings, assert_is_the_loop, replay_client, replay_data
from support.tiny import ConvNet, Rounds, fit, mlp, norm_net, split, weights

from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import AGEM, Method
from cfl.methods.components.gradient_projection import inner

WORKERS = EngineOptions("workers", 1, 1, False)  # all fixed: no choice by trial, so that runs repeat bit for bit


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_is_what_the_equations_say(scenario: str) -> None:
    assert_is_the_loop(SCENARIOS[scenario](), {"agem": AGEM(3)}, Settings(agem=3))


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_batchnorm_counts_the_steps_own_samples_alone(engine: EngineOptions) -> None:
    assert_is_the_loop(replay_data(**EVEN), {"agem": AGEM(3)}, Settings(agem=3), norm_net, engine)


def test_more_samples_than_there_are() -> None:
    assert_is_the_loop(replay_data(), {"agem": AGEM(50)}, Settings(agem=50), size=4)


class After(Method):
    """Check the gradients that A-GEM has changed against those of ``before``."""

    def __init__(self, agem: AGEM, before: Before) -> None:
        self.agem, self.before = agem, before
        self.conflicts = self.free = self.first = 0

    def adjust_gradients(self, cohort: Cohort) -> None:
        reference, gradients = self.agem._reference, cohort.gradients
        if not reference:
            self.first += cohort.steps == 1 and cohort.round == 0
            assert all(torch.equal(g, self.before.gradients[n]) for n, g in gradients.items())
            return
        conflicts = inner(self.before.gradients, reference) < 0
        length = (inner(gradients, gradients) * inner(reference, reference)).sqrt()
        assert (inner(gradients, reference) >= -1e-6 * length).all()
        self.conflicts += int(conflicts.sum())
        self.free += int((~conflicts).sum())
        for name, gradient in gradients.items():
            assert torch.equal(gradient[~conflicts], self.before.gradients[name][~conflicts])


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_no_step_conflicts_with_its_clients_buffer(engine: EngineOptions) -> None:
    """No gradient conflicts with its client's buffer. Gradients without conflict stay as they are, bit for bit.

    A client's first steps have no buffer and change nothing.
    """
    agem, before = AGEM(3), Before()
    after = After(agem, before)
    data = replay_data(split(2, train=120))
    fit(replay_client(data, {"before": before, "agem": agem, "after": after}, ConvNet, ReplayBuffer(6), engine), data)
    assert after.conflicts > 10
    assert after.free > 10
    assert after.first == 2  # three clients, two side by side


def test_outputs_of_earlier_tasks_move_and_are_kept() -> None:
    data, watch = replay_data(split(2, train=120)), Rounds()
    fit(replay_client(data, {"agem": AGEM(6)}, mlp, ReplayBuffer(8)), data, None, [watch])
    heads = [model["head.weight"] for model in watch.models]
    assert torch.equal(heads[0][2:], heads[1][2:])
    assert not torch.equal(heads[1][:2], heads[3][:2])


def test_gradients_may_be_clipped_by_their_length() -> None:
    """A bound that no gradient reaches changes nothing, a smaller one shortens the way of the model."""
    found = []
    for bound in (None, 1e6, 1e-3):
        data = replay_data()
        client = replay_client(data, {"agem": AGEM(2)}, mlp)
        before = {name: value.clone() for name, value in client.network.state_dict().items()}
        after = weights(fit(client, data, gradient_clip_val=bound))
        found.append(torch.cat([(after[name] - value).flatten() for name, value in before.items()]))
    free, bounded, short = found
    torch.testing.assert_close(bounded, free, rtol=0, atol=1e-6)
    assert 0 < short.norm() < 0.1 * free.norm()
