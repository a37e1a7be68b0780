"""The ledger: all releases of a run, and the epsilon of one client under them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from cfl.privacy.accounting import Accountant, Spent
from cfl.privacy.release import Noise, Release, Sample, released


class Ledger:
    """Records every noisy sum that the server reads, and computes the greatest epsilon of a client.

    Two data sets are neighbours if they differ by all contributions of one client: to one release, to one task, or to
    the whole run, depending on the figure. A sum without noise is no release.

    Attributes:
        releases: the releases in the order in which the server read them.
    """

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self._announced: Mapping[str, Noise] = {}
        self._sample = Sample((), ())
        self._seen = True

    # Recording.

    def enter_round(self, sample: Sample | None, announced: Mapping[str, Noise]) -> None:
        """Begin a round with its sample of clients and the noise that its sums will have, topic -> noise.

        The sample may be None if no sum will have noise.
        """
        self._sample = Sample((), ()) if sample is None else sample
        self._announced, self._seen = announced, False

    def read(
        self,
        round: int,
        task: int,
        topic: str,
        senders: Collection[int],
        came: Collection[int],
        asked: Collection[int] | None = None,
    ) -> None:
        """Record that the server reads a topic's sum.

        Args:
            round: from 0.
            task: from 0.
            topic: topic of the messages.
            senders: the clients that sent a message.
            came: the clients among them whose message is in the sum.
            asked: the clients that were asked for a message, among whom the noise of clients is divided; the senders if
                None. A client that drops out, or whose model is not finite, may have sent nothing.
        """
        noise, first, self._seen = self._announced.get(topic), not self._seen, True
        if noise is None:
            return
        whole = len(senders if asked is None else asked)
        share = len(came) / whole if whole else 1.0
        of = tuple(sorted(senders))
        self.releases.append(released(round, task, topic, noise, self._sample, of, first, share))

    @staticmethod
    def foreseen(
        round: int, task: int, sample: Sample, announced: Mapping[str, Noise], read_first: str
    ) -> list[Release]:
        """The releases of a future round, if the messages of all clients come.

        Args:
            round: from 0.
            task: from 0.
            sample: the clients of the round.
            announced: topic -> noise.
            read_first: the topic whose sum, noisy or not, the server will read first in the round.
        """
        whom = {"sampled": sample.clients, "all": sample.pool}
        return [
            released(round, task, topic, noise, sample, whom[noise.whom], topic == read_first, 1.0)
            for topic, noise in announced.items()
        ]

    # Figures.

    def epsilon_of_release(self, accountant: Accountant) -> float:
        """The greatest epsilon of a single release."""
        return max((accountant.epsilon(release.spent) for release in self.releases), default=0.0)

    def epsilon_of_task(self, accountant: Accountant, reaches_back: bool) -> float:
        """The greatest epsilon of one client's data of one task.

        Args:
            accountant: computes it.
            reaches_back: whether later releases depend on the samples of earlier tasks as well. The releases
                about the first task then include those about all others.
        """
        tasks = sorted({release.task for release in self.releases})[: 1 if reaches_back else None]
        return max((epsilon(self.about(task, reaches_back), accountant) for task in tasks), default=0.0)

    def epsilon_of_client(self, accountant: Accountant, more: Sequence[Release] = ()) -> float:
        """The greatest epsilon of one client over all tasks, with ``more`` releases added to those recorded."""
        return epsilon([*self.releases, *more], accountant)

    def about(self, task: int, reaches_back: bool) -> list[Release]:
        """The releases that depend on the samples of a task."""
        return [one for one in self.releases if one.task == task or (reaches_back and one.task > task)]

    @property
    def topics(self) -> set[str]:
        """Topics of the releases."""
        return {release.topic for release in self.releases}

    @property
    def uncovered(self) -> list[str]:
        """The contents of releases' messages that have no noise, as ``topic: description``."""
        found = [f"{one.topic}: {one.noise.without}" for one in self.releases if one.noise.without]
        return list(dict.fromkeys(found))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All releases, as plain values; clients that several releases share are listed once."""
        groups = {clients: number for number, clients in enumerate(dict.fromkeys(r.clients for r in self.releases))}
        rows = [[r.round, r.task, r.topic, list(astuple(r.noise)), groups[r.clients], r.rate] for r in self.releases]
        return {"clients": [list(clients) for clients in groups], "releases": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        groups = [tuple(clients) for clients in state["clients"]]
        self.releases = [
            Release(round, task, topic, Noise(*noise), groups[group], rate)
            for round, task, topic, noise, group, rate in state["releases"]
        ]


def epsilon(releases: Iterable[Release], accountant: Accountant) -> float:
    """The greatest epsilon of a client under some releases."""
    return max((accountant.epsilon(spent) for spent in spent_by_clients(releases)), default=0.0)


def spent_by_clients(releases: Iterable[Release]) -> list[Spent]:
    """What was released about each client, without clients whose epsilon is at most that of another.

    Of all clients with the same sampled releases, only the one with the greatest :attr:`Spent.gaussian` is kept.
    """
    gaussian: defaultdict[int, float] = defaultdict(float)
    pools: dict[tuple[int, ...], Counter[tuple[float, float]]] = {}
    for release in releases:
        if release.rate is None:
            cost = release.multiplier**-2
            for client in release.clients:
                gaussian[client] += cost
        else:
            pools.setdefault(release.clients, Counter())[release.rate, release.multiplier] += 1
    clients = sorted({*gaussian, *(client for pool in pools for client in pool)})
    within = np.array([np.isin(clients, pool) for pool in pools], dtype=bool).reshape(len(pools), len(clients))
    greatest: dict[bytes, int] = {}
    for place, client in enumerate(clients):
        key = within[:, place].tobytes()
        if key not in greatest or gaussian[client] > gaussian[clients[greatest[key]]]:
            greatest[key] = place
    found = []
    for place in greatest.values():
        sampled: Counter[tuple[float, float]] = Counter()
        for number, counts in enumerate(pools.values()):
            if within[number, place]:
                sampled += counts
        found.append(Spent(gaussian[clients[place]], dict(sampled)))
    return found
