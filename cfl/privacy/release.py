"""One noisy sum that leaves the clients of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cfl.privacy.accounting import Spent


@dataclass(frozen=True)
class Noise:
    """Gaussian noise in a sum of clients' messages, as the method that adds it declares it.

    Attributes:
        multiplier: standard deviation of the noise in the whole sum, divided by ``sensitivity``; above 0.
        sensitivity: the most by which one client changes the sum, as an L2 norm.
        added_by: the ``server`` adds it to the sum, or each of the ``clients`` an equal share of its variance.
        whom: the clients that send: those ``sampled`` in the round, or ``all`` that hold the task.
        parts: number of tensors of a message that are bounded and noised separately, each with these numbers.
        without: description of what the same messages hold without noise; empty if that is nothing.
    """

    multiplier: float
    sensitivity: float
    added_by: Literal["server", "clients"] = "server"
    whom: Literal["sampled", "all"] = "sampled"
    parts: int = 1
    without: str = ""

    def __post_init__(self) -> None:
        if not (self.multiplier > 0 and math.isfinite(self.multiplier)):
            raise ValueError(f"multiplier = {self.multiplier}: a number above 0; a sum without noise is no release")
        if not (self.sensitivity >= 0 and math.isfinite(self.sensitivity)):
            raise ValueError(f"sensitivity = {self.sensitivity}: a number of at least 0")
        if type(self.parts) is not int or self.parts < 1:
            raise ValueError(f"parts = {self.parts}: an integer of at least 1")
        for name, options in (("added_by", ("server", "clients")), ("whom", ("sampled", "all"))):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} = {getattr(self, name)!r}: one of {', '.join(options)}")


@dataclass(frozen=True)
class Sample:
    """The clients of a round, and how they were chosen.

    Attributes:
        clients: the clients of the round.
        pool: all clients that could have been sampled.
        rate: the probability with which each client of the pool joins, independently of the others; None if the number
            of clients is fixed.
    """

    clients: tuple[int, ...]
    pool: tuple[int, ...]
    rate: float | None = None


@dataclass(frozen=True)
class Release:
    """A sum that the server has read.

    Attributes:
        round: from 0.
        task: from 0; the task whose samples the clients used.
        topic: topic of the messages in the channel.
        noise: noise in the sum. If clients add it, only the shares of those whose messages came.
        clients: the clients about which the sum may reveal something.
        rate: the probability with which each of these clients was part of the sum, if accounting may use it; None if
            each counts as part of the sum.
    """

    round: int
    task: int
    topic: str
    noise: Noise
    clients: tuple[int, ...]
    rate: float | None

    @property
    def multiplier(self) -> float:
        """Noise multiplier of all parts together.

        k parts count as one release whose sensitivity is sqrt(k) times as large.
        """
        return self.noise.multiplier / math.sqrt(self.noise.parts)

    @property
    def spent(self) -> Spent:
        """What was released about one of its clients."""
        if self.rate is None:
            return Spent(self.multiplier**-2)
        return Spent(sampled={(self.rate, self.multiplier): 1})


def released(
    round: int, task: int, topic: str, noise: Noise, sample: Sample, senders: tuple[int, ...], first: bool, share: float
) -> Release:
    """Return the release of a topic's sum, with the clients and the rate that accounting may use.

    If clients join independently of each other (``sample.rate``), sampling amplifies privacy in the first sum of the
    sample only, because the server has then seen the sample. It amplifies nothing if each client adds a share of the
    noise, because the amount of noise reveals the number of clients. Without amplification all clients of the pool
    count as part of the sum, because each of them may be.

    Args:
        round: from 0.
        task: from 0.
        topic: topic of the messages.
        noise: the noise as declared.
        sample: the sample of the round.
        senders: the clients that sent a message.
        first: whether the server reads this sum before all others of the sample.
        share: the share of the clients asked for a message whose messages came.
    """
    if noise.added_by == "clients" and share < 1:
        noise = Noise(**{**vars(noise), "multiplier": noise.multiplier * math.sqrt(share)})
    if noise.whom == "all" or sample.rate is None:
        return Release(round, task, topic, noise, senders, None)
    hidden = first and noise.added_by == "server" and sample.rate < 1
    return Release(round, task, topic, noise, sample.pool, sample.rate if hidden else None)
