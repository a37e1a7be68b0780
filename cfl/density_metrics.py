"""Negative log-likelihoods and their forgetting, read off the NLL matrix of one run.

``n[t, i]`` is the mean over task i's test samples of ``-log p(x)`` in nats after learning task t, both counted from 0,
NaN where it was not evaluated; lower is better. For tasks seen up to and including ``t``::

    NLL             mean over i <= t of n[t, i]
    base NLL        n[t, 0]                                       the first task
    new NLL         n[t, t]                                       the task just learned
    NLL forgetting  mean over i < t of max(0, n[t, i] - min over j < t of n[j, i])

(CONFEDMADE, section 4; the forgetting printed there has the opposite sign in the maximum, which for a loss would count
what has been gained. As there, the best earlier value may be one from before task i was learned.) A run with one
personal model per client has one such matrix per client: functions take leading dimensions, ``[..., T, T]`` to
``[...]``, and never average over them.

Worked by hand for three tasks and ``n = [[70, 90, 95], [85, 60, 88], [80, 75, 50]]``:

- NLL = (80 + 75 + 50) / 3 = 68.333..., base NLL = 80, new NLL = 50.
- NLL forgetting = (max(0, 80 - min(70, 85)) + max(0, 75 - min(90, 60))) / 2 = (10 + 15) / 2 = 12.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cfl import processes
from cfl.errors import ConfigError
from cfl.metrics import average_accuracy, last_evaluated, mean_over, own_tasks

NLL_FORMULAS: dict[str, str] = {
    "nll": "mean over i <= t of n[t, i], in nats (lower is better)",
    "base_nll": "n[t, 0], the first task, in nats (lower is better)",
    "new_nll": "n[t, t], the task just learned, in nats (lower is better)",
    "nll_forgetting": "mean over i < t of max(0, n[t, i] - min over j < t of n[j, i]), in nats (lower is better)",
}
"""What each key of :meth:`NLLMatrix.summary` means; ``n[t, i]`` is the mean negative log-likelihood of task i's test
samples after learning task t, both counted from 0."""


def nll_forgetting(n: Tensor, after: int | None = None) -> Tensor:
    """``mean_{i < t} max(0, n[t, i] - min_{j < t} n[j, i])``; rows in which a task was not evaluated are left out.

    Args:
        n: ``[..., T, T]`` NLL matrix in nats.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

    Returns:
        ``[...]`` float64 in nats; NaN for t = 0 and where a term is missing.
    """
    n = n.double()
    t = last_evaluated(n) if after is None else after
    if t is None or t == 0:
        return n.new_full(n.shape[:-2], math.nan)
    earlier = n[..., :t, :t]
    best = earlier.masked_fill(torch.isnan(earlier), math.inf).amin(-2)
    best = best.masked_fill(best == math.inf, math.nan)
    return mean_over((n[..., t, :t] - best).clamp(min=0), own_tasks(n)[..., :t])  # clamp leaves NaN alone


class NLLMatrix:
    """Sums of negative log-likelihoods, from which the NLL matrix of a run is computed.

    Sums are in float64 and additive: batches may arrive in any order, over any number of processes, before or after a
    checkpoint was loaded, and give the same matrix up to that precision. With several processes each counts a share of
    a row, from a cleared row on; :meth:`add_up` then makes it the same in all of them.

    Args:
        num_tasks: number of tasks T, at least 1.
        num_clients: number of clients C when each is evaluated by itself, at least 1; None for one global model.

    Raises:
        cfl.errors.ConfigError: a number below 1.
    """

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        if num_tasks < 1:
            raise ConfigError("num_tasks", num_tasks, "an integer of at least 1")
        if num_clients is not None and num_clients < 1:
            raise ConfigError("num_clients", num_clients, "an integer of at least 1, or null for one global model")
        self.num_tasks, self.num_clients = num_tasks, num_clients
        leading = () if num_clients is None else (num_clients,)
        # Row T is the model before any training.
        self._sums = torch.zeros((*leading, num_tasks + 1, num_tasks), dtype=torch.float64)
        self._counts = torch.zeros((*leading, num_tasks + 1, num_tasks), dtype=torch.int64)

    def update(self, row: int, task: int, total: Tensor | float, count: int, client: int | None = None) -> None:
        """Add one batch or one whole test set.

        Args:
            row: the task just learned, 0 .. T-1, or -1 for the model before any training.
            task: whose test samples these are, 0 .. T-1.
            total: sum of their negative log-likelihoods in nats.
            count: how many there are.
            client: whose model it was, 0 .. C-1; None exactly when there is one global model.

        Raises:
            ValueError: an index out of range, a client where none belongs or none where one does, or a sum that is not
                finite.
        """
        row = self._row(row)
        if not 0 <= task < self.num_tasks:
            raise ValueError(f"task = {task} cannot be; valid: 0 .. {self.num_tasks - 1}")
        if (client is None) != (self.num_clients is None) or not 0 <= (client or 0) < (self.num_clients or 1):
            valid = "None (one global model)" if self.num_clients is None else f"0 .. {self.num_clients - 1}"
            raise ValueError(f"client = {client} cannot be; valid: {valid}")
        total = float(total)
        if not math.isfinite(total) or count < 0:
            raise ValueError(f"{count} samples of task {task} have a negative log-likelihood of {total}")
        place = (row, task) if client is None else (client, row, task)
        self._sums[place] += total
        self._counts[place] += count

    def _row(self, row: int) -> int:
        if not -1 <= row < self.num_tasks:
            raise ValueError(f"row = {row} cannot be; valid: 0 .. {self.num_tasks - 1}, or -1 for before training")
        return row if row >= 0 else self.num_tasks

    def clear_row(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Forget one row (-1: before training), so that evaluating again replaces it; of these clients' matrices, or
        all."""
        place = self._place(row, clients)
        self._sums[place] = 0
        self._counts[place] = 0

    def add_up(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Add what all processes have counted in one row (-1: before training) since it was cleared in all of them.

        All processes must call it, once, with the arguments with which the row was cleared.
        """
        place = self._place(row, clients)
        added = processes.add_up({"sums": self._sums[place].clone(), "counts": self._counts[place].clone()})
        self._sums[place], self._counts[place] = added["sums"], added["counts"]

    def _place(self, row: int, clients: Sequence[int] | None) -> tuple[Any, ...]:
        return (..., self._row(row), slice(None)) if clients is None else (list(clients), self._row(row))

    def compute(self) -> Tensor:
        """``[T, T]``, or ``[C, T, T]`` for clients: nats per sample, float64, NaN where nothing was counted."""
        return self._means()[..., :-1, :]

    def initial(self) -> Tensor:
        """Before any training, ``[T]`` or ``[C, T]``, otherwise as :meth:`compute`."""
        return self._means()[..., -1, :]

    def _means(self) -> Tensor:
        return (self._sums / self._counts).masked_fill(self._counts == 0, math.nan)

    def summary(self, after: int | None = None) -> dict[str, float | None]:
        """The figures of :data:`NLL_FORMULAS`, ready for JSON; each the mean over the clients for which it is defined.

        Args:
            after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.
        """
        n = self.compute()
        t = last_evaluated(n) if after is None else after
        if t is None:
            return dict.fromkeys(NLL_FORMULAS)
        figures = {
            "nll": average_accuracy(n, t),
            "base_nll": n[..., t, 0],
            "new_nll": n[..., t, t],
            "nll_forgetting": nll_forgetting(n, t),
        }
        means = {key: figure.nanmean().item() for key, figure in figures.items()}
        summary: dict[str, float | None] = {key: None if math.isnan(mean) else mean for key, mean in means.items()}
        if self.num_clients is not None:
            summary["clients_evaluated"] = int((~torch.isnan(figures["nll"])).sum())
        return summary

    def state_dict(self) -> dict[str, Tensor]:
        """Sums and counts."""
        return {"sums": self._sums.clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: it is of other tasks or clients.
        """
        for name, own in (("sums", self._sums), ("counts", self._counts)):
            if state[name].shape != own.shape:
                found, wanted = list(state[name].shape), list(own.shape)
                raise ValueError(f"{name} is {found} in the checkpoint, {wanted} here: other tasks or clients")
            own.copy_(state[name])
