"""The channel: exact sums and bytes, no NaN in sums, and only sums for the server to read."""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cfl.federation.channel import Channel, payload_bytes
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import BadUpdate
from cfl.secure_sums.integer_sums import IntegerSums, SumSettings

SHAPES = {"weight": (3, 4), "kernel": (2, 2, 3, 3), "bias": (5,), "temperature": ()}


def messages(clients: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random messages, ``[clients, ...]`` for each name. Those of the scalar have the shape ``[clients]``."""
    generator = torch_generator(seed, "messages")
    return {n: torch.randn(clients, *s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def rows(payload: dict[str, Tensor], chosen: list[int]) -> dict[str, Tensor]:
    return {name: values[chosen] for name, values in payload.items()}


def assert_mean(found: dict[str, Tensor], payload: dict[str, Tensor], weights: list[float], digits: float) -> None:
    """Assert that ``found`` is the weighted mean, by a loop over clients in float64."""
    assert set(found) == set(payload)
    for name, values in payload.items():
        expected = torch.zeros(values.shape[1:], dtype=torch.float64)
        for weight, value in zip(weights, values, strict=True):
            expected += weight * value.double()
        expected /= math.fsum(weights)
        torch.testing.assert_close(found[name].double(), expected, rtol=digits, atol=digits)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["f32", "f64"])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4]], [[3], [0, 4], [2, 1]], [[4], [3], [2], [1], [0]]], ids=str)
def test_the_mean_is_weighted_and_independent_of_how_clients_are_grouped(
    groups: list[list[int]], dtype: torch.dtype, digits: float
) -> None:
    channel, payload, weights = Channel(), messages(5, dtype), [1.0, 17.0, 3.0, 250.0, 8.0]
    for group in groups:
        channel.uplink("update", rows(payload, group), [weights[c] for c in group], group)
    assert_mean(channel.mean("update"), payload, weights, digits)


def test_the_sum_comes_with_its_weight_and_empties_the_topic() -> None:
    channel, payload = Channel(), messages(2)
    channel.uplink("update", payload, [2.0, 3.0], [0, 1])
    channel.uplink("sketch", rows(payload, [1]), [1.0], [1])
    sums, weight = channel.sum("update")
    assert weight == 5.0
    for name, values in payload.items():
        torch.testing.assert_close(sums[name], 2 * values[0] + 3 * values[1])
    assert_mean(channel.mean("sketch"), rows(payload, [1]), [1.0], 1e-7)
    with pytest.raises(BadUpdate, match="'update'"):
        channel.sum("update")
    channel.uplink("update", rows(payload, [0]), [4.0], [0])
    assert_mean(channel.mean("update"), rows(payload, [0]), [4.0], 1e-7)


def test_counts_are_averaged_as_numbers() -> None:
    """Integers, such as BatchNorm's counter of batches, are averaged as real numbers, without truncation."""
    channel = Channel()
    channel.uplink("update", {"batches": torch.tensor([3, 4, 6])}, [1.0, 1.0, 2.5], [0, 1, 2])
    torch.testing.assert_close(channel.mean("update")["batches"].item(), (3 + 4 + 15) / 4.5, rtol=1e-12, atol=0)
    channel.uplink("update", {"batches": torch.tensor([2**40 + 1] * 3)}, [1.0] * 3, [0, 1, 2])
    assert channel.mean("update")["batches"].item() == 2**40 + 1, "more than float32 can count"


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_in_half_precision_are_rounded_once(dtype: torch.dtype, integers: bool) -> None:
    """Of 1000 messages, with weights and a sum that half precision cannot hold: as the mean in float64, rounded."""
    generator = torch.Generator().manual_seed(0)
    rows = (0.5 + torch.randn(1000, 50, generator=generator)).to(dtype)
    weights = [600.0 + client % 7 for client in range(1000)]
    made = [IntegerSums(SumSettings(False, 0, greatest_weight=lambda topic: 1024.0)) for _ in range(2)]
    channel, single = (Channel(integers=sums) for sums in (made if integers else (None, None)))
    for one in (channel, single):
        one.ask(range(1000))
    for client, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        channel.uplink("update", {"w": row[None], "count": torch.tensor([client])}, [weight], [client])
        single.uplink("update", {"w": row[None]}, [1.0], [client])
    found, (sums, _) = channel.mean("update"), single.sum("update")
    exact = torch.tensor(weights, dtype=torch.float64) @ rows.double() / sum(weights)
    assert found["w"].dtype == sums["w"].dtype == dtype
    half_a_step = torch.finfo(dtype).eps / 2
    step = 1024 * 16 / 2**23 if integers else 0.0
    torch.testing.assert_close(found["w"].double(), exact, rtol=1.01 * half_a_step, atol=1e-6 + 1e-3 * step)
    torch.testing.assert_close(sums["w"].double(), rows.double().sum(0), rtol=1.01 * half_a_step, atol=1e-4 + 80 * step)
    assert found["count"].dtype == torch.float64


def test_complex_messages_are_refused() -> None:
    """Their imaginary parts would be in no norm, no check for NaN and no sum of integers."""
    channel, payload = Channel(individual_allowed=True), {"w": torch.zeros(1, 2, dtype=torch.complex64)}
    with pytest.raises(TypeError, match=r"'mine': w is complex; send torch\.view_as_real"):
        channel.uplink("mine", payload, [1.0], [0])
    with pytest.raises(TypeError, match=r"'mine': w is complex"):
        channel.uplink_individually("mine", payload, [0])


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 2),
        (torch.bfloat16, 2),
        (torch.float32, 4),
        (torch.float64, 8),
        (torch.int64, 8),
        (torch.int8, 1),
        (torch.bool, 1),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype, size: int) -> None:
    channel = Channel()
    payload = {"a": torch.zeros(3, 7, dtype=dtype), "b": torch.zeros(3, 2, 5, dtype=dtype)}
    assert payload_bytes(payload) == 3 * 17 * size
    channel.uplink("update", payload, [1.0] * 3, [4, 5, 6])
    assert channel.uplink_bytes == {"update": 3 * 17 * size}
    channel.downlink("model", rows(payload, [0]), receivers=11)
    assert channel.downlink_bytes == {"model": 11 * 17 * size}


