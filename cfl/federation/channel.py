"""The channel that carries every message between clients and server. It counts bytes, sums messages and refuses NaN."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cfl.federation.row_layout import check_rows
from cfl.privacy.ledger import Ledger
from cfl.runtime import distributed
from cfl.runtime.errors import BadUpdate
from cfl.runtime.moving import moved
from cfl.secure_sums.integer_sums import IntegerSums

UPDATE = "update"
"""The topic of the clients' updates."""


def payload_bytes(payload: Mapping[str, Tensor]) -> int:
    """Bytes of a message that holds these tensors uncompressed."""
    return sum(tensor.numel() * tensor.element_size() for tensor in payload.values())


def weighted_sums(payload: Mapping[str, Tensor], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted sums ``[...]`` of messages ``[k, ...]``, by name: float64 of integers, float32 of half precision.

    A message of weight 0 is left out, even if NaN.
    """
    sums = {}
    for name, rows in payload.items():
        factor = moved(torch.tensor(weights, dtype=torch.float32), rows.device)
        # float32 is exact for integers up to 2^24 only. A sum in bfloat16 stops growing after some hundred messages.
        wide = torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else torch.float64
        values = rows.to(wide)
        if 0.0 in weights:
            values = torch.where(factor.view(-1, *[1] * (rows.ndim - 1)) == 0, torch.zeros_like(values), values)
        sums[name] = torch.tensordot(factor.to(values.dtype), values, dims=1)
    return sums


def _check_message(topic: str, payload: Mapping[str, Tensor], clients: Sequence[int]) -> None:
    """Refuse a payload without a tensor and a row for each client, and complex numbers."""
    check_rows(f"topic {topic!r}", payload, len(clients))
    if imaginary := [name for name, values in payload.items() if values.is_complex()]:
        raise TypeError(f"topic {topic!r}: {imaginary[0]} is complex; send torch.view_as_real of it")


def _in_own_type(sums: dict[str, Tensor], halves: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    return {name: total.to(halves.get(name, total.dtype)) for name, total in sums.items()}


@dataclass
class _Messages:
    """What has come for the sum of a topic since the server last read it.

    Attributes:
        form: name -> shape of every message of the sum; None before the first.
        halves: name -> dtype of those tensors that are in half precision.
        sums: weighted sums; empty if they are sums of integers.
        weight: sum of the weights.
        senders: the clients that have sent a message.
        counted: the clients whose message is part of the sum.
        expected: the clients from which the server expected a message.
    """

    form: dict[str, list[int]] | None = None
    halves: dict[str, torch.dtype] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0
    senders: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    expected: set[int] = field(default_factory=set)


class Channel:
    """Messages between clients and server.

    Each message is added to a running weighted sum and then discarded. Memory is that of one message, however many
    clients there are. The server can read sums only, as under secure aggregation. A method that needs single messages
    calls :meth:`collect_individually`, which is refused unless the method declared it.

    With several processes, each has a channel for the clients that it trains. The server then reads sums over the
    clients of all processes, and all processes must read in the same order. Byte counts and skipped clients are this
    process's own until :meth:`synchronise`. The ledger records every sum that the server reads.

    Clients that drop out of a round before their message send none in it. They are left out of the round like clients
    with NaN, and keep their former state.

    Args:
        on_bad_update: ``stop`` raises when a client sends NaN or infinity, ``skip`` leaves that message out of the
            sum, and with its model the client out of the round.
        individual_allowed: whether a method declared that the server must see single messages.
        diverges_with: options to lower against NaN and infinity, for the error message.
        integers: computes sums of integers, as under secure aggregation; None for sums of floats.
        dropped_before_message: round -> the clients that drop out before their message in that round; None if no client
            does.
        dropped_at_all: round -> all clients that drop out in that round, before or after their message;
            ``dropped_before_message`` if not given.

    Attributes:
        skipped: (round, task, client) of each client that was left out of a round because its model was not finite.
        skipped_messages: (round, topic, client) of each other message that was left out because it was not finite.
        loses_messages: whether clients drop out before their message.
        ledger: all sums that were read under noise, and their privacy loss.
    """

    def __init__(
        self,
        on_bad_update: Literal["stop", "skip"] = "stop",
        individual_allowed: bool = False,
        diverges_with: Sequence[str] = ("model.optimizer lr",),
        integers: IntegerSums | None = None,
        dropped_before_message: Callable[[int], Collection[int]] | None = None,
        dropped_at_all: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        self.on_bad_update = on_bad_update
        self.individual_allowed = individual_allowed
        self.diverges_with = tuple(diverges_with)
        self.integers = integers
        self.loses_messages = dropped_before_message is not None
        self.dropped_before_message = dropped_before_message or (lambda round: ())
        self._dropped_at_all = dropped_at_all or self.dropped_before_message
        self._expected: tuple[int, ...] = ()
        self.uplink_bytes: Counter[str] = Counter()
        self.downlink_bytes: Counter[str] = Counter()
        self.skipped: list[tuple[int, int, int]] = []
        self.skipped_messages: list[tuple[int, str, int]] = []
        self._unread: defaultdict[str, _Messages] = defaultdict(_Messages)
        # Topic -> client -> message, of messages that the server reads one by one.
        self._single: defaultdict[str, dict[int, dict[str, Tensor]]] = defaultdict(dict)
        self.ledger = Ledger()
        self._task = self._round = 0
        self._agreed = self._counts()

    @property
    def total_uplink_bytes(self) -> int:
        """Bytes all clients have sent so far."""
        return self.uplink_bytes.total()

    @property
    def total_downlink_bytes(self) -> int:
        """Bytes all clients have received so far."""
        return self.downlink_bytes.total()

    def enter_round(self, task: int, round: int) -> None:
        """Set the current task and round, for dropouts, records and error messages."""
        self._task, self._round = task, round

    def ask(self, clients: Sequence[int]) -> None:
        """Set the clients from which the server expects the next messages. All processes pass the same clients."""
        self._expected = tuple(clients)

    def downlink(
        self, topic: str, payload: Mapping[str, Tensor], receivers: int, wire_bytes: int | None = None
    ) -> None:
        """Count the bytes of a message that the server sends to ``receivers`` clients.

        Args:
            topic: kind of message, e.g. ``model``; bytes are counted per topic.
            payload: name -> tensor, the message to one client.
            receivers: number of receiving clients among those of this process.
            wire_bytes: bytes of one message if it is sent in another form than these tensors, e.g. compressed.
        """
        size = payload_bytes(payload) if wire_bytes is None else wire_bytes
        self.downlink_bytes[topic] += receivers * size

    @torch.no_grad()
    def uplink(
        self,
        topic: str,
        payload: Mapping[str, Tensor],
        weights: Sequence[float],
        clients: Sequence[int],
        wire_bytes: int | None = None,
    ) -> list[bool]:
        """Add the messages of k clients to the topic's running weighted sum.

        Args:
            topic: kind of message, e.g. ``update``.
            payload: name -> ``[k, ...]``, row j from client ``clients[j]``.
            weights: the k weights.
            clients: the k ids.
            wire_bytes: bytes of one client's message if it is sent in another form than these tensors, e.g. as
                values with their indices.

        Returns:
            For each of the k clients, whether its message has come and is part of the sum.

        Raises:
            BadUpdate: if a message holds NaN or infinity and ``on_bad_update`` is ``stop``.
            ValueError: if earlier messages of the sum have other names or shapes, with which a mean would be wrong; if
                there is not a row and a weight for each client; or if the messages have no tensor.
            TypeError: if it is no dict of tensors, or a tensor is complex.
        """
        if len(weights) != len(clients):
            raise ValueError(f"topic {topic!r}: {len(weights)} weights for {len(clients)} clients")
        _check_message(topic, payload, clients)
        if not payload:
            raise ValueError(f"topic {topic!r}: a message without tensors")
        form, unread = {name: list(values.shape[1:]) for name, values in payload.items()}, self._unread[topic]
        if unread.form not in (None, form):
            raise ValueError(
                f"clients {list(clients)} send {form} in topic {topic!r}, others {unread.form}: all messages of a sum "
                "have the same names and shapes; a client sends zeros, and a count of 0, for what it lacks"
            )
        unread.form = form
        unread.expected.update(self._expected)
        unread.senders.update(clients)
        dropped = self.dropped_now
        if dropped:
            weights = [0.0 if client in dropped else weight for weight, client in zip(weights, clients, strict=True)]
        self._count_uplink(topic, payload, clients, wire_bytes)
        unread.halves.update({n: v.dtype for n, v in payload.items() if v.is_floating_point() and v.itemsize < 4})
        if self.integers is not None:
            counted = self._add_integers(self.integers, topic, payload, weights, clients)
            unread.counted.update(counted)
            return [client in counted for client in clients]
        added = weighted_sums(payload, weights)
        # A sum is finite only if all its terms are, so single messages are checked only where the sum is not.
        if not math.isfinite(float(torch.stack([total.sum(dtype=torch.float32) for total in added.values()]).sum())):
            usable = self.usable(payload, clients, topic)
            weights = [weight if good else 0.0 for weight, good in zip(weights, usable, strict=True)]
            added = weighted_sums(payload, weights)
        for name, total in added.items():
            unread.sums[name] = unread.sums[name].add_(total) if name in unread.sums else total
        unread.weight += sum(weights)
        unread.counted.update(client for client, weight in zip(clients, weights, strict=True) if weight)
        return [bool(weight) for weight in weights]

    def _add_integers(
        self,
        integers: IntegerSums,
        topic: str,
        payload: Mapping[str, Tensor],
        weights: Sequence[float],
        clients: Sequence[int],
    ) -> set[int]:
        """Add messages as integers, and return the clients whose messages were added."""
        usable = self.usable(payload, clients, topic)
        rows = [row for row, (weight, good) in enumerate(zip(weights, usable, strict=True)) if weight and good]
        if not rows:
            return set()
        counted, weights = [clients[row] for row in rows], [weights[row] for row in rows]
        sent = payload if len(rows) == len(clients) else {name: values[rows] for name, values in payload.items()}
        moment = (self._round, self._task)
        integers.add(topic, moment, self._expected, self._dropped_at_all(self._round), sent, weights, counted)
        return set(counted)

    def sum(self, topic: str) -> tuple[dict[str, Tensor], float]:
        """Return a topic's weighted sum and its total weight, and empty the topic.

        Sums are computed in float32 at least, and returned in the messages' floating-point type; of integers in
        float64.

        Raises:
            BadUpdate: if no client sent a finite message.
            SumRefused: if too few clients are left for a sum of integers.
            RuntimeError: if one client sent messages from two processes.
        """
        sums, weight, halves = self._read(topic)
        return _in_own_type(sums, halves), weight

    def _read(self, topic: str) -> tuple[dict[str, Tensor], float, dict[str, torch.dtype]]:
        """A topic's weighted sum in wide types, its total weight, and the tensors in half precision with their type."""
        own = self._unread.pop(topic, _Messages())
        known = distributed.gather((own.weight, own.senders, own.counted, own.expected, own.halves))
        weight = sum(weight for weight, *_ in known)
        seen: set[int] = set()
        for _, senders, *_ in known:
            if seen & senders:
                raise RuntimeError(
                    f"topic {topic!r}: client {min(seen & senders)} sent from two processes; extra rounds go over "
                    "context.extra_round(...) or context.own_clients(...)"
                )
            seen |= senders
        counted = set().union(*(theirs for _, _, theirs, _, _ in known))
        expected = seen.union(*(theirs for *_, theirs, _ in known))
        halves = {name: dtype for *_, theirs in known for name, dtype in theirs.items()}
        if self.integers is None:
            sums = distributed.add_up(own.sums)
        elif counted:
            sums, weight, up, down = self.integers.read(topic, (self._round, self._task))
            self.uplink_bytes[topic] += up
            self.downlink_bytes[topic] += down
        if weight == 0.0:
            why = "every client was skipped" if topic == UPDATE else "every one that came has NaN or infinity"
            why = why if seen.difference(self.dropped_now) else "every client that was to send one has dropped out"
            why = why if seen else "no client has sent one"
            raise BadUpdate(f"round {self._round} (task {self._task}): no usable message for {topic!r}; {why}")
        self.ledger.read(self._round, self._task, topic, seen, counted, expected)
        return sums, weight, halves

    @property
    def dropped_now(self) -> Collection[int]:
        """Clients whose messages do not come in the current round, because they have dropped out."""
        return self.dropped_before_message(self._round)

    def sum_of_nobody(self, topic: str) -> None:
        """Record in the ledger that the server reads a sum without any client's message."""
        self.ledger.read(self._round, self._task, topic, (), ())

    def mean(self, topic: str) -> dict[str, Tensor]:
        """Return a topic's weighted mean, and empty the topic; types are as for :meth:`sum`."""
        sums, weight, halves = self._read(topic)
        return _in_own_type({name: total.div_(weight) for name, total in sums.items()}, halves)

    def is_unread(self, topic: str, single: bool = False) -> bool:
        """Whether clients of this process have sent messages of a topic that the server has not read.

        Args:
            topic: kind of message.
            single: whether to look for messages of :meth:`uplink_individually` in place of those of :meth:`uplink`.
        """
        return bool(self._single.get(topic)) if single else topic in self._unread and bool(self._unread[topic].senders)

    def uplink_individually(
        self, topic: str, payload: Mapping[str, Tensor], clients: Sequence[int], wire_bytes: int | None = None
    ) -> None:
        """Send the messages of k clients so that the server can read each one; otherwise like :meth:`uplink`.

        Raises:
            PermissionError: if no method declared that it needs this.
        """
        if not self.individual_allowed:
            raise PermissionError(
                f"topic {topic!r} shows the server single clients' messages; the method must declare individual_uplinks"
            )
        _check_message(topic, payload, clients)
        self._count_uplink(topic, payload, clients, wire_bytes)
        keep = self.usable(payload, clients, topic)
        for row, client in enumerate(clients):
            if keep[row]:
                self._single[topic][client] = {name: values[row].clone() for name, values in payload.items()}

    def collect_individually(self, topic: str) -> dict[int, dict[str, Tensor]]:
        """Return a topic's single messages as client -> payload, clients ascending, and empty the topic."""
        found = dict(sorted(distributed.share_out(self._single.pop(topic, {})).items()))
        self.ledger.read(self._round, self._task, topic, found, found)
        return found

    def _count_uplink(
        self, topic: str, payload: Mapping[str, Tensor], clients: Sequence[int], wire_bytes: int | None
    ) -> None:
        if self.integers is not None:  # counted where the sum is read
            return
        each = payload_bytes(payload) // max(1, len(clients)) if wire_bytes is None else wire_bytes
        dropped = self.dropped_now
        size = each * sum(client not in dropped for client in clients)
        self.uplink_bytes[topic] += size

    def usable(self, payload: Mapping[str, Tensor], clients: Sequence[int], topic: str = UPDATE) -> list[bool]:
        """Tell for each of k clients whether its tensors are finite, and record the others as skipped.

        The entry of a client that has dropped out is False as well, but such clients are not recorded.

        Args:
            payload: name -> ``[k, ...]``, row j of client ``clients[j]``; a message, or state that a client keeps.
            clients: the k ids.
            topic: kind of tensors. With :data:`UPDATE`, a client's model, the whole client is recorded as skipped in
                this round; with any other topic only this message is.

        Raises:
            BadUpdate: if a tensor is not finite and ``on_bad_update`` is ``stop``.
        """
        dropped = self.dropped_now
        there = [client not in dropped for client in clients]
        floats = [v.reshape(len(v), -1) for v in payload.values() if v.is_floating_point() and v.numel()]
        if not floats:
            return there
        # A sum is finite only if all its terms are. Finite terms can overflow, so the terms are checked below.
        totals = torch.stack([values.sum(1, dtype=torch.float32) for values in floats]).sum(0)
        if bool(torch.isfinite(totals).all()):
            return there
        finite: list[bool] = torch.stack([torch.isfinite(values).all(1) for values in floats]).all(0).tolist()
        for client, good, comes in zip(clients, finite, there, strict=True):
            if good or not comes:
                continue
            if self.on_bad_update == "stop":
                raise BadUpdate(self._bad(client, topic))
            if topic != UPDATE:
                entry = (self._round, topic, client)
                if entry not in self.skipped_messages:
                    self.skipped_messages.append(entry)
            elif not any((round, who) == (self._round, client) for round, _, who in self.skipped):
                self.skipped.append((self._round, self._task, client))
        return [good and comes for good, comes in zip(finite, there, strict=True)]

    def _bad(self, client: int, topic: str) -> str:
        what, out = "trained to NaN or infinity", "the client"
        if topic != UPDATE:  # no task is named: between rounds, clients may be at other tasks than the round's
            what, out = f"has NaN or infinity in its {topic!r}", "that"
        when = f"in round {self._round}" + (f" (task {self._task})" if topic == UPDATE else "")
        return (
            f"client {client} {what} {when}; in a new run, a smaller {' or '.join(self.diverges_with)} usually helps, "
            f"and federated.on_bad_update=skip leaves {out} out, in this run, too"
        )

    def synchronise(self) -> None:
        """Add up byte counts and skipped clients over all processes. All processes must call this."""
        before = self._agreed
        known, messages = len(before["skipped"]), len(before["skipped_messages"])
        fresh: dict[str, Any] = {
            "uplink_bytes": {t: n - before["uplink_bytes"].get(t, 0) for t, n in self.uplink_bytes.items()},
            "downlink_bytes": {t: n - before["downlink_bytes"].get(t, 0) for t, n in self.downlink_bytes.items()},
            "skipped": self.skipped[known:],
            "skipped_messages": self.skipped_messages[messages:],
        }
        of_all = distributed.gather(fresh)
        for direction, total in (("uplink_bytes", self.uplink_bytes), ("downlink_bytes", self.downlink_bytes)):
            total.clear()
            for counts in (before, *of_all):
                total.update(counts[direction])  # adds
        self.skipped[known:] = sorted({entry for theirs in of_all for entry in theirs["skipped"]})
        fresh_messages = {entry for theirs in of_all for entry in theirs["skipped_messages"]}
        self.skipped_messages[messages:] = sorted(fresh_messages)
        self._agreed = self._counts()
        if self.integers is not None:
            self.integers.figures.synchronise()

    def state_dict(self) -> dict[str, Any]:
        """Byte counts, skipped clients and messages, the ledger and the figures of sums of integers.

        It is called between rounds, when all messages have been read: methods that leave some are refused."""
        figures = {} if self.integers is None else {"integer_sums": self.integers.figures.state_dict()}
        return {**self._counts(), "ledger": self.ledger.state_dict(), **figures}

    def _counts(self) -> dict[str, Any]:
        return {
            "uplink_bytes": dict(self.uplink_bytes),
            "downlink_bytes": dict(self.downlink_bytes),
            "skipped": [list(entry) for entry in self.skipped],
            "skipped_messages": [list(entry) for entry in self.skipped_messages],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Messages of a round that an error has ended are dropped."""
        self._unread.clear()
        self._single.clear()
        if self.integers is not None:
            self.integers = IntegerSums(self.integers.settings)
        self.uplink_bytes, self.downlink_bytes = Counter(state["uplink_bytes"]), Counter(state["downlink_bytes"])
        self.skipped = [(entry[0], entry[1], entry[2]) for entry in state["skipped"]]
        self.skipped_messages = [(entry[0], entry[1], entry[2]) for entry in state.get("skipped_messages", [])]
        self.ledger.load_state_dict(state.get("ledger", Ledger().state_dict()))
        self._agreed = self._counts()
        if self.integers is not None:
            self.integers.figures.load_state_dict(state["integer_sums"])
