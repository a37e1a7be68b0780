"""Whole runs with secure sums: modelled sums give the protocol's bits, plain sums nearly so, refusals come early."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import tiny_cli
from support.tiny import Rounds, SaveAfter, fit, mlp, tiny_client, tiny_data

from cfl.callbacks.sum_options import SumOptions
from cfl.federation.federation import Federation
from cfl.methods import CONFEDMADE, FOT, SCAFFOLD, FedAGEM, FedCurv, FedWeIT, Method
from cfl.runtime.errors import ConfigError, SumRefused
from cfl.secure_sums.dropouts import STAGES, UNTIL_MESSAGE
from cfl.testing.method_case import MethodCase
from cfl.testing.method_numbers import width_does_not_matter
from cfl.testing.processes import processes_do_not_matter

METHODS: dict[str, Callable[[], dict[str, Method]]] = {
    "FedAvg": dict,
    "FOT": lambda: {"fot": FOT(threshold=0.9)},
    "Fed-A-GEM": lambda: {"fed_agem": FedAGEM(samples=8, when="always")},
    "FedCurv": lambda: {"fedcurv": FedCurv(strength=1.0)},
    "SCAFFOLD": lambda: {"scaffold": SCAFFOLD()},
}


def ran(
    method: str, aggregation: str, share: float = 0.0, stage: str = "message", **federated: Any
) -> tuple[list[bytes], Federation]:
    """Run twelve clients, ten in a round. Returns the bits of the model after each round, and the federation."""
    schedule = {
        "rounds_per_task": 2,
        "clients_per_round": 10,
        "client_dropout": share,
        "dropout_stage": stage if share else "message",
    }
    data, watch = tiny_data(num_clients=12, schedule=schedule), Rounds()
    options = {"aggregation": aggregation, "client_weighting": "samples", **federated}
    federation = fit(tiny_client(data, methods=METHODS[method]()), data, options, callbacks=[watch])
    return [b"".join(t.numpy().tobytes() for t in model.values()) for model in watch.models], federation


def unlike(method: str, share: float, stage: str) -> None:
    modelled, secure = ran(method, "modelled", share, stage), ran(method, "secure", share, stage)
    assert modelled[0] == secure[0]
    for direction in ("uplink_bytes", "downlink_bytes"):
        assert getattr(modelled[1].channel, direction) == getattr(secure[1].channel, direction)


@pytest.mark.parametrize("method", METHODS)
def test_modelled_sums_are_the_protocols_to_the_bit(method: str) -> None:
    unlike(method, 0.0, "message")


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", METHODS)
def test_modelled_sums_are_the_protocols_under_dropouts(method: str, stage: str, share: float) -> None:
    unlike(method, share, stage)


@pytest.mark.parametrize("stage", UNTIL_MESSAGE)
def test_the_stage_before_the_message_does_not_matter(stage: str) -> None:
    assert ran("SCAFFOLD", "modelled", 0.3, stage)[0] == ran("SCAFFOLD", "modelled", 0.3)[0]


def test_who_drops_out_after_the_message_is_in_the_sum() -> None:
    assert ran("FedAvg", "modelled", 0.3, "unmasking")[0] == ran("FedAvg", "modelled")[0]
    assert ran("FedAvg", "modelled", 0.3)[0] != ran("FedAvg", "modelled")[0]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_model_is_within_the_stated_error_of_the_plain_one(share: float) -> None:
    """After the first round, the model's error is less than a step, plus rounding in float32."""
    data = tiny_data(num_clients=12, schedule={"clients_per_round": 10, "client_dropout": share})
    models = {}
    for aggregation in ("plain", "modelled"):
        data = tiny_data(num_clients=12, schedule={"clients_per_round": 10, "client_dropout": share})
        watch = Rounds()
        federation = fit(tiny_client(data), data, {"aggregation": aggregation}, callbacks=[watch])
        models[aggregation] = watch.models[0]
    assert federation.channel.integers is not None
    step = federation.channel.integers.summary()["topics"]["update"]["step"]
    assert step == 16 / 2**23
    for name, plain in models["plain"].items():
        assert (models["modelled"][name] - plain).abs().max() < step + 1e-6


def test_neighbours_change_bytes_alone() -> None:
    everyone, (models, federation) = ran("FOT", "secure", 0.1), ran("FOT", "secure", 0.1, neighbours=4)
    assert everyone[0] == models
    assert federation.channel.total_uplink_bytes < everyone[1].channel.total_uplink_bytes


