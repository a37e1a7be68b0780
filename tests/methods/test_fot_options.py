"""FOT's settings, reports, bytes and privacy mechanism."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import plain_network
from support.naive_fot import Watch, extract, projector
from support.tiny import NetworkFactory, StridedNet, double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.data.partitions import Shards
from cfl.federation.channel import Channel
from cfl.methods import FOT, Method, PersonalLayers
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.models import MLP
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.testing.tiny_runs import Rounds

WEIGHTS = {"layers.0": 16 * 8 + 8, "head": 8 * 4 + 4}
MODEL_BYTES = 4 * sum(WEIGHTS.values())
DIMS = {"layers.0": 16, "head": 8}


# What is sent


@pytest.mark.parametrize("gpse_model", ["global", "local"])
@pytest.mark.parametrize(("size", "columns"), [(5, (80, 40)), (0.3, (5, 3)), ({"conv": 9, "linear": 1}, (16, 8))])
def test_bytes_are_those_of_sketches_bases_and_models(gpse_model: Any, size: Any, columns: tuple[int, int]) -> None:
    """Up: A_i and two float64 energies per layer. Down: the bases and, if GPSE uses the global model, that model."""
    data = tiny_data(permuted(3), num_clients=5, schedule={"clients_per_round": 3})
    fot = FOT(threshold=0.8, sketch_size=size, gpse_model=gpse_model)
    watch = Watch(fot)
    channel = fit(tiny_client(data, mlp, sgd, {"fot": fot}), data, None, [watch]).channel
    per_client = sum(4 * d * s + 16 for d, s in zip(DIMS.values(), columns, strict=True))
    assert channel.uplink_bytes["fot sketch"] == 2 * 3 * per_client  # two extractions, three clients
    # The first extraction has no bases to send. The second sends those of the first.
    first = sum(4 * basis.numel() for basis in watch.bases[3].values())
    assert channel.downlink_bytes["fot bases"] == 3 * first > 0
    rounds = data.num_rounds + (2 if gpse_model == "global" else 0)
    assert channel.downlink_bytes["model"] == rounds * 3 * MODEL_BYTES
    assert channel.uplink_bytes["update"] == data.num_rounds * 3 * MODEL_BYTES
    assert set(channel.uplink_bytes) == {"fot sketch", "update"}
    assert set(channel.downlink_bytes) == {"fot bases", "model"}


def test_two_of_them_are_refused_where_messages_would_mix() -> None:
    def run(**options: Any) -> None:
        methods = {"a": FOT(layers=["layers.0"], **options), "b": FOT(layers=["head"])}
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
        fit(tiny_client(data, mlp, sgd, methods), data)

    run()
    with pytest.raises(ConfigError, match=r"methods = \['a', 'b'\].*one FOT with gpse_model=local"):
        run(gpse_model="local")
    with pytest.raises(ConfigError, match=r"methods = \['a', 'b'\].*one FOT with a mechanism"):
        run(mechanism=GaussianMechanism(1.0, 1e-3))


def test_all_clients_send_when_all_are_asked() -> None:
    data = tiny_data(num_clients=5, schedule={"clients_per_round": 2})
    sent = {}
    for who in ("sampled", "all"):
        fot = FOT(gpse_clients=who)  # type: ignore[arg-type]
        channel = fit(tiny_client(data, mlp, sgd, {"fot": fot}), data).channel
        sent[who] = channel.uplink_bytes["fot sketch"]
        assert channel.downlink_bytes["model"] == (6 * 2 + (5 if who == "all" else 2)) * MODEL_BYTES
    assert sent["all"] / 5 == sent["sampled"] / 2


def test_nothing_is_extracted_after_the_last_task() -> None:
    for tasks in (1, 2):
        fot, data = FOT(), tiny_data(permuted(tasks))
        federation = fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
        assert {row["task"] for row in fot.report().rows} == set(range(tasks - 1))
        assert len(fot.gpse_seconds) == tasks - 1
        assert ("fot sketch" in federation.channel.uplink_bytes) == (tasks > 1)
        assert bool(fot.bases) == (tasks > 1)


# What is reported


def test_the_rows_and_the_summary_say_what_the_bases_hold() -> None:
    data = tiny_data(permuted(3))
    fot = FOT(threshold=0.9, threshold_increment=0.05, sketch_size=2)
    watch = Watch(fot)
    fit(tiny_client(data, mlp, sgd, {"fot": fot}), data, None, [watch])
    rows = fot.report().rows
    assert [(row["task"], row["layer"]) for row in rows] == [(t, layer) for t in (0, 1) for layer in DIMS]
    for row in rows:
        size = watch.bases[3 * row["task"] + 3][row["layer"]].shape[1]
        before = watch.bases[3][row["layer"]].shape[1] if row["task"] else 0
        d = DIMS[row["layer"]]
        assert (row["input_dim"], row["basis_size"], row["added"]) == (d, size, size - before)
        assert row["used_space"] == pytest.approx(100 * size / d)
        assert row["threshold"] == pytest.approx(0.9 + 0.05 * row["task"])
        assert (row["sketch_bytes"], row["basis_bytes"]) == (4 * d * 2 * d, 4 * d * size)
        assert 0 < row["residual_share"] <= 1
        assert row["residual_share"] == pytest.approx(1, abs=1e-12) if row["task"] == 0 else row["residual_share"] < 1
        assert row["gpse_seconds"] == fot.gpse_seconds[row["task"]] > 0
    summary = fot.report().figures
    assert json.loads(json.dumps(summary)) == summary
    used = [row["used_space"] for row in rows[-2:]]
    assert used[0] != used[1]
    assert summary["used_space"] == pytest.approx(np.mean(used))
    assert summary["gpse_seconds"] == pytest.approx(sum(fot.gpse_seconds))
    assert summary["model_bytes"] == MODEL_BYTES
    assert summary["sketch_bytes"] == 4 * 2 * (16 * 16 + 8 * 8)  # one client's, one extraction
    assert summary["basis_bytes"] == sum(row["basis_bytes"] for row in rows[-2:])


def test_before_any_extraction_nothing_is_used() -> None:
    fot, data = FOT(), tiny_data(permuted(1))
    fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
    figures = {"used_space": 0, "gpse_seconds": 0, "model_bytes": MODEL_BYTES, "sketch_bytes": 0, "basis_bytes": 0}
    assert fot.report().figures == figures
    assert fot.report().rows == []


def test_a_share_of_ones_own_is_not_that_of_the_pool() -> None:
    """One of two clients has inputs inside the basis, so the mean of ratios differs from the ratio of sums."""
    shares = {}
    for rule in ("energy", "client_mean"):
        data = tiny_data(split(3, classes=6, train=96), num_clients=2, partition=Shards(1))
        fot = FOT(threshold=0.6, residual_share=rule)  # type: ignore[arg-type]
        fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
        shares[rule] = fot.report().rows[-1]["residual_share"]
    assert abs(shares["energy"] - shares["client_mean"]) > 1e-4
    assert 0 < shares["client_mean"] < 1


# The Gaussian mechanism


class Overheard:
    """Records all messages that clients send on one topic, client by client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
        self.messages: list[tuple[int, dict[str, Tensor]]] = []
        uplink = Channel.uplink

        def listen(
            channel: Channel, name: str, payload: Mapping[str, Tensor], weights: Sequence[float], clients: Sequence[int]
        ) -> list[bool]:
            if name == topic:
                for row, client in enumerate(clients):
                    self.messages.append((client, {n: v[row].clone() for n, v in payload.items()}))
            return uplink(channel, name, payload, weights, clients)

        monkeypatch.setattr(Channel, "uplink", listen)


