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
        parts: tensors of a message that are bounded and noised each by itself, with these numbers.
        without: what else the same messages hold that has no noise, in words; empty for nothing.
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


@dataclass(frozen=True)
class Sample:
    """The clients of a round, and how they were chosen.

    Attributes:
        clients: those of the round.
        pool: all that could have been among them.
        rate: the probability with which each of the pool joins by itself; None if their number is fixed.
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
        topic: of the messages in the channel.
        noise: in the sum; of clients' shares, what those clients added whose messages came.
        clients: the clients that it may tell something about.
        rate: the probability with which each of them was part of it, where that may be used; None where each of them
            counts as part of it.
    """

    round: int
    task: int
    topic: str
    noise: Noise
    clients: tuple[int, ...]
    rate: float | None

    @property
    def multiplier(self) -> float:
        """Noise multiplier of all parts together: k parts are one release of a sensitivity that is sqrt(k) times as
        large."""
        return self.noise.multiplier / math.sqrt(self.noise.parts)

    @property
    def spent(self) -> Spent:
        """What it tells about one of its clients."""
        if self.rate is None:
            return Spent(self.multiplier**-2)
        return Spent(sampled={(self.rate, self.multiplier): 1})


def released(
    round: int, task: int, topic: str, noise: Noise, sample: Sample, senders: tuple[int, ...], first: bool, share: float
) -> Release:
    """The release of a topic's sum.

    Clients that joined by themselves (``sample.rate``) hide among those that did not, once: a sample that is used again
    has been seen. Noise of which each client adds a share tells how many they are, so that nobody hides there either.
    All of the pool then count as part of the sum, since each of them may be.

    Args:
        round: from 0.
        task: from 0.
        topic: of the messages.
        noise: as declared.
        sample: of the round.
        senders: the clients that sent a message.
        first: whether the server reads nothing else of this sample before.
        share: the share of the clients asked for a message whose messages came.
    """
    if noise.added_by == "clients" and share < 1:
        noise = Noise(**{**vars(noise), "multiplier": noise.multiplier * math.sqrt(share)})
    if noise.whom == "all" or sample.rate is None:
        return Release(round, task, topic, noise, senders, None)
    hidden = first and noise.added_by == "server" and sample.rate < 1
    return Release(round, task, topic, noise, sample.pool, sample.rate if hidden else None)