# Width, processes and resuming.

WITH_SUMS = {
    "data": {"schedule": {"client_dropout": 0.3, "clients_per_round": 5}, "num_clients": 6},
    "federated": {"aggregation": "modelled", "client_weighting": "samples"},
    "network": mlp,
}


@pytest.mark.parametrize("make", [partial(FOT, threshold=0.9), SCAFFOLD], ids=["fot", "scaffold"])
def test_width_does_not_matter(make: Callable[[], Method]) -> None:
    width_does_not_matter(MethodCase(make, **WITH_SUMS))


@pytest.mark.parametrize("make", [partial(FOT, threshold=0.9), SCAFFOLD], ids=["fot", "scaffold"])
def test_processes_do_not_matter(make: Callable[[], Method]) -> None:
    processes_do_not_matter(MethodCase(make, **WITH_SUMS))


@pytest.mark.parametrize("aggregation", ["modelled", "secure"])
def test_resumed_equals_uninterrupted(aggregation: str, tmp_path: Path) -> None:
    def start(callbacks: list[Any], ckpt_path: Path | None = None) -> Federation:
        data = tiny_data(num_clients=8, schedule={"client_dropout": 0.3})
        client = tiny_client(data, methods=METHODS["SCAFFOLD"]())
        return fit(client, data, {"aggregation": aggregation}, callbacks, ckpt_path)

    whole = start([SaveAfter(2, tmp_path / "3.ckpt")])
    resumed = start([], tmp_path / "3.ckpt")
    for name, tensor in whole.model.state_tensors().items():
        assert torch.equal(tensor, resumed.model.state_tensors()[name])
    assert resumed.channel.uplink_bytes == whole.channel.uplink_bytes
    assert whole.channel.integers is not None
    assert resumed.channel.integers is not None
    assert resumed.channel.integers.summary()["topics"] == whole.channel.integers.summary()["topics"]


def test_who_dropped_out_keeps_what_it_had() -> None:
    """A client that drops out keeps its state.

    Clients that dropped out of both rounds have no variate of SCAFFOLD. The server's variate is the sum of the clients'
    variates over the number of all clients.
    """
    data = tiny_data(num_clients=10, schedule={"client_dropout": 0.3, "rounds_per_task": 1})
    federation = fit(tiny_client(data, methods=METHODS["SCAFFOLD"]()), data)
    first, second = (federation.schedule.dropouts(round) for round in (0, 1))
    assert len(first) == len(second) == 3
    assert set(federation.clients.holders("scaffold")) == set(range(10)) - (first & second)
    scaffold = federation.methods["scaffold"]
    kept = [federation.clients.get("scaffold", client) for client in federation.clients.holders("scaffold")]
    for name, variate in scaffold.variate.items():
        total = sum(own[name].double() for own in kept if own is not None)
        assert (variate.double() - total / 10).abs().max() < 1e-6


# Refusals, before training.


def refused(message: str, aggregation: str, methods: Any = dict, schedule: Any = None, **federated: Any) -> None:
    data = tiny_data(num_clients=6, schedule={"clients_per_round": 5, **(schedule or {})})
    with pytest.raises(ConfigError, match=message):
        fit(tiny_client(data, methods=methods()), data, {"aggregation": aggregation, **federated})


def test_runs_whose_sums_could_not_be_formed_are_refused() -> None:
    many = {"client_dropout": 0.6}
    refused(r"schedule.client_dropout = 0.6 .*round 0 .*2 of the 5 .* 3 are needed", "modelled", schedule=many)
    refused(r"schedule.client_dropout = 0.6 .*round 0", "secure", schedule={**many, "dropout_stage": "unmasking"})
    refused(r"clients_per_round = 1 .*1 of 1 messages came", "modelled", schedule={"clients_per_round": 1})
    poisson = {"sampling": "poisson", "clients_per_round": 0.2}
    refused(r"clients_per_round = 0.2 .*1 of 1 messages came", "modelled", schedule=poisson)
    late = {"client_dropout": 0.2, "dropout_stage": "check"}
    refused(r"schedule.dropout_stage = 'check' .*keys, shares, message", "plain", schedule=late)


def test_sums_of_a_method_without_a_mean_model_are_checked() -> None:
    """FedWeIT averages no tensor of the model, but forms sums of bases."""
    data = tiny_data(num_clients=6, schedule={"clients_per_round": 5, "client_dropout": 0.6})
    client = tiny_client(data, mlp, methods={"fedweit": FedWeIT(send_adaptive=False)})
    with pytest.raises(ConfigError, match=r"schedule.client_dropout = 0.6 .*round 0 .*2 of the 5 .* 3 are needed"):
        fit(client, data, {"aggregation": "modelled"})


