"""Clients' messages to the server as bytes: session, stage, sender, body and signature."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.dropouts import STAGES
from cfl.secure_sums.keys import Identity, is_signed
from cfl.secure_sums.traffic import HEADER, NUMBER, SESSION, SIGNATURE


def framed(identity: Identity, session: bytes, stage: str, sender: int, body: bytes) -> bytes:
    """A client's message with its header and signature."""
    content = session + struct.pack("<BI", STAGES.index(stage), sender) + body
    return content + identity.sign(content)


def unframed(message: bytes, session: bytes, stage: str, identities: Mapping[int, bytes]) -> tuple[int, bytes]:
    """Sender and body of a message.

    Args:
        message: the bytes that came.
        session: name of the running sum.
        stage: the current stage.
        identities: client -> public key.

    Raises:
        SumRefused: the message is truncated, of another session or stage, or not signed by a client that was asked.
    """
    if len(message) < HEADER + SIGNATURE:
        raise SumRefused(f"a truncated message of {len(message)} bytes")
    content, signature = message[:-SIGNATURE], message[-SIGNATURE:]
    number, sender = struct.unpack("<BI", content[SESSION:HEADER])
    if content[:SESSION] != session:
        raise SumRefused(f"a message of client {sender} from another session: replayed")
    if number >= len(STAGES) or STAGES[number] != stage:
        raise SumRefused(f"a message of client {sender} that is not of the stage {stage!r}: replayed or out of turn")
    if sender not in identities:
        raise SumRefused(f"a message of client {sender}, which was not asked")
    if not is_signed(identities[sender], content, signature):
        raise SumRefused(f"a message that client {sender} has not signed: forged or truncated")
    return sender, content[HEADER:]


def listed(entries: Mapping[int, bytes]) -> bytes:
    """Encode client -> entry as bytes; all entries have the same length."""
    return b"".join(struct.pack("<I", client) + entry for client, entry in sorted(entries.items()))


def unlisted(body: bytes, size: int, what: str, expected: Callable[[int], bool]) -> dict[int, bytes]:
    """Undo :func:`listed`.

    Args:
        body: the bytes.
        size: bytes of an entry, without the client's number.
        what: name of the list, for the error message.
        expected: whether a client may be in the list.

    Raises:
        SumRefused: the list is truncated, or has a client twice or one that is not expected.
    """
    each = NUMBER + size
    if len(body) % each:
        raise SumRefused(f"{what}: {len(body)} bytes are no whole number of entries: truncated")
    found: dict[int, bytes] = {}
    for start in range(0, len(body), each):
        (client,) = struct.unpack("<I", body[start : start + NUMBER])
        if client in found or not expected(client):
            raise SumRefused(f"{what}: client {client} is in it twice or does not belong there")
        found[client] = body[start + NUMBER : start + each]
    return found


def numbers(clients: Iterable[int]) -> bytes:
    """Clients' numbers, ascending, as bytes."""
    return listed(dict.fromkeys(clients, b""))
