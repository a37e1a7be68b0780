"""The channel's sums of integers: modelled sums are the protocol's, and both are within their stated error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cfl.federation.channel import Channel
from cfl.randomness.generators import torch_generator
from cfl.runtime import distributed
from cfl.runtime.errors import BadUpdate, ConfigError, SumRefused
from cfl.secure_sums.integer_sums import IntegerSums
from cfl.secure_sums.settings import SumSettings

CLIENTS = [0, 1, 2, 3, 4, 5]
WEIGHTS = [1.0, 17.0, 3.0, 60.0, 8.0, 64.0]
SHAPES = {"weight": (3, 4), "bias": (5,), "temperature": ()}
both = pytest.mark.parametrize("secure", [False, True], ids=["modelled", "secure"])


def messages(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch_generator(0, "messages")
    found = {n: (torch.rand(6, *s, generator=generator) * 4 - 2).to(dtype) for n, s in SHAPES.items()}
    return {**found, "batches": torch.arange(6) * 100}


def channel(secure: bool = False, gone: tuple[int, ...] = (), **settings: Any) -> Channel:
    sums = IntegerSums(SumSettings(secure, 0, greatest_weight=lambda topic: 64.0, **settings))
    made = Channel("skip", integers=sums, dropped_before_message=lambda round: gone)
    made.ask(CLIENTS)
    return made


def sent(made: Channel, groups: list[list[int]], payload: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    for group in groups:
        rows = {name: values[group] for name, values in payload.items()}
        made.uplink("update", rows, [WEIGHTS[c] for c in group], group)
    return made.sum("update")


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weighted_sum_is_within_its_stated_error(dtype: torch.dtype, secure: bool) -> None:
    """The error is below a step for each message, and the sum of weights is exact. Integers have a step of 64 here."""
    made, payload = channel(secure), messages(dtype)
    sums, weight = sent(made, [CLIENTS], payload)
    assert weight == sum(WEIGHTS)
    step = 64 * 16 / 2**23
    assert made.integers is not None
    assert made.integers.figures.summary()["topics"]["update"]["step"] == step
    for name, values in payload.items():
        exact = np.tensordot(np.array(WEIGHTS), values.double().numpy(), 1)
        assert sums[name].shape == values.shape[1:]
        if name == "batches":  # a step of 64, the greatest weight
            assert sums[name].dtype == torch.float64
            assert abs(float(sums[name]) - exact) < 6 * 64
            continue
        assert sums[name].dtype == dtype
        rounding = 2.0**-20 if dtype == torch.float32 else 0.0
        assert np.abs(sums[name].double().numpy() - exact).max() < 6 * step + np.abs(exact).max() * rounding


@both
@pytest.mark.parametrize("groups", [[[3], [0, 4], [5, 2, 1]], [[5], [4], [3], [2], [1], [0]]], ids=str)
def test_groups_and_the_protocol_change_no_bit(groups: list[list[int]], secure: bool) -> None:
    expected, _ = sent(channel(), [CLIENTS], messages())
    found, _ = sent(channel(secure), groups, messages())
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@both
def test_tensors_go_by_name_whatever_their_order(secure: bool) -> None:
    expected, _ = sent(channel(), [CLIENTS], messages())
    found, _ = sent(channel(secure), [[3], CLIENTS[:3], CLIENTS[4:]], dict(reversed(messages().items())))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def of_two_processes(
    payloads: Sequence[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], float]:
    """The sum of the messages of clients 0 to 2 in one process and 3 to 5 in another, as the first one reads it."""
    here, there = (IntegerSums(SumSettings(False, 0, greatest_weight=lambda topic: 64.0)) for _ in range(2))
    for sums, group, payload in zip((here, there), (CLIENTS[:3], CLIENTS[3:]), payloads, strict=True):
        rows = {name: values[group] for name, values in payload.items()}
        sums.add("update", (0, 0), CLIENTS, (), rows, [WEIGHTS[c] for c in group], group)
    other = there._running["update"]
    described = other.round, other.asked, other.gone, other.layout, other.came
    monkeypatch.setattr(distributed, "gather", lambda own: [own, described])
    monkeypatch.setattr(distributed, "add_up", lambda own: {"integers": own["integers"] + other.total})
    sums, weight, _, _ = here.read("update", (0, 0))
    return sums, weight


def test_tensors_of_processes_go_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = sent(channel(), [CLIENTS], messages())
    found, weight = of_two_processes([messages(), dict(reversed(messages().items()))], monkeypatch)
    assert weight == sum(WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_other_tensors_in_another_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the same length, which could be added."""
    others = {("more" if name == "bias" else name): values for name, values in messages().items()}
    with pytest.raises(ValueError, match=r"topic 'update': .*'bias'.* in one process, .*'more'.* in another"):
        of_two_processes([messages(), others], monkeypatch)


@both
def test_who_drops_out_is_not_in_the_sum(secure: bool) -> None:
    payload = messages()
    alone = channel(secure)
    alone.ask([0, 1, 3, 5])
    expected, weight = sent(alone, [[0, 1, 3, 5]], payload)
    payload["weight"][2] = torch.nan  # of a client that drops out
    made = channel(secure, (2, 4))
    found = sent(made, [CLIENTS], payload)
    assert found[1] == weight == 1 + 17 + 60 + 64
    assert all(torch.equal(found[0][name], values) for name, values in expected.items())
    assert not made.skipped