def test_a_message_may_be_sent_in_fewer_bytes_than_its_tensors_have() -> None:
    """``wire_bytes`` changes the bytes counted, not the sum, for example if only a few entries are sent."""
    channel, payload = Channel(individual_allowed=True), {"w": torch.eye(3, 10)}
    channel.uplink("sparse", payload, [1.0, 2.0, 4.0], [0, 1, 2], wire_bytes=8)
    channel.uplink("sparse", rows(payload, [1]), [1.0], [5], wire_bytes=9)
    channel.uplink("empty", payload, [1.0] * 3, [0, 1, 2], wire_bytes=0)
    channel.uplink_individually("single", payload, [0, 1, 2], wire_bytes=5)
    channel.downlink("union", {"w": torch.zeros(10)}, 4, wire_bytes=24)
    assert channel.uplink_bytes == {"sparse": 3 * 8 + 9, "empty": 0, "single": 15}
    assert channel.downlink_bytes == {"union": 96}
    assert channel.sum("sparse")[0]["w"].tolist() == [1.0, 3.0, 4.0] + [0.0] * 7


def test_bytes_add_up_per_topic_and_direction_and_survive_a_checkpoint() -> None:
    channel = Channel(individual_allowed=True)
    one = {"w": torch.zeros(1, 10)}
    for client in range(3):
        channel.uplink("update", one, [1.0], [client])
    channel.uplink("sketch", {"a": torch.zeros(2, 5, dtype=torch.float64)}, [1.0, 1.0], [0, 1])
    channel.uplink_individually("parameters", one, [2])
    channel.downlink("model", {"w": torch.zeros(10)}, 4)
    channel.downlink("model", {"w": torch.zeros(10)}, 1)
    channel.downlink("bases", {"w": torch.zeros(3)}, 2)
    assert channel.uplink_bytes == {"update": 120, "sketch": 80, "parameters": 40}
    assert channel.downlink_bytes == {"model": 200, "bases": 24}
    assert (channel.total_uplink_bytes, channel.total_downlink_bytes) == (240, 224)
    channel.sum("update")
    assert channel.total_uplink_bytes == 240, "reading costs nothing"

    restored = Channel()
    restored.load_state_dict(saved_and_loaded(channel.state_dict()))
    restored.uplink("update", one, [1.0], [0])
    assert restored.uplink_bytes == {"update": 160, "sketch": 80, "parameters": 40}
    assert channel.uplink_bytes["update"] == 120
    assert restored.downlink_bytes == channel.downlink_bytes


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("clients", [2, 4])
def test_as_many_rows_as_clients(clients: int) -> None:
    with pytest.raises(ValueError, match=rf"'update': .* has shape \[3.*\], not \[{clients}, \.\.\.\], a row for each"):
        Channel().uplink("update", messages(3), [1.0] * clients, list(range(clients)))
    with pytest.raises(ValueError, match=f"'update': {clients} weights for 3 clients"):
        Channel().uplink("update", messages(3), [1.0] * clients, [0, 1, 2])


