"""Fed-A-GEM, alone and on other methods, against a loop that writes everything out in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from support.naive_replay import (
    AFTER_THE_ROUND,
    EVEN,
    FORMULAS,
    SCENARIOS,
    Settings,
    assert_is_the_loop,
    filled_buffers,
    flat,
    held,
    inputs,
    mean_cross_entropy,
    projected,
    replay_client,
    replay_data,
    word,
)
from support.naive_replay import Slot as Sample
from support.tiny import (
    DECAY,
    ConvNet,
    Rounds,
    SaveAfter,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    split,
    weights,
)
from test_registry import CASES
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining, RandomShare
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Synthetic
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.engines.right_factors import multiply_gradients
from cfl.federation.channel import Channel
from cfl.federation.federated_model import FederatedModel
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.federation.server import Server
from cfl.methods import (
    AGEM,
    DER,
    EWC,
    FOT,
    GLFC,
    GPM,
    L2P,
    SCAFFOLD,
    CFeD,
    FedAGEM,
    FedCIL,
    FedProx,
    ICaRL,
    Method,
    PersonalLayers,
)
from cfl.methods.components.gradient_projection import inner
from cfl.methods.task_free import task_free_plan
from cfl.models import ACGAN, MLP
from cfl.models.dropout import DropoutMasks, dropout_masks
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import BadUpdate, ConfigError
from cfl.testing.comparing import distance
from cfl.testing.method_case import MethodCase
from cfl.training.client import Client

WORKERS = EngineOptions("workers", 1, 1, False)  # all fixed: no choice by trial, so that runs repeat bit for bit
PARAMETERS = 16 * 8 + 8 + 8 * 4 + 4
"""Weights of ``mlp`` on four classes."""


# Whole runs.


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_is_what_the_algorithm_says(scenario: str) -> None:
    loop = assert_is_the_loop(SCENARIOS[scenario](), {"fed_agem": FedAGEM(3)}, Settings(fed=3))
    assert 0 < loop.refined < loop.steps


def test_clients_count_alike_whatever_they_draw() -> None:
    """The server weights clients equally, although a client with more samples draws more."""
    data = replay_data()
    assert_is_the_loop(data, {"fed_agem": FedAGEM(50)}, Settings(fed=50), size=40)
    assert len({len(buffer.slots) for buffer in filled_buffers(data, 40)}) > 3


def test_on_top_of_agem() -> None:
    """Algorithm 6: project first against the client's own buffer, then against the reference of all clients."""
    assert_is_the_loop(replay_data(), {"agem": AGEM(3), "fed_agem": FedAGEM(4)}, Settings(agem=3, fed=4))


@pytest.mark.parametrize(
    "other", [AGEM(3), EWC(1.0), FedProx(0.1), SCAFFOLD(), FedAGEM(4)], ids=lambda method: type(method).__name__
)
def test_what_would_add_to_gradients_behind_it_is_refused(other: Method) -> None:
    data = replay_data()
    with pytest.raises(ConfigError, match=r"methods = \['fed', 'other'\].*fed behind other"):
        fit(replay_client(data, {"fed": FedAGEM(4), "other": other}, mlp), data)
    fit(replay_client(data, {"fed": FedAGEM(4), "other": DER(1.0, 0.0, 3)}, mlp), data)  # DER only adds a loss term


class Multiplied(Method):
    """Records how far clients' gradients are from those that GPM allows, in steps that Fed-A-GEM may change."""

    kind = "look"

    def __init__(self, gpm: GPM) -> None:
        self.gpm, self.farthest, self.steps = gpm, 0.0, 0

    def adjust_gradients(self, cohort: Cohort) -> None:
        factors = self.gpm.right_factors(cohort) if cohort.task else {}
        allowed = {name: gradient.clone() for name, gradient in cohort.gradients.items() if name in factors}
        multiply_gradients(allowed, factors)
        for name, gradient in allowed.items():
            self.steps += 1
            self.farthest = max(self.farthest, float((gradient - cohort.gradients[name]).norm() / gradient.norm()))


@pytest.mark.parametrize("behind", [False, True])
def test_of_two_projections_the_last_one_holds(behind: bool) -> None:
    """With GPM behind it no gradient leaves what GPM allows, and a warning says what may happen to the reference."""
    gpm, fed = GPM(0.9), FedAGEM(8)
    watch = Multiplied(gpm)
    pair: list[tuple[str, Method]] = [("gpm", gpm), ("fed", fed)]
    methods = dict(pair[::-1] if behind else pair) | {"watch": watch}
    data = replay_data(split(2, train=120), schedule={"rounds_per_task": 3})
    said = r"methods\.gpm changes gradients behind methods\.fed: .* may conflict with the reference again"
    with pytest.warns(UserWarning, match=said) if behind else nullcontext():
        fit(replay_client(data, methods, double(ConvNet), ReplayBuffer(8), WORKERS), data)
    assert watch.steps > 5
    assert fed.report().figures["refined_share"] > 0
    assert (watch.farthest < 1e-6) is behind
    assert watch.farthest < 1e-6 or watch.farthest > 1e-3


