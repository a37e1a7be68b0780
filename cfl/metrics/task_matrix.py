"""The matrix of a measure on every task after learning every task, kept as sums and counts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from cfl.metrics.transfer import average_accuracy, last_evaluated, transfers
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError


class TaskMatrix(Metric, ABC):
    """Sums and counts of a measure over the test samples of each task, after every task and before any training.

    Sums and counts are additive: batches may arrive in any order, in any number of processes, before or after a
    checkpoint was loaded. They are part of ``state_dict()``. With several processes, each one fills its share of a
    cleared row, and :meth:`add_up` adds up the shares of all processes.

    Attributes:
        sums: ``[T + 1, T]``, or ``[C, T + 1, T]`` for clients: row t after learning task t, row T before any training.
        counts: number of samples in each sum, int64, of the shape of ``sums``.

    Args:
        num_tasks: number of tasks T of the stream, at least 1.
        num_clients: number of clients C when each is evaluated on a model of its own, at least 1; None for one
            global model.
        dtype: dtype of the sums.

    Raises:
        cfl.runtime.errors.ConfigError: a number below 1.
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better: bool  # torchmetrics allows None
    scale = 1.0  # factor of the means, 100 for percent
    sums: Tensor
    counts: Tensor

    def __init__(self, num_tasks: int, num_clients: int | None, dtype: torch.dtype) -> None:
        # No cache: torchmetrics does not notice when clear_row, merge_state or load_state_dict change counts.
        # No reduction by torchmetrics: it would add up over processes what add_up has already added up.
        super().__init__(compute_with_cache=False, sync_on_compute=False)
        if num_tasks < 1:
            raise ConfigError("num_tasks", num_tasks, "an integer of at least 1")
        if num_clients is not None and num_clients < 1:
            raise ConfigError("num_clients", num_clients, "an integer of at least 1, or null for one global model")
        self.num_tasks, self.num_clients = num_tasks, num_clients
        shape = (num_tasks + 1, num_tasks) if num_clients is None else (num_clients, num_tasks + 1, num_tasks)
        self.add_state("sums", torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum", persistent=True)
        self.add_state("counts", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum", persistent=True)

    def clear_row(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Forget one row (-1: before training), so that evaluating again replaces it.

        Args:
            row: the row.
            clients: the clients whose matrices are cleared; None for all clients, or for the global model.

        Raises:
            ValueError: ``row`` is not -1 .. T-1.
        """
        place = self._rows(row, clients)
        for name in self._defaults:
            getattr(self, name)[place] = 0

    def add_up(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Add up the sums and counts of one row (-1: before training) over all processes.

        All processes must call this once, with the arguments with which the row was cleared.

        Raises:
            ValueError: ``row`` is not -1 .. T-1.
        """
        place = self._rows(row, clients)
        # On the CPU: the counts of a process without a share may not be on its accelerator yet.
        added = distributed.add_up({name: getattr(self, name)[place].cpu() for name in self._defaults})
        for name, total in added.items():
            getattr(self, name)[place] = total.to(getattr(self, name).device)

    def compute(self) -> Tensor:
        """The matrix of means.

        Returns:
            ``[T, T]``, or ``[C, T, T]`` for clients: float64, on the CPU; NaN where nothing was counted.

        Raises:
            ValueError: sums and counts that cannot belong to each other.
        """
        return self._means()[..., :-1, :]

    def initial(self) -> Tensor:
        """The means before any training, ``[T]`` or ``[C, T]``, otherwise as :meth:`compute`."""
        return self._means()[..., -1, :]

    def add(
        self, row: int, task: int, outputs: Tensor, y: Tensor, allowed: Tensor | None, client: int | None = None
    ) -> None:
        """Add a test batch of B samples: by ``update`` with outputs and targets, unless a subclass has another.

        Args:
            row: the task just learned, 0 .. T-1, or -1 for the model before any training.
            task: the task of the test samples, 0 .. T-1.
            outputs: the model's outputs, ``[B, ...]``.
            y: the targets, ``[B, ...]``.
            allowed: ``[O]`` bool, the outputs that count, or None for all.
            client: the client whose model was tested, 0 .. C-1; None exactly when there is one global model.

        Raises:
            ValueError: an index out of range, or ``client`` given for one global model or missing otherwise.
        """
        self.update(row, task, outputs, y, client)

    def summary(self, after: int | None = None) -> dict[str, float | None]:
        """The run's figures, ready for JSON: those of :attr:`cfl.metrics.base.Measure.formulas`, None where undefined.

        With a matrix per client each figure is computed per client, over the tasks that the client holds, and then
        averaged over the clients for which it is defined. ``clients_evaluated`` is the number of clients with the
        first figure.

        Args:
            after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

        Raises:
            ValueError: ``after`` is not a row.
        """
        a = self.compute()
        t = last_evaluated(a) if after is None else after
        figures = self._figures(a, t)
        means = {key: figure.nanmean().item() for key, figure in figures.items()}
        summary: dict[str, float | None] = {key: None if math.isnan(mean) else mean for key, mean in means.items()}
        if self.num_clients is not None:
            first = next(iter(figures.values()))
            summary |= self._of_clients(first[~torch.isnan(first)])
        return summary

    @abstractmethod
    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        """The figures of a summary by key, each ``[]``, or ``[C]`` with a matrix per client; NaN where undefined.

        Args:
            a: the matrix that :meth:`compute` returns.
            t: the row.
        """

    def _mean_and_transfers(self, name: str, a: Tensor, t: int) -> dict[str, Tensor]:
        """The mean over the tasks seen under ``name``, and FGT, BWT and FWT, whose keys begin with it."""
        moved = transfers(a, self.initial(), not self.higher_is_better, t)
        return {name: average_accuracy(a, t), **{f"{name}_{key}": figure for key, figure in moved.items()}}

    def _of_clients(self, defined: Tensor) -> dict[str, float | None]:
        """Return entries of a summary about the first figure's values ``[n]`` of the clients that have one."""
        return {"clients_evaluated": len(defined)}

    def beside(self) -> dict[str, Tensor]:
        """Further matrices of the shape of :meth:`compute`, by the names that their columns get in ``rounds.csv``."""
        return {}

    def details(self, after: int) -> dict[str, Any]:
        """Return further entries of a run's summary for JSON, such as figures of single tasks.

        Args:
            after: the row t, 0 .. T-1.
        """
        return {}

    def _means(self) -> Tensor:
        # On the CPU: some accelerators have no float64, and the readers are tables and pictures.
        sums, counts = self.sums.cpu().double(), self.counts.cpu()
        return (self.scale * sums / counts).masked_fill(counts == 0, math.nan)

    def _row(self, row: int) -> int:
        if not -1 <= row < self.num_tasks:
            raise ValueError(f"row = {row} cannot be; valid: 0 .. {self.num_tasks - 1}, or -1 for before training")
        return row if row >= 0 else self.num_tasks

    def _rows(self, row: int, clients: Sequence[int] | None) -> tuple[Any, ...]:
        """Return the index of one row in the matrices of some clients; None for all clients or the global model."""
        of_all = () if self.num_clients is None else (slice(None),)
        return (*of_all, self._row(row)) if clients is None else (list(clients), self._row(row))

    def _place(self, row: int, task: int, client: int | None) -> tuple[int, ...]:
        """The index of one element.

        Raises:
            ValueError: an index out of range, or ``client`` given for one global model or missing otherwise.
        """
        line = self._row(row)
        if not 0 <= task < self.num_tasks:
            raise ValueError(f"task = {task} cannot be; valid: 0 .. {self.num_tasks - 1}")
        if (client is None) != (self.num_clients is None) or not 0 <= (client or 0) < (self.num_clients or 1):
            valid = "None (one global model)" if self.num_clients is None else f"0 .. {self.num_clients - 1}"
            raise ValueError(f"client = {client} cannot be; valid: {valid}")
        return (line, task) if client is None else (client, line, task)

    def _wrap_compute(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # torchmetrics would turn the matrix of a single task into a scalar, and warn about a matrix without entries.
        return compute

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torchmetrics would accept a state of any shape, keep it on the checkpoint's device, share its memory, and
        # not report a missing state.
        for name, default in self._defaults.items():
            key = prefix + name
            assert isinstance(default, Tensor)
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != default.shape:
                found, wanted = list(state_dict.pop(key).shape), list(default.shape)
                error_msgs.append(f"{key} is {found} in the checkpoint, {wanted} here: other tasks or clients")
            else:
                state_dict[key] = state_dict[key].to(self.device, default.dtype, copy=True)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