def test_a_message_without_tensors_or_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="'mine': a message without tensors"):
        Channel().uplink("mine", {}, [1.0], [0])
    with pytest.raises(ValueError, match=r"'mine': count has shape \[\], not \[1, \.\.\.\], a row for each client"):
        Channel().uplink("mine", {"count": torch.tensor(3.0)}, [1.0], [0])


@pytest.mark.parametrize("send", ["uplink", "uplink_individually"])
def test_a_message_of_no_tensors_is_refused(send: str) -> None:
    weights = {"weights": [1.0]} if send == "uplink" else {}
    to_server: Any = partial(getattr(Channel(individual_allowed=True), send), "mine", clients=[0], **weights)
    with pytest.raises(
        TypeError, match=r"topic 'mine': loss is float, not a tensor \[1, \.\.\.\], a row for each client"
    ):
        to_server(payload={"loss": 0.5})
    with pytest.raises(TypeError, match=r"topic 'mine': Tensor, not a dict of tensors \[1, \.\.\.\] by name"):
        to_server(payload=torch.ones(1, 2))


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_bad_message_stops_the_run_and_names_client_round_and_task(name: str, bad: float) -> None:
    channel, payload = Channel("stop"), messages(3)
    channel.enter_round(task=2, round=7)
    payload[name].view(3, -1)[1, -1] = bad
    with pytest.raises(BadUpdate, match=r"client 42 .*round 7 \(task 2\)"):
        channel.uplink("update", payload, [1.0, 1.0, 1.0], [9, 42, 4])


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_skipping_leaves_a_bad_message_out_of_sum_and_weight(dtype: torch.dtype, bad: float) -> None:
    channel, payload, weights = Channel("skip"), messages(4, dtype), [1.0, 20.0, 3.0, 5.0]
    channel.enter_round(task=1, round=3)
    payload["kernel"][1, 0, 1, 2, 2] = bad
    payload["bias"][1] = bad
    channel.uplink("update", rows(payload, [0, 1]), weights[:2], [10, 11])
    channel.uplink("update", rows(payload, [2, 3]), weights[2:], [12, 13])
    good = [0, 2, 3]
    digits = 1e-2 if dtype == torch.float16 else 1e-6
    assert_mean(channel.mean("update"), rows(payload, good), [weights[c] for c in good], digits)
    assert channel.skipped == [(3, 1, 11)]
    assert channel.uplink_bytes["update"] == payload_bytes(payload), "it was sent all the same"
    restored = Channel("skip")
    restored.load_state_dict(saved_and_loaded(channel.state_dict()))
    assert restored.skipped == channel.skipped


