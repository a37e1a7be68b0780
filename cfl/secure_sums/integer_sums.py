"""Sums of clients' messages as integers: by the protocol, or the same sums computed without it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.randomness.generators import numpy_generator, seed_for
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError, SumRefused
from cfl.secure_sums.codec import Codec, centred, codec_of, encoded
from cfl.secure_sums.dropouts import Attendance, check_recoverable
from cfl.secure_sums.figures import SumFigures
from cfl.secure_sums.graph import neighbours_of
from cfl.secure_sums.protocol import ProtocolSum
from cfl.secure_sums.settings import SumSettings
from cfl.secure_sums.traffic import traffic

Layout = list[tuple[str, tuple[int, ...], torch.dtype]]
"""Of each tensor of a message: name, shape, dtype."""


class RunningSum:
    """The state of one topic's sum until the server reads it.

    Attributes:
        asked: clients of which the server wants a message, ascending.
        gone: clients among ``asked`` that drop out.
        codec: codec of the messages.
        layout: layout of the messages.
        came: clients whose message is in the sum.
        total: ``[d + 1]`` int64, the sum of the messages' integers, with the sum of weights last; None before the first
            message, and if the protocol forms the sum.
        protocol: forms the sum; None before the first message, and if the sum is computed without the protocol.
        device: device of the messages.
    """

    def __init__(self, topic: str, round: int, asked: Sequence[int], gone: Collection[int], codec: Codec) -> None:
        self.topic, self.round, self.codec = topic, round, codec
        self.asked, self.gone = sorted(asked), frozenset(asked) & frozenset(gone)
        self.layout: Layout = []
        self.came: set[int] = set()
        self.total: Tensor | None = None
        self.protocol: ProtocolSum | None = None
        self.device = torch.device("cpu")


class IntegerSums:
    """Forms the sums of all topics.

    A client's message is one vector of integers: its tensors in the order of their names, then its weight. Rounding is
    a hash of (seed, topic, round, client), and the order of integer additions does not matter. The sums therefore do
    not depend on cohorts, devices and processes.

    Args:
        settings: settings of the run's sums.

    Attributes:
        figures: figures for the run's summary.
    """

    def __init__(self, settings: SumSettings) -> None:
        self.settings = settings
        self.figures = SumFigures()
        self._running: dict[str, RunningSum] = {}

    def add(
        self,
        topic: str,
        moment: tuple[int, int],
        asked: Sequence[int],
        gone: Collection[int],
        payload: Mapping[str, Tensor],
        weights: Sequence[float],
        clients: Sequence[int],
    ) -> None:
        """Add messages of k clients.

        Args:
            topic: kind of message.
            moment: round and task, for error messages.
            asked: clients of which the server wants a message for this sum, the same for all of them.
            gone: clients that drop out of the round.
            payload: name -> ``[k, ...]``, finite.
            weights: weights of the k messages, whole numbers above 0.
            clients: the k ids.

        Raises:
            ConfigError: a number or a weight is beyond the codec's range.
            RuntimeError: a client sends a second message, or was not asked.
        """
        started = time.perf_counter()
        if topic not in self._running:
            self._running[topic] = RunningSum(topic, moment[0], asked, gone, self._codec(topic, len(asked)))
        running = self._running[topic]
        strangers = set(clients) & running.came | (set(clients) - set(running.asked))
        if strangers:
            raise RuntimeError(f"topic {topic!r}: client {min(strangers)} was not asked for a message of this sum")
        if not running.layout:
            # Sorted, so that a number has the same place in all processes, and so the same rounding.
            running.layout = [(n, tuple(rows.shape[1:]), rows.dtype) for n, rows in sorted(payload.items())]
            running.device = next(iter(payload.values())).device
        rows = self._integers(running, moment, payload, weights, clients)
        if self.settings.secure:
            self._mask(running, rows, clients)
        else:
            total = rows.sum(0)
            running.total = total if running.total is None else running.total.add_(total)
        running.came.update(clients)
        self.figures.seconds += time.perf_counter() - started

    def _integers(
        self,
        running: RunningSum,
        moment: tuple[int, int],
        payload: Mapping[str, Tensor],
        weights: Sequence[float],
        clients: Sequence[int],
    ) -> Tensor:
        """``[k, d + 1]`` int64: the messages' numbers and weights."""
        codec, topic = running.codec, running.topic
        device = next(iter(payload.values())).device
        for weight in weights:
            if not float(weight).is_integer() or not 0 < weight <= codec.weight:
                least = 2 ** math.ceil(math.log2(max(1.0, weight)))
                valid = f"a power of two that no weight exceeds, weights being whole numbers; one has {weight:g}"
                said = f", e.g. --federated.codecs '{{{topic}: {{weight: {least}}}}}'" if weight > codec.weight else ""
                raise ConfigError(f"federated.codecs.{topic}.weight", codec.weight, valid + said)
        keys = [seed_for(self.settings.seed, f"codec {topic}", moment[0], client) for client in clients]
        values, steps = _joined([payload[name].reshape(len(clients), -1) for name, _, _ in running.layout], codec)
        scales = torch.tensor([[float(weight)] for weight in weights], dtype=torch.float64, device=device) / steps
        found, largest, squares = encoded(values, scales, steps, torch.tensor(keys, dtype=torch.int64, device=device))
        beyond = (largest > codec.greatest).tolist()
        if any(beyond):
            self._refuse(running, moment, payload, weights, clients, beyond.index(True))
        self.figures.add(topic, codec, values.numel(), float(largest.max()), float(squares))
        found[:, -1] = torch.tensor([int(weight) for weight in weights], device=device)
        return found

    @staticmethod
    def _refuse(
        running: RunningSum,
        moment: tuple[int, int],
        payload: Mapping[str, Tensor],
        weights: Sequence[float],
        clients: Sequence[int],
        row: int,
    ) -> None:
        codec, factor = running.codec, weights[row] / running.codec.weight
        largest = {n: float(v[row].abs().max()) for n, v in payload.items() if v[row].numel()}
        sizes = {n: size * factor for n, size in largest.items()}
        floats = {n: size for n, size in sizes.items() if payload[n].is_floating_point()}
        if floats and max(floats.values()) / codec.range >= 1 - 2.0**-codec.bits:
            name = max(floats, key=lambda n: floats[n])
            key, value, least = "range", codec.range, max(2 * codec.range, 2.0 ** math.frexp(floats[name])[1])
        else:
            name = max(sizes, key=lambda n: sizes[n])
            key, value, least = "bits", codec.bits, math.ceil(math.log2(sizes[name] + 1)) + 1
        weighed = "" if factor == 1 else f", with weight {weights[row]:g} of at most {codec.weight:g}"
        raise ConfigError(
            f"federated.codecs.{running.topic}.{key}",
            value,
            f"in a new run at least {least:g}: in round {moment[0]} (task {moment[1]}) client {clients[row]} has "
            f"{largest[name]:.6g} in {name}{weighed}, and nothing is cut off in silence",
        )

    # The protocol.

    def _mask(self, running: RunningSum, rows: Tensor, clients: Sequence[int]) -> None:
        """Send the clients' integers ``[k, d + 1]`` as masked messages of the protocol."""
        modulus = running.codec.modulus or 64
        if running.protocol is None:
            generator = self._generator(running.round)
            running.protocol = ProtocolSum(
                running.asked, running.gone, self.settings, generator, rows.shape[1], modulus
            )
        for client, row in zip(clients, rows.cpu().numpy().view(np.uint64), strict=True):
            running.protocol.add(client, row.astype(f"<u{modulus // 8}"))

    # The server reads.

    def read(self, topic: str, moment: tuple[int, int]) -> tuple[dict[str, Tensor], float, int, int]:
        """Return and remove a topic's weighted sums, their weight, and the bytes that its clients sent and received.

        With several processes, all must call this. The bytes are those of all clients, in the first process only.

        Raises:
            SumRefused: too few clients are left to recover the sum, or no client has sent a message.
            ValueError: messages of different processes have other names, shapes or dtypes.
        """
        started = time.perf_counter()
        what = f"round {moment[0]} (task {moment[1]}): no sum of {topic!r}"
        running = self._running.pop(topic, None)
        heard = distributed.gather(
            None if running is None else (running.round, running.asked, running.gone, running.layout, running.came)
        )
        known = [other for other in heard if other is not None]
        if not known:
            raise SumRefused(f"{what}: no message came")
        round, asked, gone, layout, _ = known[0]
        for *_, other, _ in known:
            if other != layout:
                raise ValueError(f"topic {topic!r}: clients send {layout} in one process, {other} in another")
        came = set().union(*(other[-1] for other in known))
        codec = self._codec(topic, len(asked))
        modulus = codec.modulus or 64
        attendance = Attendance.of(asked, gone, self.settings.stage, came)
        neighbours = self.graph(round, attendance)
        check_recoverable(attendance, neighbours, self.settings.threshold, what)
        if running is not None and running.protocol is not None:
            unmasked = running.protocol.total(what).astype(np.uint64).view(np.int64)
            total = torch.from_numpy(unmasked).to(running.device)
            up, down = running.protocol.server.up, running.protocol.server.down
        else:
            own = {} if running is None or running.total is None else {"integers": running.total}
            total = distributed.add_up(own)["integers"]
            up, down = traffic(attendance, neighbours, len(total) * modulus // 8)
            if distributed.rank() > 0:
                up = down = 0
        total = centred(total, modulus)
        self.figures.sums(topic, len(came))
        sums = decoded(codec, total, layout)
        self.figures.seconds += time.perf_counter() - started
        return sums, float(total[-1]), up, down

    def unused_codecs(self) -> list[str]:
        """Topics of ``federated.codecs`` of which no message was sent, sorted. All processes must call this."""
        sent = {topic for topics in distributed.gather(sorted(self.figures.topics)) for topic in topics}
        return sorted(set(self.settings.codecs) - sent)

    def summary(self) -> dict[str, Any]:
        """Figures for the run's summary: how sums were formed, seconds, and by topic the codec and its errors."""
        settings = self.settings
        how = {
            "aggregation": "secure" if settings.secure else "modelled",
            "neighbours": settings.neighbours,
            "share_threshold": settings.threshold,
        }
        return {**how, **self.figures.summary()}

    def _codec(self, topic: str, clients: int) -> Codec:
        settings = self.settings
        return codec_of(topic, settings.codecs, settings.greatest_weight(topic)).for_clients(topic, clients)

    def graph(self, round: int, attendance: Attendance) -> dict[int, list[int]]:
        """Client that has sent keys -> its neighbours in a round's sums."""
        return neighbours_of(attendance.keys, self.settings.neighbours, self._generator(round))

    def _generator(self, round: int) -> np.random.Generator:
        return numpy_generator(self.settings.seed, "neighbours", round)


def _joined(parts: Sequence[Tensor], codec: Codec) -> tuple[Tensor, Tensor]:
    """``[k, d]`` messages of several tensors ``[k, ...]``, and ``[1]`` or ``[d]`` float64 steps of their numbers."""
    device = parts[0].device
    if len({part.dtype for part in parts}) == 1 and parts[0].is_floating_point():
        return torch.cat(list(parts), 1), torch.tensor([codec.step()], dtype=torch.float64, device=device)
    steps = [codec.step(not part.is_floating_point()) for part in parts]
    sizes = torch.tensor([part.shape[1] for part in parts], device=device)
    of_each = torch.tensor(steps, dtype=torch.float64, device=device).repeat_interleave(sizes)
    return torch.cat([part.to(torch.float64) for part in parts], 1), of_each


def decoded(codec: Codec, total: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a sum of integers ``[d + 1]``, by name: in float32 or float64, of other numbers in float64."""
    sizes = [math.prod(shape) for _, shape, _ in layout]
    parts = total[:-1].split(sizes)
    sums = {}
    for (name, shape, dtype), part in zip(layout, parts, strict=True):
        numbers = part.to(torch.float64) * codec.step(not dtype.is_floating_point)
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
        sums[name] = numbers.view(shape).to(wide)  # a sum of half precision may exceed its range
    return sums
