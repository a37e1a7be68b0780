"""The ledger: all releases of a run, and what they tell about one client."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from cfl.privacy.accounting import Accountant, Spent
from cfl.privacy.release import Noise, Release, Sample, released


class Ledger:
    """Records every sum that the server reads under noise, and adds up what they cost the client that pays most.

    Two data sets are neighbours if they differ by all contributions of one client, to one release, to one task, or to
    all. A sum without noise is no release.

    Attributes:
        releases: in the order in which the server read them.
    """

    def __init__(self) -> None:
        self.releases: list[Release] = []
        self._announced: Mapping[str, Noise] = {}
        self._sample = Sample((), ())
        self._seen = True

    # Recording.

    def enter_round(self, sample: Sample | None, announced: Mapping[str, Noise]) -> None:
        """Say whom a round has, and in which sums there will be noise: topic -> noise.

        The sample is only needed if there will be any.
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
        """The server reads a topic's sum.

        Args:
            round: from 0.
            task: from 0.
            topic: of the messages.
            senders: the clients that sent one.
            came: those among them whose message is in the sum.
            asked: the clients that were asked for one, among whom a noise of the clients is shared out; the senders if
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
        """The releases of a round to come, if all clients' messages come.

        Args:
            round: from 0.
            task: from 0.
            sample: the round's.
            announced: topic -> noise.
            read_first: the topic whose sum the server will read before others of the round, noisy or not.
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
            reaches_back: whether later releases depend on the samples of earlier tasks as well. The first task then
                has all that others have.
        """
        tasks = sorted({release.task for release in self.releases})[: 1 if reaches_back else None]
        return max((epsilon(self.about(task, reaches_back), accountant) for task in tasks), default=0.0)

    def epsilon_of_client(self, accountant: Accountant, more: Sequence[Release] = ()) -> float:
        """The greatest epsilon of one client over all tasks, also with ``more`` releases."""
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
        """What messages of releases hold that has no noise, in words, with the topic."""
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
    """Epsilon of the client about which some releases tell most."""
    return max((accountant.epsilon(spent) for spent in spent_by_clients(releases)), default=0.0)


def spent_by_clients(releases: Iterable[Release]) -> list[Spent]:
    """What was released about each client, without those about whom others tell at least as much.

    Clients with the same sampled releases are compared by their other ones, which add up to a single number.
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