@pytest.mark.parametrize("send", ["uplink", "uplink_individually", "usable"])
def test_a_bad_message_beside_the_model_leaves_nobody_out(send: str) -> None:
    """A message other than the update with NaN is recorded once under its topic, and its client's update still counts.

    Checkpoints without such records can be loaded.
    """
    channel, payload = Channel("skip", individual_allowed=True), messages(2)
    channel.enter_round(task=1, round=3)
    payload["bias"][1] = math.nan
    for _ in range(2):
        if send == "uplink":
            channel.uplink("gradient", payload, [1.0, 1.0], [4, 5])
        elif send == "uplink_individually":
            channel.uplink_individually("gradient", payload, [4, 5])
        else:
            assert channel.usable(payload, [4, 5], "gradient") == [True, False]
    assert channel.skipped == []
    assert channel.skipped_messages == [(3, "gradient", 5)]
    channel.synchronise()
    state = saved_and_loaded(channel.state_dict())
    restored = Channel("skip")
    restored.load_state_dict(state)
    assert restored.skipped_messages == channel.skipped_messages
    del state["skipped_messages"]
    restored.load_state_dict(state)
    assert restored.skipped_messages == []
    stopping = Channel(individual_allowed=True)
    stopping.enter_round(task=1, round=3)
    said = r"^client 5 has NaN or infinity in its 'gradient' in round 3; .* leaves that out, in this run, too$"
    with pytest.raises(BadUpdate, match=said):
        stopping.usable(payload, [4, 5], "gradient")


def test_when_every_message_is_bad_there_is_nothing_to_average() -> None:
    channel, payload = Channel("skip"), messages(2)
    channel.enter_round(task=1, round=3)
    payload["bias"][:] = math.nan
    channel.uplink("update", payload, [1.0, 1.0], [0, 5])
    with pytest.raises(BadUpdate, match=r"round 3 \(task 1\).*'update'"):
        channel.mean("update")
    assert channel.skipped == [(3, 1, 0), (3, 1, 5)]
    # The next sum does not contain the bad messages.
    channel.uplink("update", rows(messages(2), [0]), [2.0], [0])
    assert_mean(channel.mean("update"), rows(messages(2), [0]), [2.0], 1e-7)


def test_large_finite_values_are_not_taken_for_infinity() -> None:
    """Large finite values are accepted, although their plain sum, which the quick check uses, overflows."""
    channel = Channel("stop")
    payload = {"w": torch.full((1, 8), 3e38), "v": torch.tensor([[-3e38] * 8])}
    channel.uplink("update", payload, [1.0], [0])
    torch.testing.assert_close(channel.mean("update")["w"], payload["w"][0])
    wide = {"w": torch.full((1, 2), 1e200, dtype=torch.float64)}
    channel.uplink("update", wide, [1.0], [0])
    torch.testing.assert_close(channel.mean("update")["w"], wide["w"][0])


def test_opposite_infinities_are_found() -> None:
    with pytest.raises(BadUpdate):
        Channel().uplink("update", {"w": torch.tensor([[math.inf, -math.inf]])}, [1.0], [0])


