"""The protocol: exact sums under dropouts, masked messages that reveal nothing, and parties that break the rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.secure_sums import row
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import chisquare

from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import SumRefused
from cfl.secure_sums.client import OF_KEY, OF_MASK
from cfl.secure_sums.dropouts import STAGES, UNTIL_MESSAGE, Attendance, check_recoverable
from cfl.secure_sums.graph import neighbours_of
from cfl.secure_sums.keys import Identity, as_bytes, tag
from cfl.secure_sums.masks import add_mask
from cfl.secure_sums.protocol import ProtocolSum
from cfl.secure_sums.settings import SumSettings
from cfl.secure_sums.traffic import HEADER, SIGNATURE, traffic
from cfl.secure_sums.wire import framed, listed

CLIENTS = [2, 3, 5, 7, 11, 13, 17, 19]
COUNT = 6


def protocol(
    gone: tuple[int, ...] = (),
    stage: str = "message",
    degree: int | None = None,
    modulus: int = 32,
    threshold: float = 0.5,
    count: int = COUNT,
) -> ProtocolSum:
    generator = numpy_generator(0, "test")
    settings = SumSettings(secure=True, seed=0, neighbours=degree, threshold=threshold, stage=stage)
    return ProtocolSum(CLIENTS, gone, settings, generator, count, modulus)


def vectors(modulus: int = 32, count: int = COUNT) -> dict[int, np.ndarray]:
    generator = np.random.default_rng(1)
    return {c: generator.integers(0, 2**modulus, count, dtype=f"u{modulus // 8}", endpoint=False) for c in CLIENTS}


def send_all(run: ProtocolSum, sent: dict[int, np.ndarray], gone: tuple[int, ...] = (), stage: str = "message") -> None:
    for client in CLIENTS:
        if client not in gone or stage not in UNTIL_MESSAGE:
            run.add(client, sent[client])


def by_hand(sent: dict[int, np.ndarray], clients: list[int], modulus: int) -> list[int]:
    return [sum(int(sent[c][place]) for c in clients) % 2**modulus for place in range(len(sent[CLIENTS[0]]))]


@pytest.mark.parametrize("modulus", [32, 64])
@pytest.mark.parametrize("degree", [None, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_and_the_bytes_are_exact(stage: str, degree: int | None, modulus: int) -> None:
    """The sum is that of Python's integers. Bytes are those computed without the protocol."""
    gone, sent = (5, 13), vectors(modulus)
    run = protocol(gone, stage, degree, modulus, threshold=0.3)
    send_all(run, sent, gone, stage)
    came = [c for c in CLIENTS if c not in gone or stage not in UNTIL_MESSAGE]
    assert run.total("a sum").tolist() == by_hand(sent, came, modulus)
    attendance = Attendance.of(CLIENTS, gone, stage, came)
    asked = sorted(attendance.keys)
    graph = neighbours_of(asked, degree, numpy_generator(0, "test"))
    assert traffic(attendance, graph, COUNT * modulus // 8) == (run.server.up, run.server.down)


def test_a_client_may_drop_out_without_being_foreseen() -> None:
    """The sum is exact without a client that was expected to send, but did not."""
    run, sent = protocol(), vectors()
    for client in CLIENTS[:-1]:
        run.add(client, sent[client])
    assert run.total("a sum").tolist() == by_hand(sent, CLIENTS[:-1], 32)


@pytest.mark.parametrize("stage", ["message", "check", "unmasking"])
def test_below_the_threshold_there_is_no_sum(stage: str) -> None:
    """Without five of eight holders there is no sum, neither by the protocol nor by its model."""
    enough, too_few = (2, 3, 5), (2, 3, 5, 7)
    graph = neighbours_of(CLIENTS, None, numpy_generator(0, "test"))
    for gone, recovered in ((enough, True), (too_few, False)):
        run, sent = protocol(gone, stage), vectors()
        came = [c for c in CLIENTS if c not in gone or stage not in UNTIL_MESSAGE]
        attendance = Attendance.of(CLIENTS, gone, stage, came)
        if recovered:
            send_all(run, sent, gone, stage)
            check_recoverable(attendance, graph, 0.5, "a sum")
            assert run.total("a sum").tolist() == by_hand(sent, came, 32)
            continue
        with pytest.raises(SumRefused, match=r"a sum: 4 of the 8 clients .* 5 are needed"):
            check_recoverable(attendance, graph, 0.5, "a sum")
        with pytest.raises(SumRefused, match=r"needed|too few"):
            send_all(run, sent, gone, stage), run.total("a sum")


def test_a_sum_of_one_message_is_refused() -> None:
    run = protocol(threshold=0.01)
    run.add(2, vectors()[2])
    with pytest.raises(SumRefused, match="1 of 8 messages came"):
        run.total("a sum")


# What the server can learn.


@pytest.mark.parametrize("modulus", [32, 64])
def test_a_mask_is_the_key_stream_of_aes_in_counter_mode(modulus: int) -> None:
    """Masks are the blocks of AES in counter mode, computed by hand: the counter is a number of 16 bytes."""
    key, count = bytes(range(32)), 2 * 2**14 + 60
    total = np.zeros(count, dtype=f"u{modulus // 8}")
    add_mask(total, key, modulus, 1)
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    blocks = b"".join(block.update(number.to_bytes(16, "big")) for number in range(total.nbytes // 16))
    assert total.tobytes() == blocks
    add_mask(total, key, modulus, -1)
    assert not total.any()


def test_a_masked_message_is_uniform() -> None:
    """A masked vector of zeros has all bytes equally often, and masks differ between two sums."""
    count = 2**15
    zeros = np.zeros(count, dtype="u4")
    seen = []
    for _ in range(2):
        run = protocol(count=count)
        message = run.clients[7].message(run._shares[7], zeros)
        seen.append(np.frombuffer(message[HEADER:-SIGNATURE], dtype=np.uint8))
    for body in seen:
        assert len(body) == 4 * count
        assert chisquare(np.bincount(body, minlength=256)).pvalue > 1e-6
        pairs = (body[::2] ^ body[1::2]).astype(np.uint8)  # neighbouring bytes are independent
        assert chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-6
    differences = (seen[0] - seen[1]).astype(np.uint8)
    assert chisquare(np.bincount(differences, minlength=256)).pvalue > 1e-6
    assert chisquare(np.bincount(zeros.view(np.uint8), minlength=256)).pvalue < 1e-6  # the test can fail


def test_a_clients_own_mask_hides_a_message_that_comes_late() -> None:
    """A client's own mask hides its late message from a server that already recovered the client's masking key."""
    run = protocol()
    client, others = run.clients[7], [c for c in CLIENTS if c != 7]
    message = client.message(run._shares[7], np.zeros(COUNT, dtype="u4"))
    seen = np.frombuffer(message[HEADER:-SIGNATURE], dtype="u4")
    run.server._recovered = lambda number: run.clients[number]._masking.secret  # type: ignore[method-assign]
    shared = np.zeros(COUNT, dtype="u4")
    run.server._remove_masks(shared, 7, others)
    left = seen - shared
    assert left.any()
    add_mask(left, tag(as_bytes(client._seed), client._session), 32, -1)
    assert not left.any()  # with the seed the server could read the message


# A server that asks for too much.


def until_unmasking() -> tuple[ProtocolSum, dict[int, tuple[bytes, bytes]]]:
    run, sent = protocol((19,)), vectors()
    send_all(run, sent, (19,))
    came = run.server.came()
    for client in came:
        run.server.receive_check(run.clients[client].check(came[client]))
    return run, run.server.requests()


def test_a_server_that_asks_for_both_secrets_is_refused() -> None:
    run, requests = until_unmasking()
    tags, asked = requests[2]
    both = asked + listed({7: OF_KEY})
    with pytest.raises(SumRefused, match="client 7 is in it twice"):
        run.clients[2].unmasking(tags, both)
    with pytest.raises(SumRefused, match="a second time"):  # the client answers no further request
        run.clients[2].unmasking(tags, asked)


@pytest.mark.parametrize(
    ("client", "kind", "message"),
    [(7, OF_KEY, "key of client 7, whose message came"), (19, OF_MASK, "own mask of client 19, whose message did not")],
)
def test_a_server_that_asks_for_the_wrong_secret_is_refused(client: int, kind: bytes, message: str) -> None:
    run, requests = until_unmasking()
    with pytest.raises(SumRefused, match=message):
        run.clients[3].unmasking(requests[3][0], listed({client: kind}))


def test_a_server_that_asks_again_is_refused() -> None:
    run, requests = until_unmasking()
    run.clients[2].unmasking(*requests[2])
    with pytest.raises(SumRefused, match="client 2 is asked for its 'unmasking' a second time"):
        run.clients[2].unmasking(*requests[2])


def test_a_server_that_tells_clients_different_lists_is_refused() -> None:
    """Clients refuse a server that sends them different lists of messages.

    Otherwise it could get shares of a client's key from some clients and of its mask's seed from others.
    """
    run, sent = protocol(), vectors()
    send_all(run, sent)
    whole = run.server.came()
    without_7 = listed(dict.fromkeys([c for c in CLIENTS if c != 7], b""))
    for client in CLIENTS:
        told = without_7 if client in (2, 3) else whole[client]
        run.server.receive_check(run.clients[client].check(told))
    requests = run.server.requests()
    for client, why in ((2, "client 7 is in it twice or does not belong"), (5, "client 2 has got another list")):
        with pytest.raises(SumRefused, match=why):
            run.clients[client].unmasking(*requests[client])


def test_a_server_that_leaves_a_client_alone_is_refused() -> None:
    run = protocol()
    fresh = protocol().clients[5]
    fresh._stages = iter(STAGES[1:])
    with pytest.raises(SumRefused, match="client 5 has no neighbour"):
        fresh.shares(b"")
    with pytest.raises(SumRefused, match="0 neighbours of client 5 are left of 5 needed"):
        run.clients[5].message(b"", vectors()[5])


# Wrong messages.


def test_replayed_messages_are_refused() -> None:
    run, sent = protocol(), vectors()
    message = run.clients[2].message(run._shares[2], sent[2])
    run.server.receive_message(message)
    with pytest.raises(SumRefused, match="a second message of client 2"):
        run.server.receive_message(message)
    with pytest.raises(SumRefused, match="from another session: replayed"):
        protocol().server.receive_message(message)
    with pytest.raises(SumRefused, match="not of the stage 'check': replayed"):
        run.server.receive_check(message)
    assert run.server._came == {2}


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda message: message[: len(message) // 2],
    "nothing": lambda message: b"",
    "a byte less": lambda message: message[:-1],
    "a number less": lambda message: message[: -SIGNATURE - 4] + message[-SIGNATURE:],
    "a bit of the body": lambda message: message[:HEADER] + bytes([message[HEADER] ^ 1]) + message[HEADER + 1 :],
    "another sender": lambda message: message[: HEADER - 4] + bytes([3, 0, 0, 0]) + message[HEADER:],
    "a stranger": lambda message: message[: HEADER - 4] + bytes([99, 0, 0, 0]) + message[HEADER:],
    "a bit of the signature": lambda message: message[:-1] + bytes([message[-1] ^ 1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_truncated_and_forged_messages_are_refused(change: str) -> None:
    run, sent = protocol(), vectors()
    message = run.clients[2].message(run._shares[2], sent[2])
    with pytest.raises(SumRefused, match=r"truncated|forged|session|not asked"):
        run.server.receive_message(CHANGES[change](message))
    assert not run.server._total.any()
    send_all(run, sent, (2,))
    run.server.receive_message(message)  # the genuine message is still accepted
    assert run.total("a sum").tolist() == by_hand(sent, CLIENTS, 32)


def test_a_message_in_the_name_of_another_client_is_refused() -> None:
    run = protocol()
    forged = framed(Identity(), run.clients[3]._session, "message", 3, bytes(4 * COUNT))
    with pytest.raises(SumRefused, match="client 3 has not signed"):
        run.server.receive_message(forged)


def test_a_signed_message_that_is_too_short_is_refused() -> None:
    run = protocol()
    client = run.clients[3]
    short = framed(client._identity, client._session, "message", 3, bytes(4 * COUNT - 4))
    with pytest.raises(SumRefused, match="20 bytes, not 24: truncated"):
        run.server.receive_message(short)


def test_shares_that_another_client_has_encrypted_are_refused() -> None:
    run, sent = protocol((19,)), vectors()
    shares = dict(run._shares)
    entry = len(shares[2]) // 7
    first, second = shares[2][:entry], shares[2][entry : 2 * entry]
    shares[2] = first[:4] + second[4:] + second[:4] + first[4:] + shares[2][2 * entry :]  # swapped
    run._shares = shares
    send_all(run, sent, (19,))
    with pytest.raises(SumRefused, match="not encrypted for this client"):
        run.total("a sum")


def test_shares_of_a_wrong_key_are_refused() -> None:
    run, requests = until_unmasking()
    for client in requests:
        run.server.receive_unmasking(run.clients[client].unmasking(*requests[client]))
    for given in run.server._shares.values():
        given[19] = bytes(32)
    with pytest.raises(SumRefused, match="client 19's key do not give it: forged"):
        run.server.total("a sum")


@pytest.mark.parametrize("degree", [None, 4])
def test_the_benchmark_counts_what_the_protocol_sends(degree: int | None) -> None:
    """The benchmark's bytes for sums of ten clients are those computed without the protocol."""
    whole = row(10, degree, 20_000)
    attendance = Attendance.of(range(10), range(1), "message", range(10))
    neighbours = neighbours_of(range(10), degree, np.random.default_rng(0))
    up, down = traffic(attendance, neighbours, 4 * 20_000)
    assert (whole["kB up"], whole["kB down"]) == pytest.approx((up / 1e4, down / 1e4))
    assert whole["neighbours"] == (degree or 9)
    assert whole["message kB"] == 80
    assert whole["kB up"] > 0.9 * 80  # nine of ten clients send a message
