"""Keyed randomness: no draw depends on the number of draws before it."""

from __future__ import annotations

import random
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from support.tiny import at_round, double, fit, mlp, permuted, tiny_client, tiny_data, weights
from torch import Tensor

from cfl.data.partitions import IID, Dirichlet
from cfl.data.sequences import FixedTasks
from cfl.engines.cohort import Cohort
from cfl.methods import Method
from cfl.models import MLP
from cfl.randomness.generators import numpy_generator, seed_for, torch_generator

with_dropout = partial(MLP, hidden=[8], dropout=0.5)


def draw_from_everything(*_: Any) -> None:
    torch.rand(13)
    np.random.rand(5)  # noqa: NPY002  the global generator is what is to be disturbed
    random.random()


class Draws(Callback):
    """Draws from every global generator whenever one of the hooks is called."""

    def __init__(self, hooks: list[str]) -> None:
        for hook in hooks:
            setattr(self, hook, draw_from_everything)


BETWEEN_COHORTS = ["on_fit_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_batch_end"]
EVERYWHERE = [*BETWEEN_COHORTS, "on_train_batch_start", "on_before_backward", "on_before_zero_grad"]


def run(network: Any = mlp, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    schedule = {"clients_per_round": 3, "cohort_width": 2, "local_epochs": 2, **options.pop("schedule", {})}
    data = tiny_data(seed=seed, num_clients=6, partition=Dirichlet(1.0, 3), schedule=schedule)
    return weights(fit(tiny_client(data, network), data, **options))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize(
    ("network", "hooks"), [(mlp, EVERYWHERE), (with_dropout, BETWEEN_COHORTS)], ids=["plain", "dropout"]
)
def test_draws_of_others_change_nothing(network: Any, hooks: list[str]) -> None:
    """Draws from global generators by other code change no bit of a run."""
    torch.manual_seed(1)
    undisturbed = run(network)
    torch.manual_seed(2)
    draw_from_everything()
    assert_equal(run(network, callbacks=[Draws(hooks)]), undisturbed)


@pytest.mark.parametrize("network", [mlp, with_dropout], ids=["plain", "dropout"])
def test_evaluating_more_often_changes_nothing(network: Any) -> None:
    seldom = run(network, num_sanity_val_steps=0)
    assert_equal(run(network, schedule={"evaluate_every": 1}), seldom)


def test_the_initial_network_depends_on_the_seed_alone() -> None:
    def initial(seed: int) -> dict[str, Tensor]:
        data = tiny_data(seed=seed)
        return dict(tiny_client(data).network.state_dict())

    torch.manual_seed(1)
    first = initial(0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert_equal(initial(0), first)
    assert torch.equal(torch.get_rng_state(), state), "making a client takes nothing from the global generator"
    assert not torch.equal(initial(1)["head.weight"], first["head.weight"])


def test_different_seeds_give_different_runs() -> None:
    finals = [run(seed=seed) for seed in range(3)]
    for a in range(3):
        for b in range(a):
            assert all(not torch.equal(finals[a][name], finals[b][name]) for name in finals[a])


@pytest.mark.parametrize("part", ["sampling", "partition", "shuffling"])
def test_the_seed_reaches_every_draw(part: str) -> None:
    def drawn(seed: int) -> list[Any]:
        data = tiny_data(seed=seed, num_clients=6, schedule={"clients_per_round": 3})
        if part == "sampling":
            return [data.rounds.round(r).clients for r in range(6)]
        if part == "partition":
            return [own.tolist() for task in data.indices for own in task.values()]
        # The same share for everybody, so that only the order can differ.
        data.indices = [{client: np.arange(12) for client in range(6)} for _ in range(2)]
        return [batch.index[0].tolist() for batch in data.train_dataloader()]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_loaders_may_be_built_in_any_order_and_any_number() -> None:
    def batches(order: list[int], twice: bool) -> dict[int, list[Tensor]]:
        data = tiny_data(num_clients=6, schedule={"clients_per_round": 3, "local_epochs": 2})
        found = {}
        for number in order:
            at_round(data, number)
            if twice:
                list(data.train_dataloader())
                data.val_dataloader()
            found[number] = [batch.index for batch in data.train_dataloader()]
        return found

    forwards, backwards = batches([0, 1, 2, 3, 4, 5], False), batches([5, 3, 1, 0, 4, 2], True)
    for number, expected in forwards.items():
        assert len(backwards[number]) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(backwards[number], expected, strict=True))


def test_data_that_have_served_one_run_serve_another() -> None:
    data = tiny_data(schedule={"clients_per_round": 2})
    first = weights(fit(tiny_client(data), data))
    assert_equal(weights(fit(tiny_client(data), data)), first)


def test_dropout_changes_a_run_and_is_reproducible() -> None:
    first = run(with_dropout)
    assert_equal(run(with_dropout), first)
    assert not torch.equal(run(mlp)["head.weight"], first["head.weight"])


class Updates(Method):
    """Records every client's update of the head in every round."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Tensor] = {}

    def finish_clients(self, cohort: Cohort, positions: Any) -> None:
        for p in positions:
            update = cohort.parameters["head.weight"][p] - cohort.global_parameters["head.weight"]
            self.seen[cohort.round, cohort.clients[p]] = update.detach().clone()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_client_and_round_has_dropout_masks_of_its_own(width: int) -> None:
    """Clients and rounds have their own dropout masks.

    All clients take one tiny step on the same samples in each round, so that only masks can make updates differ.
    """
    every = {"partition": IID(), "sequences": FixedTasks([[0]] * 4, split="whole")}
    for network, alike in ((mlp, True), (partial(MLP, hidden=[60], dropout=0.5), False)):
        updates, short = Updates(), partial(torch.optim.SGD, lr=1e-6)
        data = tiny_data(permuted(1, train=8), **every, schedule={"cohort_width": width, "batch_size": 8})
        fit(tiny_client(data, double(network), short, {"updates": updates}), data)
        learned = list(updates.seen.values())
        assert len(learned) == 3 * 4
        for a, b in combinations(learned, 2):
            assert torch.allclose(a, b, rtol=0, atol=1e-3 * float(b.abs().max())) == alike


def test_seeds_of_different_purposes_and_indices_differ() -> None:
    indices = [(1, 23), (12, 3), (123,), (23, 1), ()]
    draws = [(seed, purpose, *i) for seed in (0, 1) for purpose in ("shuffle", "sketch") for i in indices]
    seeds = {seed_for(*draw) for draw in draws}
    assert len(seeds) == len(draws) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    """Seeds have fixed values. If these changed, no earlier result could be reproduced."""
    assert seed_for(0, "shuffle", 1, 2, 3) == 3554783015300734127
    assert numpy_generator(0, "shuffle", 1, 2, 3).integers(1000, size=3).tolist() == [433, 636, 879]
    assert torch_generator(0, "shuffle", 1, 2, 3).initial_seed() == 3554783015300734127


def test_generators_are_fresh_every_time() -> None:
    assert numpy_generator(3, "sample", 1).random() == numpy_generator(3, "sample", 1).random()
    a, b = (torch.rand(3, generator=torch_generator(3, "sketch", 1)) for _ in range(2))
    assert torch.equal(a, b)