def tensors_within(owner: object) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from ``owner`` through containers and attributes."""
    seen, open_ends = set(), [owner]
    while open_ends:
        thing = open_ends.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, (dict, list, tuple, set)) or type(thing).__module__ == Channel.__module__:
            open_ends += gc.get_referents(thing)


def test_only_sums_are_kept() -> None:
    """The channel holds as many numbers as one message, for any number of clients, so no message can be read alone."""
    channel, payload = Channel(), messages(40)
    model = sum(values[0].numel() for values in payload.values())
    for first in range(0, 40, 4):
        group = list(range(first, first + 4))
        channel.uplink("update", rows(payload, group), [1.0] * 4, group)
        held = list(tensors_within(channel))
        assert sum(tensor.numel() for tensor in held) == model
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 4 * model
    channel.sum("update")
    assert not list(tensors_within(channel))


def test_a_message_may_be_reused_by_its_sender() -> None:
    """A sum does not change when its sender overwrites the message, as the next cohort does."""
    channel, payload = Channel(individual_allowed=True), messages(1)
    sent = {name: values.clone() for name, values in payload.items()}
    channel.uplink("update", payload, [1.0], [0])
    channel.uplink_individually("single", payload, [0])
    for values in payload.values():
        values.fill_(77.0)
    assert_mean(channel.mean("update"), sent, [1.0], 1e-7)
    for name, value in channel.collect_individually("single")[0].items():
        assert torch.equal(value, sent[name][0])


def test_single_messages_need_a_declaration() -> None:
    channel = Channel()
    with pytest.raises(PermissionError, match=r"'secrets'.*individual_uplinks"):
        channel.uplink_individually("secrets", messages(1), [0])
    assert not list(tensors_within(channel))
    assert channel.total_uplink_bytes == 0


def test_declared_single_messages_arrive_by_client() -> None:
    channel, payload = Channel("skip", individual_allowed=True), messages(3)
    payload["bias"][2] = math.nan
    channel.uplink_individually("parameters", rows(payload, [0]), [8])
    channel.uplink_individually("parameters", rows(payload, [1, 2]), [3, 5])
    collected = channel.collect_individually("parameters")
    assert list(collected) == [3, 8], "ascending, without client 5 that sent NaN"
    for client, row in ((8, 0), (3, 1)):
        for name, values in payload.items():
            assert torch.equal(collected[client][name], values[row])
    assert channel.collect_individually("parameters") == {}
    assert channel.uplink_bytes["parameters"] == payload_bytes(payload)
    with pytest.raises(BadUpdate, match="client 5 "):
        Channel("stop", individual_allowed=True).uplink_individually("parameters", rows(payload, [2]), [5])


def test_a_restored_state_drops_messages_that_the_server_has_not_read() -> None:
    """As when a run goes on from its last checkpoint after an error within a round."""
    channel, payload = Channel(individual_allowed=True), messages(3)
    before = channel.state_dict()
    for _ in range(2):
        channel.load_state_dict(before)
        channel.uplink("update", payload, [1.0, 2.0, 3.0], [0, 1, 2])
        channel.uplink_individually("parameters", rows(payload, [0, 1]), [0, 1])
    channel.load_state_dict(before)
    channel.uplink("update", rows(payload, [2]), [3.0], [2])
    channel.uplink_individually("parameters", rows(payload, [2]), [2])
    sums, weight = channel.sum("update")
    assert weight == 3.0
    for name, values in payload.items():
        torch.testing.assert_close(sums[name], 3.0 * values[2])
    assert list(channel.collect_individually("parameters")) == [2]


def test_a_topic_may_have_a_sum_and_single_messages() -> None:
    """Reading one of them leaves the other, in either order."""
    payload, weights = messages(3), [1.0, 2.0, 3.0]
    for single_first in (True, False):
        channel = Channel(individual_allowed=True)
        channel.uplink("both", payload, weights, [0, 1, 2])
        channel.uplink_individually("both", rows(payload, [2, 0]), [2, 0])
        if single_first:
            single, mean = channel.collect_individually("both"), channel.mean("both")
        else:
            mean, single = channel.mean("both"), channel.collect_individually("both")
        assert_mean(mean, payload, weights, 1e-6)
        torch.testing.assert_close(
            single, {0: {n: v[0] for n, v in payload.items()}, 2: {n: v[2] for n, v in payload.items()}}
        )


def test_messages_of_a_sum_have_the_same_names_and_shapes() -> None:
    """Messages of other names or shapes are refused: a mean would divide some clients' sum by the weight of all."""
    channel = Channel()
    channel.uplink("prototypes", {"a": torch.ones(2, 3)}, [1.0, 1.0], [0, 1])
    for other in ({"b": torch.ones(1, 3)}, {"a": torch.ones(1, 3), "b": torch.ones(1)}, {"a": torch.ones(1, 1)}):
        with pytest.raises(ValueError, match=r"clients \[2\] send .* in topic 'prototypes', others \{'a': \[3\]\}"):
            channel.uplink("prototypes", other, [1.0], [2])
    assert channel.mean("prototypes")["a"].tolist() == [1.0] * 3
    channel.uplink("prototypes", {"b": torch.ones(1, 2)}, [1.0], [0])  # the next sum may be of another form


def test_a_sum_that_nobody_has_sent_to_says_so() -> None:
    with pytest.raises(BadUpdate, match="no usable message for 'nothing'; no client has sent one"):
        Channel().mean("nothing")