def test_an_extra_sum_that_cannot_be_formed_is_refused_when_it_is_read() -> None:
    """FOT's sum over all 14 clients after a task is refused: nine are left, but ten are needed.

    In rounds, six of nine clients are left, which is enough.
    """
    schedule = {"clients_per_round": 9, "client_dropout": 0.33, "rounds_per_task": 1}
    data = tiny_data(num_clients=14, schedule=schedule)
    client = tiny_client(data, methods={"fot": FOT(threshold=0.9, gpse_clients="all")})
    options = {"aggregation": "modelled", "share_threshold": 0.66}
    with pytest.raises(SumRefused, match=r"round 0 \(task 0\): no sum of 'fot sketch': 9 of the 14 .* 10 are needed"):
        fit(client, data, options)


def test_options_of_secure_sums_are_checked() -> None:
    for options, message in (
        ({"neighbours": 3}, "federated.neighbours = 3 .*an even number"),
        ({"neighbours": 0}, "federated.neighbours = 0 .*at least 2"),
        ({"share_threshold": 1.0}, "federated.share_threshold = 1.0"),
        ({"share_threshold": 0.4}, r"federated.share_threshold = 0.4 .*\[0.5, 1\)"),
        ({"codecs": {"update": {"range": 3}}}, "federated.codecs.update.range = 3"),
    ):
        refused(message, "modelled", **options)
    for options, message in (
        ({"neighbours": 2}, "federated.neighbours = 2 .*null with federated.aggregation = plain"),
        ({"share_threshold": 0.6}, "federated.share_threshold = 0.6 .*0.5 with federated.aggregation = plain"),
        ({"codecs": {"update": {"bits": 8}}}, "federated.codecs = .*null with federated.aggregation = plain"),
    ):
        refused(message, "plain", **options)
    refused("federated.aggregation = 'masked' .*plain, modelled or secure", "masked")


def test_the_library_is_named_where_it_is_missing() -> None:
    with mock.patch("cfl.callbacks.sum_options.is_installed", return_value=False):
        refused(r"federated.aggregation = 'secure' .*pip install 'continual-fl\[secure\]'", "secure")


class Curious(Method):
    """A method that reads individual messages."""

    individual_uplinks = True


@pytest.mark.parametrize("aggregation", ["modelled", "secure"])
def test_methods_that_need_single_messages_are_refused_by_name(aggregation: str) -> None:
    refused(
        f"federated.aggregation = '{aggregation}' .*plain with methods.curious",
        aggregation,
        lambda: {"curious": Curious()},
    )


def test_several_processes_have_modelled_sums() -> None:
    _, federation = ran("FedAvg", "secure")
    with pytest.raises(ConfigError, match=r"federated.aggregation = 'secure' .*modelled with 2 processes"):
        SumOptions("secure", None, 0.5, None).check(federation, processes=2)


# The command line.


def test_options_and_figures_of_the_command_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ("--schedule.clients_per_round", "4", "--schedule.client_dropout", "0.25")
    codecs = "{update: {range: 8, bits: 20, modulus: 64}, updates: {bits: 8}}"
    sums = ("--federated.aggregation", "secure", "--federated.codecs", codecs)
    assert tiny_cli.fit(tmp_path / "run", *options, *sums, "--federated.neighbours", "2") == 0
    assert "federated.codecs had no effect on updates: the messages were update" in caplog.messages
    summary = tiny_cli.summary(tmp_path / "run")
    found = summary["integer_sums"]
    assert (found["aggregation"], found["neighbours"], found["share_threshold"]) == ("secure", 2, 0.5)
    update = found["topics"]["update"]
    assert (update["range"], update["bits"], update["modulus"], update["step"]) == (8, 20, 64, 8 / 2**19)
    assert (update["sums"], update["messages"]) == (6, 18)
    assert summary["server_sees"] == "sums only"
    assert found["seconds"] > 0


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_share_of_a_base_is_not_read_from_bytes_of_fewer_messages(share: float) -> None:
    case = MethodCase(partial(CONFEDMADE, cut_off=0.4))
    methods = case.methods("tried")
    case.start(case.data_of(schedule={"clients_per_round": 4, "client_dropout": share}), methods)
    (method,) = methods.values()
    assert (method.report().figures["base_share"] is None) == (share > 0)