def test_who_drops_out_of_plain_sums_is_not_in_them_either() -> None:
    payload, made = messages(), Channel(dropped_before_message=lambda round: (2, 4) if round == 1 else ())
    payload["weight"][2] = torch.nan
    made.enter_round(0, 1)
    made.uplink("update", payload, WEIGHTS, CLIENTS)
    four = 4 * sum(values[0].numel() * values.element_size() for values in payload.values())
    assert made.uplink_bytes["update"] == four
    sums, weight = made.sum("update")
    assert weight == 1 + 17 + 60 + 64
    chosen = [0, 1, 3, 5]
    by_hand = sum(WEIGHTS[c] * payload["weight"][c].double() for c in chosen)
    assert (sums["weight"].double() - by_hand).abs().max() < 1e-4
    made.enter_round(0, 2)
    with pytest.raises(BadUpdate, match="client 2"):
        made.uplink("update", payload, WEIGHTS, CLIENTS)


@both
def test_messages_with_nan_are_left_out(secure: bool) -> None:
    payload, made = messages(), channel(secure)
    payload["bias"][3, 1] = torch.inf
    _, weight = sent(made, [CLIENTS[:3], CLIENTS[3:]], payload)
    assert weight == sum(WEIGHTS) - 60
    assert [client for _, _, client in made.skipped] == [3]


@both
def test_numbers_beyond_the_range_are_refused_by_name(secure: bool) -> None:
    payload, made = messages(), channel(secure)
    payload["bias"][5, 1] = -20.5
    made.enter_round(2, 7)
    with pytest.raises(
        ConfigError,
        match=r"federated.codecs.update.range = 16.0 .*at least 32: in round 7 \(task 2\) client 5 has 20.5 in bias",
    ):
        sent(made, [CLIENTS], payload)


def test_integers_beyond_the_range_are_refused_by_name() -> None:
    made = channel(codecs={"update": {"bits": 8, "weight": 64.0}})
    payload = {"count": torch.tensor([[3], [200], [0], [1], [1], [1]])}
    made.ask([0, 1])
    with pytest.raises(ConfigError, match=r"update.bits = 8 .*at least 9: .*client 1 has 200 in count"):
        made.uplink("update", {"count": payload["count"][:2]}, [64.0, 64.0], [0, 1])


@pytest.mark.parametrize("weight", [65.0, 0.5])
def test_weights_that_cannot_be_masked_are_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"federated.codecs.update.weight = 64.0 .*whole numbers"):
        channel().uplink("update", {"x": torch.ones(1, 2)}, [weight], [0])


def test_strangers_and_second_messages_are_errors() -> None:
    made = channel()
    made.uplink("update", {"x": torch.ones(1, 2)}, [1.0], [0])
    for client in (0, 6):
        with pytest.raises(RuntimeError, match=f"client {client} was not asked"):
            made.uplink("update", {"x": torch.ones(1, 2)}, [1.0], [client])


@both
def test_too_few_messages_are_refused_and_no_message_is_none(secure: bool) -> None:
    made = channel(secure, (0, 1, 2))
    with pytest.raises(SumRefused, match=r"no sum of 'update': 3 of the 6 clients that hold shares"):
        sent(made, [CLIENTS], messages())
    with pytest.raises(BadUpdate, match="no usable message"):
        channel(secure).sum("update")


@both
def test_bytes_are_those_of_all_messages(secure: bool) -> None:
    """Bytes are those computed by hand for 6 clients, all neighbours, and 20 numbers of 4 bytes with the weight."""
    made = channel(secure)
    sent(made, [CLIENTS], messages())
    frame, near, numbers = 16 + 1 + 4 + 64, 5, 12 + 5 + 1 + 1 + 1
    keys = frame + 64
    shares = frame + near * (4 + 80)
    masked = frame + 4 * numbers
    check = frame + near * (4 + 32)
    unmasking = frame + (near + 1) * (4 + 1 + 32)
    assert made.uplink_bytes == {"update": 6 * (keys + shares + masked + check + unmasking)}
    received = near * (4 + 64) + near * (4 + 80) + 6 * 4 + near * (4 + 32) + (near + 1) * 5
    assert made.downlink_bytes == {"update": 6 * received}


def test_figures_come_back_from_a_checkpoint() -> None:
    made = channel()
    sent(made, [CLIENTS], messages())
    other = channel()
    other.load_state_dict(made.state_dict())
    assert other.integers is not None
    assert made.integers is not None
    assert other.integers.summary() == made.integers.summary()
    figures = made.integers.summary()["topics"]["update"]
    assert (figures["sums"], figures["messages"], figures["modulus"]) == (1, 6, 32)


def test_figures_are_the_errors_and_the_greatest_number_of_all_messages() -> None:
    """A number x w that lies a share p of its tensor's step above a multiple of it has the mean square error p (1 - p)
    of squared steps. Tensors of integers have a step of 64 here, the greatest weight."""
    made, payload = channel(), messages()
    sent(made, [[0, 1], [2, 3, 4, 5]], payload)
    squares, greatest, count = 0.0, 0.0, 0
    for name, values in payload.items():
        step = 64.0 if name == "batches" else 64 * 16 / 2**23
        for row, weight in zip(values.double().view(6, -1).tolist(), WEIGHTS, strict=True):
            for x in row:
                share = x * weight / step % 1
                squares += share * (1 - share) * step**2
                greatest, count = max(greatest, abs(x * weight / step)), count + 1
    assert made.integers is not None
    figures = made.integers.summary()["topics"]["update"]
    assert figures["rounding_error"] == pytest.approx((squares / count) ** 0.5, rel=5e-3)
    assert figures["rounding_error"] > 1  # of the counts
    assert figures["largest_share_of_range"] == pytest.approx(greatest / (2**23 - 1), rel=5e-3)