@pytest.mark.parametrize(
    "other",
    [
        lambda: CFeD(Synthetic(3, [1, 4, 4], 30, 3), server_distillation=1),
        lambda: FedCIL(consolidation_steps=1),
    ],
)
def test_what_may_move_the_model_after_the_reference_is_refused(other: Any) -> None:
    data = replay_data(split(2))
    network = partial(ACGAN, classifier=mlp, widths=[6], noise_dim=4) if isinstance(other(), FedCIL) else mlp
    with pytest.raises(ConfigError, match=r"methods = \['fed', 'other'\].*fed behind other.*next round begins with"):
        fit(replay_client(data, {"fed": FedAGEM(4), "other": other()}, network), data)


@pytest.mark.parametrize("other", [partial(ICaRL, 4), partial(GLFC, 4)], ids=["icarl", "glfc"])
def test_what_only_looks_at_the_model_after_a_round_may_do_so_before_it_or_after(other: Callable[[], Method]) -> None:
    found = []
    for behind in (False, True):
        data = replay_data(split(2, train=120), scenario="class", schedule={"rounds_per_task": 3})
        pair: list[tuple[str, Method]] = [("other", other()), ("fed", FedAGEM(4))]
        client = replay_client(data, dict(pair[::-1] if behind else pair), double(mlp), ReplayBuffer(6))
        found.append(weights(fit(client, data)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_the_reference_is_of_the_model_that_is_sent_next() -> None:
    """Also with CFeD's server distillation, which trains the model after a round."""
    data = replay_data(num_clients=4, partition=None)
    watch = References()
    methods: dict[str, Method] = {
        "cfed": CFeD(Synthetic(3, [1, 4, 4], 30, 3), server_distillation=1),
        "fed_agem": FedAGEM(4),
    }
    federation = fit(replay_client(data, methods, double(mlp), ReplayBuffer(4)), data, None, [watch])
    for round in range(data.num_rounds - 1):
        pooled = [Sample(*pair) for client in data.rounds.round(round).clients for pair in watch.held[round][client]]
        watch.check(round, [gradient_on(data, federation.network, watch.models[round], pooled)])


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_on_top_of_der(scenario: str) -> None:
    """Algorithm 5, with the labels' term of DER++."""
    methods: dict[str, Method] = {"der": DER(0.7, 0.4, 3), "fed_agem": FedAGEM(4)}
    assert_is_the_loop(SCENARIOS[scenario](), methods, Settings(der=3, alpha=0.7, beta=0.4, fed=4))


def test_on_top_of_both() -> None:
    methods: dict[str, Method] = {"der": DER(0.7, 0.0, 3), "agem": AGEM(2), "fed_agem": FedAGEM(4)}
    assert_is_the_loop(replay_data(), methods, Settings(agem=2, der=3, alpha=0.7, fed=4))


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_batchnorm_normalises_by_the_drawn_samples_and_counts_none(engine: EngineOptions) -> None:
    assert_is_the_loop(replay_data(**EVEN), {"fed_agem": FedAGEM(3)}, Settings(fed=3), norm_net, engine)


def test_references_of_every_other_round() -> None:
    data = replay_data(schedule={"rounds_per_task": 3})
    loop = assert_is_the_loop(data, {"fed_agem": FedAGEM(3, every=2)}, Settings(fed=3, every=2))
    assert len(loop.references) == 2


def test_every_other_round_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """A checkpoint holds which clients have the reference, so that none is sent it twice."""

    def start(callbacks: Any, path: Path | None = None) -> tuple[dict[str, bytes], dict[str, int]]:
        data = replay_data(schedule={"rounds_per_task": 4})
        client = replay_client(data, {"fed_agem": FedAGEM(3, every=3)}, mlp)
        federation = fit(client, data, None, callbacks, path)
        return {n: w.numpy().tobytes() for n, w in weights(federation).items()}, dict(federation.channel.downlink_bytes)

    rounds = range(7)
    whole = start([SaveAfter(number, tmp_path / f"{number}.ckpt") for number in rounds])
    for number in rounds:
        assert start([], tmp_path / f"{number}.ckpt") == whole, f"interrupted after round {number}"


def test_buffers_of_all_members() -> None:
    """Members outside the round send gradients too. A member that has not trained yet has no buffer to use."""
    data = replay_data(permuted(3), participation=Joining(2, 2), schedule={"clients_per_round": 1})
    loop = assert_is_the_loop(data, {"fed_agem": FedAGEM(3, clients="all")}, Settings(fed=3, asked="all"))
    asked = [len(data.members[data.rounds.round(r).task]) for r in range(len(loop.references))]
    answered = [len(found) for found in loop.references]
    assert any(1 < few < many for few, many in zip(answered, asked, strict=True))


@pytest.mark.parametrize("clients", ["all", "sampled", "holders"])
def test_sums_of_integers_do_not_wait_for_clients_with_empty_buffers(clients: Any) -> None:
    """Three of ten clients train in a round, so that few have samples for a reference at first."""
    found = []
    for aggregation in ("plain", "modelled"):
        data = replay_data(permuted(2), num_clients=10, schedule={"clients_per_round": 3, "rounds_per_task": 2})
        client = replay_client(data, {"fed_agem": FedAGEM(3, clients=clients)}, mlp)
        found.append(weights(fit(client, data, {"aggregation": aggregation})))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_who_has_only_reviewed_holds_nothing() -> None:
    """CFeD withholds a reviewing client's samples, so its buffer exists but is empty, and it is no holder."""

    class Holds(Method):
        def end_round(self, plan: RoundPlan) -> None:
            buffer = self.context.buffer
            assert buffer is not None
            fill = buffer.fill(range(8)).tolist()
            assert buffer.holders() == [client for client in range(8) if fill[client]]
            empty.update(set(self.context.clients.holders("buffer")) - set(buffer.holders()))

    empty: set[int] = set()
    surrogate = Synthetic(3, [1, 4, 4], 30, 3, seed=7)
    data = replay_data(
        split(3, classes=6, train=160), num_clients=8, scenario="class", schedule={"clients_per_round": 2}
    )
    methods: dict[str, Method] = {
        "cfed": CFeD(surrogate, 0.5),
        "holds": Holds(),
        "fed_agem": FedAGEM(3, clients="holders"),
    }
    assert fit(replay_client(data, methods, double(mlp)), data).finished
    assert empty


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_buffers_of_all_holders(scenario: str) -> None:
    """Holders without the present task send gradients too, computed at the present model."""
    options: dict[str, Any] = {
        "participation": RandomShare(0.6),
        "num_clients": 6,
        "schedule": {"clients_per_round": 2},
    }
    if scenario == "class":
        options |= {"stream": split(3, classes=6, train=120), "scenario": "class", "class_loss": "seen"}
    data = replay_data(options.pop("stream", permuted(3)), **options)
    methods = {"fed_agem": FedAGEM(3, clients="holders")}
    loop = assert_is_the_loop(data, methods, Settings(fed=3, asked="holders"))
    absent = [set(found) - set(data.members[data.rounds.task_of(r)]) for r, found in enumerate(loop.references)]
    assert sum(map(len, absent)) > 3


def test_a_holder_without_the_task_computes_with_its_own_layers() -> None:
    watch = References()
    fed, own = FedAGEM(4, clients="holders"), PersonalLayers(["head.*"])
    data = replay_data(permuted(3), participation=RandomShare(0.6), schedule={"clients_per_round": 2})
    methods: dict[str, Method] = {"own": own, "fed_agem": fed}
    federation = fit(replay_client(data, methods, double(mlp), ReplayBuffer(4)), data, None, [watch])
    absent = 0
    for round in range(data.num_rounds - 1):
        expected = []
        for client, kept in watch.own[round].items():
            shared = {name: value for name, value in watch.models[round].items() if "head" not in name}
            samples = [Sample(*pair) for pair in watch.held[round][client]]
            expected.append(gradient_on(data, federation.network, shared, samples, kept=kept))
            absent += client not in data.members[data.rounds.task_of(round)]
        watch.check(round, expected)
    assert absent > 1


@pytest.mark.parametrize("clients", ["sampled", "all", "holders"])
def test_clients_with_clocks_of_their_own(clients: Any) -> None:
    """Each client computes over the classes that it has seen. A client with no task left is asked only as a holder."""
    data = replay_data(
        split(3, classes=6, train=120),
        num_clients=4,
        partition=None,
        scenario="class",
        class_loss="seen",
        schedule={"clients_per_round": 2, "clock_spread": 0.67, "rounds_per_task": 3},
    )
    watch, federation = watched(data, FedAGEM(4, clients=clients), double(mlp))
    apart = left = 0
    for round in range(data.num_rounds - 1):
        present = data.rounds.present(round).tolist()
        asked = {"sampled": data.rounds.round(round).clients, "all": present, "holders": range(4)}[clients]
        expected = []
        for client in asked:
            samples = [Sample(*pair) for pair in watch.held[round][client]]
            if samples:
                now = data.rounds.task_at(round, client)
                expected.append(gradient_on(data, federation.network, watch.models[round], samples, now))
        watch.check(round, expected)
        apart += len({data.rounds.task_at(round, client) for client in asked}) > 1
        left += len(data.rounds.present(round)) < 4
    assert apart > 2
    assert left > 0


@pytest.mark.parametrize("when", ["conflict", "always"])
@pytest.mark.parametrize("how", FORMULAS)
def test_variants(how: Any, when: Any) -> None:
    """Section 5.3.1, Table 9."""

    def change(g: Tensor, r: Tensor) -> Tensor:
        return FORMULAS[how](g, r) if when == "always" or g @ r < 0 else g

    fed = FedAGEM(3, refinement=how, when=when)
    loop = assert_is_the_loop(replay_data(), {"fed_agem": fed}, Settings(fed=3, refinement=change))
    assert fed.report().figures["refined_share"] == pytest.approx(100 * loop.refined / loop.steps)


@pytest.mark.parametrize("when", ["conflict", "always"])
def test_a_share_of_the_cases_is_what_the_loop_draws(when: Any) -> None:
    """Table 10: a drawn share of the conflicts, or of all steps, is refined. Other gradients stay as they are."""
    fed = FedAGEM(3, share=0.5, when=when)
    change = FORMULAS["project"] if when == "always" else projected
    loop = assert_is_the_loop(replay_data(), {"fed_agem": fed}, Settings(fed=3, share=0.5, refinement=change))
    assert loop.refined > 5
    assert loop.spared > 5
    assert loop.refined + loop.spared == loop.steps or when == "conflict"
    assert fed.report().figures["refined_share"] == pytest.approx(100 * loop.refined / loop.steps)


# The reference.


class References(Callback):
    """Record references, global models, buffers and clients' own tensors after every round."""

    def __init__(self) -> None:
        self.references: list[dict[str, Tensor]] = []
        self.models: list[dict[str, Tensor]] = []
        self.held: list[dict[int, list[tuple[int, int]]]] = []
        self.own: list[dict[int, dict[str, Tensor]]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:  # type: ignore[override]
        federation = pl_module.federation
        assert federation is not None
        fed = federation.methods["fed_agem"]
        assert isinstance(fed, FedAGEM)
        self.references.append({name: value.clone() for name, value in fed.reference.items()})
        self.models.append(weights(federation))
        clients = range(federation.data.num_clients)
        self.held.append({client: held(federation, client) for client in clients})
        own = {client: federation.clients.get("model", client) for client in clients}
        self.own.append({client: kept for client, kept in own.items() if kept is not None})

    def check(self, round: int, expected: list[Tensor], atol: float = 1e-12) -> None:
        """Require that the reference of a round is the mean of flat gradients."""
        found = flat(list(self.references[round].values()))
        torch.testing.assert_close(found, torch.stack(expected).mean(0), rtol=0, atol=atol)


def watched(
    data: FederatedDataModule, fed: FedAGEM, network: Any, size: int = 4, **options: Any
) -> tuple[References, Federation]:
    watch = References()
    client = replay_client(data, {"fed_agem": fed}, network, ReplayBuffer(size), **options)
    return watch, fit(client, data, None, [watch])


def gradient_on(
    data: FederatedDataModule,
    network: nn.Module,
    model: Mapping[str, Tensor],
    samples: list[Sample],
    now: int = 0,
    kept: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Gradient of the samples' mean cross-entropy by the tensors of ``model``, flat, while a client is at task ``now``.

    ``kept`` has the client's own tensors.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    x, y, tasks = inputs(data, samples)
    loss = mean_cross_entropy(data, functional_call(network, {**leaves, **(kept or {})}, (x,)), y, tasks, now)
    return flat(torch.autograd.grad(loss, list(leaves.values())))


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_it_is_the_gradient_on_all_buffers_if_they_are_equally_full(scenario: str) -> None:
    """The mean of means is the mean over the samples of all clients of the round."""
    options: dict[str, Any] = {"num_clients": 4, "partition": None}
    data = replay_data(**options) if scenario == "domain" else replay_data(split(2), **options)
    watch, federation = watched(data, FedAGEM(samples=4), double(mlp))
    for round in range(data.num_rounds - 1):
        pooled = [Sample(*pair) for client in data.rounds.round(round).clients for pair in watch.held[round][client]]
        assert len(pooled) == 12
        watch.check(round, [gradient_on(data, federation.network, watch.models[round], pooled)])
    last = data.num_rounds - 1
    assert all(torch.equal(watch.references[last][n], v) for n, v in watch.references[last - 1].items())


def test_raw_samples_are_augmented_anew_for_every_reference() -> None:
    """The augmentation differs from round to round and does not depend on the cohort width."""
    found = []
    for width in (1, 4):
        data = replay_data(
            num_clients=4,
            partition=None,
            schedule={"cohort_width": width, "rounds_per_task": 3},
            augmentation=CropFlip(1),
        )
        watch = References()
        methods: dict[str, Method] = {"fed_agem": FedAGEM(4)}
        buffer = ReplayBuffer(4, keeps="raw")
        federation = fit(replay_client(data, methods, double(mlp), buffer, WORKERS), data, None, [watch])
        found.append(watch)
    for round in range(data.num_rounds - 1):
        pooled = [
            Sample(*pair, round, AFTER_THE_ROUND)
            for member in data.rounds.round(round).clients
            for pair in watch.held[round][member]
        ]
        expected = gradient_on(data, federation.network, watch.models[round], pooled)
        for run in found:
            run.check(round, [expected], 1e-9)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_modes_of_the_network(mode: Any) -> None:
    """The reference has no dropout in mode eval. In mode train it has masks, which are the same in every run."""
    data = replay_data(num_clients=4, partition=None)
    network = double(partial(MLP, hidden=[8], dropout=0.5))
    watch, federation = watched(data, FedAGEM(4, mode=mode), network)
    again, _ = watched(data, FedAGEM(4, mode=mode), network)
    pooled = [Sample(*pair) for client in data.rounds.round(0).clients for pair in watch.held[0][client]]
    plain = gradient_on(data, federation.network.eval(), watch.models[0], pooled)
    found = flat(list(watch.references[0].values()))
    assert torch.allclose(found, plain, rtol=0, atol=1e-12) == (mode == "eval")
    assert torch.equal(found, flat(list(again.references[0].values())))


def drawn_for_reference(data: FederatedDataModule, watch: References, round: int, client: int) -> list[Sample]:
    """Four of a client's samples, in the order in which they are drawn."""
    slots, key = watch.held[round][client], seed_for(data.seed, "buffer reference", client, round)
    return [Sample(*slots[slot]) for slot in sorted(range(len(slots)), key=lambda slot: word(key, slot))[:4]]


def test_dropout_of_the_reference_is_drawn_for_each_round_and_client() -> None:
    """The masks have random keys of their own, with one row for each drawn sample."""
    data = replay_data(num_clients=4, partition=None)
    watch, federation = watched(data, FedAGEM(4), double(partial(MLP, hidden=[8], dropout=0.5)), 6)
    network = federation.network.train()
    draw = DropoutMasks(network, data.input_shape).draw
    for round in range(data.num_rounds - 1):
        expected = []
        for client in data.rounds.round(round).clients:
            drawn = drawn_for_reference(data, watch, round, client)
            key = seed_for(data.seed, "dropout of the reference", round, client)
            masks = {name: mask[0] for name, mask in draw(torch.tensor([key]), len(drawn), torch.float64).items()}
            with dropout_masks(network, masks):
                expected.append(gradient_on(data, network, watch.models[round], drawn))
        watch.check(round, expected)


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_in_mode_eval_batchnorm_normalises_by_running_statistics(batchnorm: Any) -> None:
    """The statistics are the server's or, with ``batchnorm`` local, each client's own. Written out layer by layer."""
    data, watch = replay_data(**EVEN), References()
    client = replay_client(data, {"fed_agem": FedAGEM(4, mode="eval")}, double(norm_net), ReplayBuffer(6))
    fit(client, data, {"batchnorm": batchnorm}, [watch])
    own = 0
    for round in range(data.num_rounds - 1):
        expected = []
        for member in data.rounds.round(round).clients:
            x, y, _ = inputs(data, drawn_for_reference(data, watch, round, member))
            state = {**watch.models[round], **watch.own[round].get(member, {})}
            t = {n: v.clone().requires_grad_("running" not in n and "num" not in n) for n, v in state.items()}

            def normalised(z: Tensor, layer: str, t: dict[str, Tensor] = t) -> Tensor:
                shape = (1, -1, *[1] * (z.ndim - 2))
                mean, variance, weight, bias = (
                    t[f"{layer}.{name}"].view(shape) for name in ("running_mean", "running_var", "weight", "bias")
                )
                return (z - mean) / (variance + 1e-5).sqrt() * weight + bias

            maps = normalised(F.conv2d(x.double(), t["conv.weight"], t["conv.bias"]), "conv_norm").relu()
            hidden = normalised(maps.flatten(1) @ t["fc.weight"].T + t["fc.bias"], "fc_norm").relu()
            loss = F.cross_entropy(hidden @ t["head.weight"].T + t["head.bias"], y)
            expected.append(flat(torch.autograd.grad(loss, [t[name] for name in watch.references[round]])))
            mean = t["fc_norm.running_mean"]
            assert mean.any()
            own += not torch.equal(mean, watch.models[round]["fc_norm.running_mean"])
        watch.check(round, expected)
    assert own == (9 if batchnorm == "local" else 0)


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batchnorm_of_all_kinds(mode: Any, batchnorm: Any) -> None:
    """References from single samples work in every mode, and running statistics stay as they are."""
    ends = []
    for methods in ({}, {"fed_agem": FedAGEM(1, mode=mode, when="always")}):
        data = replay_data(schedule={"rounds_per_task": 1})
        watch = Rounds()
        federation = fit(replay_client(data, methods, norm_net), data, {"batchnorm": batchnorm}, [watch])
        ends.append(weights(federation))
        if not methods:
            first = watch.models[0]
    assert all(torch.equal(first[name], value) for name, value in watch.models[0].items())
    assert all(value.isfinite().all() for value in ends[1].values())
    assert not torch.equal(ends[0]["conv.weight"], ends[1]["conv.weight"])


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_round_one_is_federated_averaging_bit_for_bit(engine: EngineOptions) -> None:
    runs = []
    for methods in ({}, {"fed_agem": FedAGEM(4, when="always")}):
        data, watch = replay_data(), Rounds()
        fit(replay_client(data, methods, mlp, engine=engine), data, None, [watch])
        runs.append(watch.models)
    assert all(torch.equal(value, runs[1][0][name]) for name, value in runs[0][0].items())
    assert any(not torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_nobody_has_a_sample() -> None:
    """Without any sample there is no reference, or the last reference stays."""
    data = replay_data()
    data.setup("fit")
    fed = FedAGEM()
    client = replay_client(data, {"fed_agem": fed}, mlp)
    model = FederatedModel(client.network, client.methods.keeps_local)
    server = Server(dict(client.network.named_parameters()), dict(client.network.named_buffers()))
    federation = Federation(model, data, client.methods, server, Channel())
    federation.round = 1  # once the first has ended
    fed.end_round(task_free_plan(data.rounds.round(0)))
    assert fed.reference == {}
    assert fed.changes_gradients  # before the first round, when an engine is chosen for all rounds
    fed.start_clients(Cohort(client.network, 1))
    assert not fed.changes_gradients
    assert federation.channel.uplink_bytes == {}
    fed.reference = {"head.bias": torch.ones(4)}
    federation.round = 2
    fed.end_round(task_free_plan(data.rounds.round(1)))
    assert list(fed.reference) == ["head.bias"]


class Bad(FedAGEM):
    """Make all buffer gradients NaN after the given rounds. Record the reference and who has it after every round."""

    def __init__(self, rounds: set[int], **options: Any) -> None:
        super().__init__(4, **options)
        self.rounds, self.left, self.had = rounds, list[dict[str, Tensor]](), list[set[int]]()

    def _gradient(self, *given: Any) -> dict[str, Tensor]:
        found = super()._gradient(*given)
        bad = self.context.round - 1 in self.rounds
        return {name: torch.full_like(value, torch.nan) if bad else value for name, value in found.items()}

    def end_round(self, plan: RoundPlan) -> None:
        super().end_round(plan)
        self.left.append({name: value.clone() for name, value in self.reference.items()})
        self.had.append(set(self._have))


@pytest.mark.parametrize("first", [True, False])
def test_where_all_gradients_are_skipped_the_last_reference_holds(first: bool) -> None:
    data = replay_data(schedule={"rounds_per_task": 2, "clients_per_round": 5})
    bad = 0 if first else 1
    fed = Bad({bad})
    federation = fit(replay_client(data, {"fed_agem": fed}, mlp, ReplayBuffer(5)), data, {"on_bad_update": "skip"})
    assert federation.finished
    assert federation.channel.skipped == [], "their models were good, and counted"
    assert federation.channel.skipped_messages == [(bad, "buffer gradient", client) for client in range(5)]
    assert all(value.isfinite().all() for value in weights(federation).values())
    if first:
        assert fed.left[0] == {}
    else:
        assert all(torch.equal(fed.left[1][name], value) for name, value in fed.left[0].items())
        assert fed.had[1] == set(range(5)), "nobody is sent it again"
        assert any(not torch.equal(fed.left[2][name], value) for name, value in fed.left[1].items())
    sent = sum(value.numel() for value in fed.left[2].values()) * 4
    assert federation.channel.uplink_bytes["buffer gradient"] == 3 * 5 * sent
    assert federation.channel.downlink_bytes["reference gradient"] == 2 * 5 * sent


def test_a_gradient_that_is_not_finite_stops_a_run_that_skips_none() -> None:
    data = replay_data()
    with pytest.raises(
        BadUpdate, match=r"client \d+ has NaN or infinity in its 'buffer gradient' in round 1; .*leaves that out"
    ):
        fit(replay_client(data, {"fed_agem": Bad({1})}, mlp, ReplayBuffer(5)), data)


# Local steps.


class After(Method):
    """Check that refined gradients do not conflict with the reference."""

    kind = "look"
    shared_only = True

    def __init__(self, fed: FedAGEM) -> None:
        self.fed, self.steps = fed, 0

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.training = batch.mask.any(1)  # a client without steps left may keep a penalty's gradient
        return batch

    def adjust_gradients(self, cohort: Cohort) -> None:
        if cohort.round:
            reference = {name: value[None] for name, value in self.fed.reference.items()}
            held = {
                name: gradient for name, gradient in cohort.gradients.items() if name in reference
            }  # less if frozen
            gradients = held
            reference = {name: reference[name] for name in held}
            whole = inner(reference, reference)
            length = (inner(gradients, gradients) * whole).sqrt()
            # Gradients that are 0 except for rounding have any direction. The thresholds are not the method's own.
            rounding = 1e-5 if next(iter(gradients.values())).dtype == torch.float32 else 2e-14
            least = -torch.maximum(1e-6 * length, rounding * whole)
            assert (inner(gradients, reference) >= least)[self.training].all()
            self.steps += 1


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), WORKERS], ids=["vmap", "workers"])
def test_no_step_conflicts_with_the_reference(engine: EngineOptions) -> None:
    fed = FedAGEM(4)
    after = After(fed)
    data = replay_data(split(2, train=120))
    fit(replay_client(data, {"fed_agem": fed, "after": after}, ConvNet, ReplayBuffer(6), engine), data)
    assert after.steps > 10
    assert 5 < fed.report().figures["refined_share"] < 95


def chosen(share: float, round: int, step: int, clients: tuple[int, ...]) -> list[bool]:
    fed = FedAGEM(share=share)
    fed.context, fed._step = SimpleNamespace(seed=3), step  # type: ignore[assignment]
    return fed._chosen(SimpleNamespace(round=round, clients=clients)).tolist()  # type: ignore[arg-type]


def test_a_share_of_the_conflicts_is_drawn_for_each_client_round_and_step() -> None:
    """Table 10. A draw does not depend on the other clients, and a smaller share is part of a larger one."""
    clients, moments = tuple(range(100)), [(round, step) for round in range(8) for step in range(8)]
    few, many = (torch.tensor([chosen(p, *moment, clients) for moment in moments]) for p in (0.3, 0.8))
    for share, drawn in ((0.3, few), (0.8, many)):
        size = drawn.numel()
        assert abs(drawn.sum() - share * size) < 4 * (share * (1 - share) * size) ** 0.5
        for dim, count in ((0, len(moments)), (1, len(clients))):  # neither clients nor moments are favoured
            assert (drawn.double().mean(dim) - share).abs().max() < 5 * (share * (1 - share) / count) ** 0.5
    assert (few <= many).all()
    assert [few[9, client] for client in (5, 77)] == chosen(0.3, *moments[9], (5, 77))


def test_a_share_in_a_run() -> None:
    ends, counts = [], []
    for share in (0.5, 0.5, 1.0):
        fed, data = FedAGEM(4, share=share, when="always"), replay_data()
        ends.append(weights(fit(replay_client(data, {"fed_agem": fed}, mlp), data)))
        counts.append(fed.report().figures["refined_share"])
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    assert not torch.equal(ends[1]["head.weight"], ends[2]["head.weight"])
    assert counts[0] == counts[1]
    assert 20 < counts[0] < 80
    assert counts[2] == 100


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_it_counts_does_not_depend_on_the_width(share: float) -> None:
    """A client that has taken its last step still gets a penalty's gradient, which must not be counted as a step."""
    found = []
    for width in (1, 5):
        fed = FedAGEM(4, share=share)
        data = replay_data(split(2, train=120), schedule={"cohort_width": width})
        methods: dict[str, Method] = {"prox": FedProx(0.5), "fed_agem": fed}
        # Workers, because other engines are not given clients that differ much side by side.
        client = replay_client(data, methods, double(mlp), engine=WORKERS)
        federation = fit(client, data, {"server_momentum": 0.5})
        found.append((fed._refined, fed._steps, weights(federation)))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["project", "average"])
def test_gradients_of_rounding_alone_are_no_conflict(how: Any) -> None:
    """A reviewing client of CFeD begins a task at its own teacher: its first gradient is 0 but for rounding."""
    found = []
    for engine, width in ((EngineOptions("vmap"), 10), (EngineOptions("vmap"), 1), (WORKERS, 1)):
        fed = FedAGEM(8, refinement=how)
        methods: dict[str, Method] = {"cfed": CFeD(Synthetic(3, [1, 4, 4], 30, 3), share=0.5), "fed_agem": fed}
        settings = {"rounds_per_task": 2, "clients_per_round": 4, "cohort_width": width}
        data = replay_data(split(2, train=120), num_clients=4, partition=None, schedule=settings)
        federation = fit(replay_client(data, methods, double(mlp), ReplayBuffer(12), engine), data)
        found.append((fed._refined, fed._steps, weights(federation)))
    assert found[0][0] > 0
    for refined, steps, model in found[1:]:
        assert (refined, steps) == found[0][:2]
        torch.testing.assert_close(found[0][2], model, rtol=0, atol=1e-10)


def test_outputs_of_other_tasks_move_and_are_kept() -> None:
    """The reference moves outputs of earlier tasks in the buffers. Outputs of later tasks neither move nor decay."""
    data, watch = replay_data(split(3, classes=6, train=120)), Rounds()
    methods: dict[str, Method] = {"fed_agem": FedAGEM(8, when="always", refinement="average")}
    fit(replay_client(data, methods, mlp, optimizer=DECAY), data, None, [watch])
    heads = [model["head.weight"] for model in watch.models]
    for before, after in pairwise(heads[1:5]):
        assert not torch.equal(before[:2], after[:2])
    assert torch.equal(heads[3][4:], heads[0][4:])
    assert torch.equal(heads[1][2:], heads[0][2:])


class Around(Method):
    """Record the head's gradients at every step."""

    kind = "look"

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def adjust_gradients(self, cohort: Cohort) -> None:
        self.gradients.append(cohort.gradients["head.weight"].clone())


@pytest.mark.parametrize("how", FORMULAS)
def test_what_stays_on_the_clients_is_left_alone(how: Any) -> None:
    before, after, fed = Around(), Around(), FedAGEM(4, refinement=how, when="always")
    data = replay_data()
    methods: dict[str, Method] = {"own": PersonalLayers(["head.*"]), "b": before, "fed_agem": fed, "a": after}
    federation = fit(replay_client(data, methods, mlp), data)
    assert set(fed.reference) == {"layers.0.weight", "layers.0.bias"}
    assert fed.report().figures["refined_share"] == 100
    assert all(torch.equal(*pair) for pair in zip(before.gradients, after.gradients, strict=True))
    assert federation.finished


def test_a_reference_that_no_round_is_left_for_is_refused() -> None:
    data = replay_data(schedule={"rounds_per_task": 2})
    rounds = data.num_rounds
    with pytest.raises(ConfigError, match=rf"methods\.fed_agem\.every = {rounds} .*an integer below {rounds}"):
        fit(replay_client(data, {"fed_agem": FedAGEM(every=rounds)}, mlp), data)
    last = FedAGEM(every=rounds - 1)
    federation = fit(replay_client(data, {"fed_agem": last}, mlp), data)
    assert federation.finished
    assert last.reference
    data = replay_data(permuted(1), schedule={"rounds_per_task": 1})
    assert fit(replay_client(data, {"fed_agem": FedAGEM()}, mlp), data).finished, "one round is one too few for any"


# Messages.


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("clients", ["sampled", "all", "holders"])
def test_bytes(clients: Any, every: int) -> None:
    """One gradient up per asked client with a buffer, and the reference down once to each client that trains with it.

    An asked client that is not in the next round is sent the model again.
    """
    data = replay_data(schedule={"rounds_per_task": 3})
    method = FedAGEM(3, every, clients=clients)
    federation = fit(replay_client(data, {"fed_agem": method}, mlp, ReplayBuffer(5)), data)
    plain = fit(replay_client(replay_data(), {}, mlp), replay_data())
    assert set(plain.channel.uplink_bytes) == {"update"}
    plans = [set(data.rounds.round(r).clients) for r in range(6)]
    known, have, sent, again, down, there = set(), set(), 0, 0, 0, False
    for number, (now, following) in enumerate(pairwise(plans), 1):
        known |= now
        have |= now
        if number % every == 0:
            asked = {"sampled": now, "all": set(range(5)), "holders": set(known)}[clients]
            sent += len(asked & known)
            again += len(asked - following)
            have, there = set(), True
        down += there * len(following - have)
    size = 4 * PARAMETERS
    assert federation.methods["fed_agem"].report().figures["reference_bytes"] == size
    assert federation.buffer is not None
    assert federation.client_storage() == federation.buffer.client_storage() + size * (every > 1)
    assert federation.channel.uplink_bytes == {"update": 18 * size, "buffer gradient": sent * size}
    assert federation.channel.downlink_bytes == {"model": (18 + again) * size, "reference gradient": down * size}
    assert again > 0 or every == 3
    assert (down == 15) == (every == 1)


# With others.

WITHOUT_SHARED_PARAMETERS = {"FedWeIT", "CONFEDMADE"}


def with_classes(case: MethodCase, class_loss: str) -> MethodCase:
    """The same method over tasks that add classes."""
    return replace(
        case, stream=partial(split, train=120), scenario="class", data={**case.data, "class_loss": class_loss}
    )


CLASSIFYING = ("GLFC", "ICaRL")  # without domain-incremental runs
BESIDE = {name: case for name, case in CASES.items() if name not in ("FedAGEM", *CLASSIFYING)}
BESIDE = {name: case for name, case in BESIDE.items() if case.of_scenario() != "density"}
for loss in ("all", "seen"):
    for kind in ("AGEM", "CFeD", "DER", "ER", "FedProx", "L2P", "SCAFFOLD", *CLASSIFYING):
        BESIDE[f"{kind}, classes, {loss}"] = with_classes(CASES[kind], loss)
BESIDE["L2P, classes, seen"] = replace(BESIDE["L2P, classes, seen"], make=partial(L2P, 5.0, mask_logits=False))


def checked(when: Any) -> dict[str, Method]:
    fed = FedAGEM(8, when=when)
    return {"fed_agem": fed, "after": After(fed)}


@pytest.mark.parametrize("name", BESIDE)
def test_it_goes_on_top_of(name: str) -> None:
    """A run of both differs from runs of either, and no gradient conflicts with the reference.

    Runs without shared parameters or with SingleTask are refused.
    """
    alone = BESIDE[name]
    # AnalyticHead trains in the first task alone, whose few steps conflict with no reference.
    case = replace(alone, beside=partial(checked, "always" if name == "AnalyticHead" else "conflict"))
    if name in WITHOUT_SHARED_PARAMETERS:
        with pytest.raises(
            ConfigError, match=r"stays on its client \(methods\..*at least one parameter that clients share"
        ) as caught:
            case.start(case.data_of(), case.methods("tried"))
        assert caught.value.key == "methods.fed_agem"
        return
    if name == "SingleTask":
        with pytest.raises(ConfigError, match=r"methods = \['fed_agem', .*beside SingleTask"):
            case.start(case.data_of(), case.methods("tried"))
        return
    both = case.run()
    after = both.federation.methods["after"]
    assert isinstance(after, After)
    assert after.steps > 3
    assert after.fed.report().figures["refined_share"] > 0
    for one in (alone.run(), case.run("fedavg")):
        assert distance(both.models[-1], one.models[-1]) > 1e-5
    assert all(value.isfinite().all() for value in both.models[-1].values())


@pytest.mark.parametrize("frozen", [False, True])
def test_with_fot_clients_and_server_project(frozen: bool) -> None:
    """No local gradient conflicts with the reference, and no global step leaves traces on what FOT protects."""
    fot, fed, watch = FOT(0.9, freeze_first_layer=frozen), FedAGEM(8), References()
    after = After(fed)
    data = replay_data(split(2, train=120), schedule={"rounds_per_task": 3})
    methods: dict[str, Method] = {"fot": fot, "fed_agem": fed, "after": after}
    fit(replay_client(data, methods, double(ConvNet), ReplayBuffer(8), WORKERS), data, None, [watch])
    assert after.steps > 5
    assert fed.report().figures["refined_share"] > 0
    assert fot.bases
    for layer, basis in fot.bases.items():
        for before, behind in pairwise(watch.models[2:]):  # from the first task's last round on
            step = (behind[f"{layer}.weight"] - before[f"{layer}.weight"]).flatten(1)
            assert step.norm() > 1e-6
            torch.testing.assert_close(
                step @ basis.double(), torch.zeros(len(step), basis.shape[1]).double(), atol=1e-7, rtol=0
            )
