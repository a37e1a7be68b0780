"""The replay buffer of each client: earlier samples, stored during training and shared by all methods that replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions.client_shares import share_sizes
from cfl.data.task_handles import TaskHandles, unwrap_tasks
from cfl.engines.cohort import Cohort
from cfl.federation.client_states import ClientStates
from cfl.federation.replay_memory import RULES, Rule, chosen, slots, winners
from cfl.randomness.generators import seed_for
from cfl.runtime.memory import require_memory
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers

TOPIC = "buffer"
BETWEEN_ROUNDS = -1
"""Used as the number of a local step after a round, so that augmentation differs from that of all its steps."""


@dataclass(frozen=True)
class Replayed:
    """Samples drawn from k clients' buffers.

    Attributes:
        x: ``[k, m, C, H, W]`` network input.
        y: ``[k, m]`` int64 output index, or ``[k, m, D]`` numbers.
        tasks: opaque tasks of the ``[k, m]`` samples, to be passed on. They decide which outputs a sample trains.
        mask: ``[k, m]`` bool, False where a client has fewer samples; the other fields then repeat a sample of the
            client, or of another client if it has none.
        logits: ``[k, m, O]`` of the model at the time when the samples were stored; None if logits are not stored.
        padded: whether any entry of ``mask`` is False.
    """

    x: Tensor
    y: Tensor
    tasks: TaskHandles
    mask: Tensor
    logits: Tensor | None
    padded: bool

    def as_step_of(self, batch: CohortBatch) -> CohortBatch:
        """A local step of the clients of ``batch`` that trains on these samples instead."""
        x, y, tasks = (values.flatten(0, 1) for values in (self.x, self.y, unwrap_tasks(self.tasks)))
        index = torch.arange(len(y), device=y.device).view(self.mask.shape)
        return replace(
            batch,
            index=index,
            mask=self.mask,
            padded=self.padded,
            gather=lambda places: (x[places], y[places]),
            tasks_of_own=lambda places: TaskHandles(tasks[places]),
            handles=None,
            added=(),
            extras={},
        )


class ReplayBuffer:
    """Up to ``size`` samples per client, chosen among those that it has trained on.

    Neither task ids nor task boundaries decide which samples are stored. There is a buffer only if a method uses it. A
    sample is stored as its global index in the client's own data, with the random bits of its augmentation. The result
    is the same as if images were stored, and memory is counted as if they were.

    Sources: Algorithms 2 and 4 of Fed-A-GEM (Dai et al., 2024); their code offers every sample once and keeps it
    augmented, the paper offers each batch of each round and says nothing of augmentation. Vitter (1985) for the
    reservoir.

    Args:
        size: samples per client.
        rule: which of the offered samples are stored (:func:`cfl.federation.replay_memory.slots`).
        offered: ``once``: a sample is offered only in the step in which its client first trains on it, so that a
            reservoir is uniform over distinct samples. ``every_step``: a sample is offered whenever it is trained on.
        keeps: ``augmented``: an image is replayed as it was trained on. ``raw``: an image is augmented anew each time
            it is replayed, in a local step or between rounds. Without ``data.augmentation`` both are the same.

    Raises:
        ConfigError: a value other than these.
    """

    def __init__(
        self,
        size: int = 200,
        rule: Rule = "reservoir",
        offered: Literal["once", "every_step"] = "once",
        keeps: Literal["augmented", "raw"] = "augmented",
    ) -> None:
        check_integers("buffer", 1, at_most=MOST_AT_ONCE, size=size)
        check_choices("buffer", RULES, rule=rule)
        check_choices("buffer", ("once", "every_step"), offered=offered)
        check_choices("buffer", ("augmented", "raw"), keeps=keeps)
        self.size, self.offered, self.keeps = size, offered, keeps
        self.rule: Rule = rule
        self._table: dict[str, Tensor] = {}
        self._offers = True
        self._own: list[np.ndarray] = []

    def bind(self, states: ClientStates, data: FederatedDataModule, logits: bool) -> None:
        """Connect the buffer to the clients' states and data.

        Args:
            states: storage of the clients' states.
            data: tasks and clients.
            logits: whether the samples' logits are stored.
        """
        self._states, self._data, self.keeps_logits = states, data, logits
        self._augmented = data.augmentation is not None and self.keeps == "augmented"
        each = 8 * (2 + data.num_outputs * logits)
        require_memory("buffer.size", self.size, self.size * each * (1 + data.rounds.most_clients), "fewer samples")
        self._empty = {
            "place": torch.full((self.size,), -1, dtype=torch.int64),
            "seen": torch.zeros((), dtype=torch.int64),
        }
        if self._augmented:
            self._empty["word"] = torch.zeros(self.size, dtype=torch.int64)
        if logits:
            self._empty["logits"] = torch.zeros(self.size, data.num_outputs)
        if self.offered == "once":
            held = np.zeros(data.num_clients, dtype=np.int64)
            for own in data.indices:
                held[list(own)] += share_sizes(own)
            self._empty["known"] = torch.zeros(int(held.max()), dtype=torch.bool)

    def _places_of(self, client: int) -> np.ndarray:
        """Ascending global indices of all samples that a client holds in any task."""
        own = [self._data.client_global_index(task, client) for task in range(self._data.num_tasks)]
        return np.sort(np.concatenate(own))

    # Local training.

    def open(self, cohort: Cohort) -> None:
        """Load the buffers of clients that are about to train."""
        self._table = self._states.gather(TOPIC, cohort.clients, self._empty)
        if self.keeps_logits:  # on the cohort's device, or every step would have to wait for their copy
            device = next(iter(cohort.parameters.values())).device
            self._table["logits"] = moved(self._table["logits"], device)
        self._own = [self._places_of(client) for client in cohort.clients] if self.offered == "once" else []
        self._offers = self.offered == "every_step" or any(
            self._has_news(row, client, cohort.task) for row, client in enumerate(cohort.clients)
        )

    def _has_news(self, row: int, client: int, task: int) -> bool:
        """Whether a client will train on a sample for the first time."""
        ranks = torch.from_numpy(np.searchsorted(self._own[row], self._data.global_index_trained_on(task, client)))
        return not bool(self._table["known"][row, ranks].all())

    @property
    def wants_logits(self) -> bool:
        """Whether :meth:`offer` needs the logits of the current cohort's steps."""
        return self.keeps_logits and self._offers

    def offer(self, cohort: Cohort, batch: CohortBatch, logits: Tensor | None) -> None:
        """Offer the samples of a local step to the buffers.

        Args:
            cohort: the clients.
            batch: the step.
            logits: ``[k, B, O]`` of the step's own samples; needed if :attr:`wants_logits`.
        """
        if not self._offers:
            return
        table, present, index = self._table, cohort.trained_on(batch.mask_on_cpu), batch.index_on_cpu
        places = index if batch.tasks_of_own is not None else index + int(self._data.global_index.starts[batch.task])
        if self.offered == "once":
            present = present & self._first_time(places, present)
        number = table["seen"].unsqueeze(1) + present.cumsum(1) - 1
        last = winners(slots(self.rule, self.size, number, self._keys("rule", cohort.clients)), present, self.size)
        taken, source = last >= 0, last.clamp(min=0)
        table["seen"] += present.sum(1)
        table["place"] = torch.where(taken, places.gather(1, source), table["place"])
        if self._augmented:
            words = self._data.inputs.words(*self._data.global_index.split(places), (cohort.round, batch.step))
            table["word"] = torch.where(taken, words.gather(1, source), table["word"])
        if self.keeps_logits:
            if logits is None:
                raise RuntimeError("a buffer that keeps logits was offered samples without")
            rows, columns = taken.nonzero(as_tuple=True)
            place = moved(rows, logits.device), moved(columns, logits.device)
            new = logits[place[0], moved(source[rows, columns], logits.device)]
            table["logits"][place] = new.to(table["logits"].dtype)

    def _first_time(self, places: Tensor, present: Tensor) -> Tensor:
        """``[k, B]`` bool, True for samples that their client trains on for the first time. They become known."""
        known = self._table["known"]
        fresh = torch.zeros_like(present)
        for row, own in enumerate(self._own):
            ranks = torch.from_numpy(np.searchsorted(own, places[row].numpy())).clamp(max=max(len(own) - 1, 0))
            fresh[row] = ~known[row, ranks]
            known[row, ranks[present[row]]] = True
        return fresh

    def close(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Save the buffers of the clients at ``positions``, which have finished with finite models."""
        rows = torch.tensor(positions)
        clients = [cohort.clients[p] for p in positions]
        table = {name: values[moved(rows, values.device)].cpu() for name, values in self._table.items()}
        self._states.scatter(TOPIC, clients, table)

    # Replay.

    def draw(self, cohort: Cohort, batch: CohortBatch, count: int, purpose: str) -> Replayed | None:
        """Draw up to ``count`` samples for each client that takes a step, uniformly without replacement.

        Returns None if no client has a sample.

        Args:
            cohort: the clients, with their buffers before the step.
            batch: the step.
            count: at least 1.
            purpose: names the draw within the step.
        """
        keys = self._keys(purpose, cohort.clients, cohort.round, batch.step)
        # The result of a client that has finished must not depend on how many more steps the others take.
        filled = (self._table["place"] >= 0) & batch.mask_on_cpu.any(1, keepdim=True)
        return self._replayed(self._table, filled, keys, count, (cohort.round, batch.step), batch.index.device)

    def draw_between_rounds(
        self, clients: Sequence[int], round: int, count: int, purpose: str, device: torch.device
    ) -> Replayed | None:
        """Draw samples after a round, for clients that are not training; otherwise like :meth:`draw`."""
        table = self._states.gather(TOPIC, clients, self._empty)
        keys, moment = self._keys(purpose, clients, round), (round, BETWEEN_ROUNDS)
        return self._replayed(table, table["place"] >= 0, keys, count, moment, device)

    def _replayed(
        self,
        table: dict[str, Tensor],
        filled: Tensor,
        keys: Tensor,
        count: int,
        moment: tuple[int, int],
        device: torch.device,
    ) -> Replayed | None:
        held, mask = chosen(filled, count, keys)
        if not mask.any():
            return None
        # Masked entries repeat an existing sample, so that padding is always valid data.
        first = table["place"].amax(1, keepdim=True)
        places = torch.where(mask, table["place"].gather(1, held), torch.where(first < 0, first.max(), first))
        words = table["word"].gather(1, held) if self._augmented else None
        x, y, tasks = self._data.samples_at(places, moment, words, device)
        logits = None
        if self.keeps_logits:
            logits = moved(table["logits"], device)
            logits = logits.gather(1, moved(held, device).unsqueeze(-1).expand(-1, -1, logits.shape[2]))
        return Replayed(x, y, tasks, moved(mask, device), logits, padded=not bool(mask.all()))

    def fill(self, clients: Sequence[int]) -> Tensor:
        """``[k]`` int64, number of samples that these clients have stored, between rounds."""
        return (self._states.gather(TOPIC, clients, self._empty)["place"] >= 0).sum(1)

    def holders(self) -> list[int]:
        """The clients that have stored a sample, ascending. Called after a round; the same in all processes."""
        keeping = self._states.holders(TOPIC)  # a client's buffer may be stored but empty
        return [client for client, held in zip(keeping, self.fill(keeping).tolist(), strict=True) if held]

    def _keys(self, purpose: str, clients: Sequence[int], *indices: int) -> Tensor:
        seeds = [seed_for(self._data.seed, f"buffer {purpose}", client, *indices) for client in clients]
        return torch.tensor(seeds, dtype=torch.int64)

    def client_storage(self) -> int:
        """Bytes of a client's full buffer, as if images were stored.

        A sample takes a byte per pixel, one for its label, one for its task, and its logits if they are stored. With
        ``offered: once`` each sample of the client takes a further bit, which marks it as offered."""
        channels, height, width = self._data.input_shape
        each = channels * height * width + 2
        if self.keeps_logits:
            each += self._data.num_outputs * self._empty["logits"].element_size()
        known = len(self._empty["known"]) if self.offered == "once" else 0
        return self.size * each + -(-known // 8)