@pytest.fixture
def overheard(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    return Overheard(monkeypatch, "fot sketch")


@pytest.mark.parametrize("gpse_clients", ["sampled", "all"])
def test_the_noise_has_the_variance_asked_for_and_is_everyones_own(overheard: Overheard, gpse_clients: Any) -> None:
    """The difference of message and clipped sketch is Gaussian, with sigma for the number of clients in the sum."""
    data = tiny_data(num_clients=6, schedule={"clients_per_round": 3})
    mechanism = GaussianMechanism(epsilon=0.5, delta=1e-3, clip=2.0, sigma_rule="paper")
    for chosen in (None, mechanism):
        # Learning rate 0, so that noise does not change the model and with it the sketches of the second run.
        fot = FOT(mechanism=chosen, gpse_clients=gpse_clients)
        fit(tiny_client(data, mlp, partial(torch.optim.SGD, lr=0.0), {"fot": fot}), data)
    half = len(overheard.messages) // 2
    senders = {"sampled": 3, "all": 6}[gpse_clients]
    assert half == senders
    sigma = math.sqrt(math.log(1.25 / 1e-3) * 2.0**2 / (0.5**2 * senders))
    noises = []
    for (client, plain), (other, private) in zip(overheard.messages[:half], overheard.messages[half:], strict=True):
        assert client == other
        for layer in DIMS:
            a = plain[layer]
            assert float(a.norm()) > 2.0  # so that clipping matters
            noise = private[layer] - a / a.norm() * 2.0
            assert float(noise.mean()) == pytest.approx(0, abs=5 * sigma / math.sqrt(noise.numel()))
            assert float(noise.std()) == pytest.approx(sigma, rel=5 / math.sqrt(2 * noise.numel()))
            noises.append(noise.flatten()[:320] / sigma)
            assert torch.equal(plain[f"{layer} energies"], private[f"{layer} energies"])
    correlation = torch.corrcoef(torch.stack(noises)) - torch.eye(len(noises))
    assert correlation.abs().max() < 5 / math.sqrt(320)


@pytest.mark.parametrize(("epsilon", "clip"), [(1e9, 3.0), (30.0, 40.0)], ids=["clipping alone", "with noise"])
def test_bases_come_from_clipped_and_noisy_sketches(epsilon: float, clip: float, overheard: Overheard) -> None:
    """The server removes noise inside the old basis. Three tasks are needed to have an old basis."""
    data = tiny_data(permuted(3), schedule={"rounds_per_task": 2})
    fot = FOT(threshold=0.7, mechanism=GaussianMechanism(epsilon, 1e-3, clip))
    watch = Watch(fot)
    fit(tiny_client(data, double(mlp), sgd, {"fot": fot}), data, None, [watch])
    bases = {name: np.zeros((d, 0)) for name, d in DIMS.items()}
    draws: list[np.ndarray] = []
    for task in (0, 1):
        network = plain_network(data, double(mlp), watch.models[2 * task + 2]).eval()

        def privatise(a: np.ndarray, client: int, number: int, task: int = task) -> np.ndarray:
            """The client's message, after checking that it is the clipped sketch with noise."""
            clipped = a * min(1.0, clip / np.linalg.norm(a))
            sender, message = overheard.messages[4 * task + client]
            sent = message[list(DIMS)[number]].double().numpy()
            assert sender == client
            assert abs(sent - clipped).max() < 6 * fot.mechanism.sigma(4) + 1e-6 * clip
            of_sketch = torch.randn(a.shape, generator=torch_generator(data.seed, "sketch", task, client, number))
            draws.extend([(sent - clipped).ravel()[:320], of_sketch.numpy().ravel()[:320]])
            return sent

        expected = extract(
            dict.fromkeys(range(4), network), data, task, bases, 0.7, multiples={"linear": 5}, privatise=privatise
        )
        for name, grown in expected.items():
            found = watch.bases[2 * task + 2][name]
            np.testing.assert_allclose(projector(found), projector(grown.basis), rtol=0, atol=2e-4)
        bases = {name: grown.basis for name, grown in expected.items()}
    if epsilon < 100:  # otherwise rounding hides the noise, which no two clients, layers or tasks share, nor a sketch
        assert abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 5 / math.sqrt(320)


# Settings that cannot work


def refuse(key: str, make: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key
    for word in words:
        assert word in str(caught.value)


def test_clients_that_have_not_trained_have_no_local_model_to_sketch() -> None:
    refuse("methods.fot.gpse_clients", lambda: FOT(gpse_model="local", gpse_clients="all"), "sampled")


def start(methods: dict[str, Method], make: NetworkFactory = mlp, **data: Any) -> Callable[[], Any]:
    def run() -> None:
        federated = tiny_data(schedule={"rounds_per_task": 1}, **data)
        fit(tiny_client(federated, make, sgd, methods), federated)

    return run


class Grouped(StridedNet):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv2 = nn.Conv2d(3, 6, 3, stride=(1, 2), padding=1, groups=3)
        self.fc = nn.Linear(12, 6)


def test_layers_that_cannot_be_protected_are_refused_before_training() -> None:
    refuse("methods.fot.layers", start({"fot": FOT(layers=["layers.0", "conv*"])}), "conv*", "layers.0", "head")
    refuse("methods.fot.layers", start({"fot": FOT()}, Grouped), "groups")
    start({"fot": FOT(layers=["conv1", "fc"])}, Grouped)()  # a grouped convolution that is not protected is allowed


@pytest.mark.parametrize(
    ("kept", "options", "works"),
    [
        (["layers.0.*"], {}, False),
        (["layers.0.weight"], {}, False),
        (["layers.0.bias"], {"protect_bias": True}, False),
        (["layers.0.bias"], {}, True),
        (["layers.0.*"], {"layers": ["layers.1", "head"]}, True),
    ],
)
def test_a_layer_that_stays_with_its_client_cannot_be_protected(kept: list[str], options: Any, works: bool) -> None:
    """The server can only project what it averages. With ``protect_bias`` this includes the bias."""
    make = partial(MLP, hidden=[8, 6], dropout=0.0)
    for order in (1, -1):
        methods: list[tuple[str, Method]] = [("own", PersonalLayers(kept)), ("fot", FOT(**options))]
        run = start(dict(methods[::order]), make)
        if works:
            run()
        else:
            refuse("methods.fot.layers", run, "layers.0")


class Adds(Method):
    """Adds a constant to the server's step."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value + 0.01 for name, value in step.items()}


@pytest.mark.parametrize("order", [["adds", "fot"], ["fot", "adds"]])
def test_a_change_of_the_step_behind_the_projection_is_warned_of(order: list[str]) -> None:
    """In front of it, the step still has no part inside the basis."""
    made: dict[str, Method] = {"adds": Adds(), "fot": (fot := FOT(message="covariance", layers=["layers.0"]))}
    data, rounds = tiny_data(permuted(2), schedule={"rounds_per_task": 1}), Rounds()
    client = tiny_client(data, double(mlp), sgd, {name: made[name] for name in order})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(client, data, callbacks=[rounds])
    told = [str(one.message) for one in caught if "methods.adds" in str(one.message)]
    assert len(told) == (order[0] == "fot")
    assert all("put adds before fot" in message for message in told)
    step = rounds.models[1]["layers.0.weight"] - rounds.models[0]["layers.0.weight"]
    inside = float((step @ fot.bases["layers.0"].to(step)).abs().max())
    assert (inside < 1e-6) == (order[0] == "adds")
    assert float(step.abs().max()) > 1e-3
