"""Figures of a run's sums of integers: seconds, counts and rounding errors."""

from __future__ import annotations

import math
from typing import Any

from cfl.runtime import distributed
from cfl.secure_sums.codec import Codec

_ADDED = ("numbers", "squares", "sums", "messages")
_KEPT = ("range", "bits", "modulus", "step", "weight")


class SumFigures:
    """Figures of a run's sums, by topic.

    Attributes:
        seconds: seconds spent on integers, masks and the protocol: in this process, after :meth:`synchronise` those of
            the slowest process.
        topics: topic -> its codec and counts.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.topics: dict[str, dict[str, float]] = {}
        self._agreed: dict[str, dict[str, float]] = {}

    def _of(self, topic: str) -> dict[str, float]:
        return self.topics.setdefault(topic, dict.fromkeys((*_ADDED, "largest"), 0.0))

    def add(self, topic: str, codec: Codec, numbers: int, largest: float, squares: float) -> None:
        """Count messages.

        Args:
            topic: topic of the messages.
            codec: codec of the topic, with its modulus.
            numbers: how many numbers the messages hold.
            largest: greatest magnitude of the messages' integers.
            squares: sum of the squared rounding errors.
        """
        known = self._of(topic)
        known |= {"range": codec.range, "bits": codec.bits, "weight": codec.weight, "step": codec.step()}
        known["modulus"] = max(known.get("modulus", 0), codec.modulus or 64)
        known["numbers"] += numbers
        known["squares"] += squares
        known["largest"] = max(known["largest"], largest / codec.greatest)

    def sums(self, topic: str, messages: int) -> None:
        """Count a sum that was read, of this many messages."""
        known = self._of(topic)
        known["sums"] += 1
        known["messages"] += messages

    def summary(self) -> dict[str, Any]:
        """Return the seconds, and by topic the codec, the number of sums and of messages in them, and errors.

        ``rounding_error`` is the root mean square error of a number in a message. ``largest_share_of_range`` is the
        share of the codec's range that the largest number took.
        """
        found = {}
        for topic, known in self.topics.items():
            found[topic] = {
                **{key: known.get(key) for key in _KEPT},
                "sums": int(known["sums"]),
                "messages": int(known["messages"]),
                "rounding_error": _three_digits(math.sqrt(known["squares"] / max(1.0, known["numbers"]))),
                "largest_share_of_range": _three_digits(known["largest"]),
            }
        return {"seconds": self.seconds, "topics": found}

    # Checkpoints and processes.

    def state_dict(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {"seconds": self.seconds, "topics": {topic: dict(known) for topic, known in self.topics.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.seconds = state["seconds"]
        self.topics = {topic: dict(known) for topic, known in state["topics"].items()}
        self._agreed = self.state_dict()["topics"]

    def synchronise(self) -> None:
        """Combine the figures of all processes. All processes must call this."""
        if distributed.count() == 1:
            return
        everyones = distributed.gather(self.state_dict())
        self.seconds = max(theirs["seconds"] for theirs in everyones)
        for topic in dict.fromkeys(topic for theirs in everyones for topic in theirs["topics"]):
            seen = [theirs["topics"][topic] for theirs in everyones if topic in theirs["topics"]]
            before = self._agreed.get(topic, {})
            merged = max(seen, key=len) | {key: max(of[key] for of in seen) for key in ("largest", "sums", "messages")}
            for key in ("numbers", "squares"):
                merged[key] = before.get(key, 0.0) + sum(of[key] - before.get(key, 0.0) for of in seen)
            self.topics[topic] = merged
        self._agreed = self.state_dict()["topics"]


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
