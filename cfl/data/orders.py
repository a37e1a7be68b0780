"""The order in which the clients of a round go through their samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfl.randomness.generators import seed_for
from cfl.randomness.seed_sequences import numpy_generator_of, pcg64_words


class RoundOrders:
    """Draws an order of samples for every client and local epoch, keyed by (seed, round, client, epoch).

    Args:
        seed: the run's seed.
        round: the round.
        clients: the clients to draw orders for.
        epochs: local epochs.
    """

    def __init__(self, seed: int, round: int, clients: Sequence[int], epochs: int) -> None:
        self.epochs = epochs
        self._row = {client: row for row, client in enumerate(clients)}
        seeds = [seed_for(seed, "shuffle", round, client, epoch) for client in clients for epoch in range(epochs)]
        self._words = pcg64_words(seeds).reshape(len(clients), epochs, 4)

    def cut(
        self, clients: Sequence[int], samples: Sequence[np.ndarray], steps: Sequence[int], batch_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Order some clients' samples and cut them into local steps.

        Args:
            clients: the k ids.
            samples: ``[n]`` indices of each client's samples, n at least 1.
            steps: local steps of each client, all epochs together, at least 1.
            batch_size: B.

        Returns:
            ``[k, S, B]`` int64 indices and ``[k, S, B]`` bool, False for padding: after an epoch's last sample, and
            after a client's last step if others have more. The index repeats the client's first sample there. B is at
            most the number of samples of the largest client.
        """
        batch_size = min(batch_size, max(map(len, samples)))  # wider steps would be padding for all
        index = np.empty((len(clients), max(steps), batch_size), dtype=np.int64)
        mask = np.zeros(index.shape, dtype=bool)
        for row, (client, own, count) in enumerate(zip(clients, samples, steps, strict=True)):
            places, used_places = index[row].reshape(-1), mask[row].reshape(-1)
            places.fill(own[0])
            room = count // self.epochs * batch_size
            used = min(len(own), room)
            for epoch, words in enumerate(self._words[self._row[client]]):
                order = numpy_generator_of(words).permutation(len(own))
                here = slice(epoch * room, epoch * room + used)
                places[here] = own[order[:used]]
                used_places[here] = True
        return index, mask
