"""Local steps of K clients, as single steps or as blocks of consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from cfl.data.exposure import Handles
from cfl.data.samples import ExtraSamples, Samples, join_samples
from cfl.data.task_handles import TaskHandle, TaskHandles, unwrap_task, unwrap_tasks
from cfl.runtime.moving import moved

Found = TypeVar("Found")


@dataclass(frozen=True)
class CohortBatch:
    """One local step of up to K clients.

    A client with fewer samples or steps than others of the cohort is padded: its ``mask`` is False there, and the index
    repeats one of its own samples, so that padding is always valid data.

    Attributes:
        clients: the K clients' ids; empty in a round without clients, and in a process that has fewer batches than
            others.
        sizes: number of training samples of each of the K clients.
        index: ``[K, B]`` int64 into the task's training set.
        mask: ``[K, B]`` bool, False where padded.
        padded: whether any entry of ``mask`` is False.
        task: the task of all of these clients.
        cohort: number of the cohort within the round.
        step: local step, from 0; -1 without clients.
        closes: positions (0..K-1) of the clients for which this is the last step.
        last_of_round: whether no batch follows in this round.
        gather: function from ``[...]`` indices to ``[..., C, H, W]`` network input and ``[...]`` int64 output indices
            of the task's samples, on the indices' device; set when the batch is on its device. Samples are fetched when
            an engine uses them, in the thread that computes with them.
        added: samples that methods have added. They are not in ``index``, ``mask``, ``x`` and ``y``.
        extras: name -> ``[K, B, ...]``, further tensors about the step's own samples for methods' losses.
        tasks_of_own: function from ``index`` to the tasks of the step's own samples, or to handles of these tasks;
            None means that all samples are of ``task``.
        handles: function that returns the handles for ``index``, which do not show the samples' tasks; set with
            ``gather``.
        cpu_copies: pairs of a tensor and its copy on the CPU, for :attr:`index` and :attr:`mask`, if the batch was
            moved to a device.
        gather_from_cpu: the function that :attr:`gather` was at first, if it would have to read indices that are on an
            accelerator. It also takes them on the CPU, with the device of the samples as ``device``. Not used if
            :attr:`gather` has been replaced.
    """

    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    index: Tensor
    mask: Tensor
    padded: bool
    task: int
    cohort: int
    step: int
    closes: tuple[int, ...]
    last_of_round: bool
    gather: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    added: tuple[ExtraSamples, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    tasks_of_own: Callable[[Tensor], Tensor | TaskHandles] | None = None
    handles: Callable[[], Handles] | None = None
    cpu_copies: tuple[tuple[Tensor, Tensor], ...] = ()
    gather_from_cpu: Callable[..., tuple[Tensor, Tensor]] | None = None

    def with_added(self, added: ExtraSamples) -> CohortBatch:
        """The same step with further samples."""
        return replace(self, added=(*self.added, added))

    def with_extras(self, extras: Mapping[str, Tensor]) -> CohortBatch:
        """The same step with further extras of its own samples: name -> ``[K, B, ...]``."""
        return replace(self, extras={**self.extras, **extras})

    def without_tasks(self) -> CohortBatch:
        """The same step with hidden tasks, for a task-free method. ``index`` holds the samples' handles
        (:class:`cfl.data.exposure.Handles`), which ``gather`` and the method's context accept.

        Raises:
            RuntimeError: the batch has not passed through the data module.
        """
        return self._task_free

    @cached_property
    def _task_free(self) -> CohortBatch:
        of_own, gather, names = self.tasks_of_own, self.gather, self._names
        hidden = None if of_own is None else lambda index: TaskHandles(unwrap_tasks(of_own(index)))
        index, there = names.of(self.index), self._known_on_cpu(self.index)
        fetch = None if gather is None else _through(names.global_index, gather)
        return replace(
            self,
            index=index,
            task=cast(int, TaskHandle(self.task)),
            added=tuple(replace(part, tasks=TaskHandles(unwrap_tasks(part.tasks))) for part in self.added),
            gather=fetch,
            tasks_of_own=None if hidden is None else _through(names.global_index, hidden),
            handles=None,
            cpu_copies=self.cpu_copies if there is None else (*self.cpu_copies, (index, names.of(there))),
            gather_from_cpu=fetch if gather is self.gather_from_cpu else None,
        )

    @cached_property
    def _names(self) -> Handles:
        if self.handles is None:
            raise RuntimeError("a cohort batch without handles: it has not passed through the data module")
        return self.handles()

    def with_tasks(self, original: CohortBatch) -> CohortBatch:
        """This step, made from ``original.without_tasks()`` by a method, with the original's tasks and indices."""
        shown, names = original.without_tasks(), original._names
        gather = original.gather
        if self.gather is not None and self.gather is not shown.gather:
            gather = _through(names.of, self.gather)
        return replace(
            self,
            index=original.index if self.index is shown.index else names.global_index(self.index),
            task=original.task,
            gather=gather,
            tasks_of_own=original.tasks_of_own,
            handles=original.handles,
            gather_from_cpu=original.gather_from_cpu,
        )

    def unwrapped(self) -> CohortBatch:
        """The same step with visible tasks; for functions that act on a method's behalf."""
        of_own = self.tasks_of_own
        seen = None if of_own is None else lambda index: unwrap_tasks(of_own(index))
        return replace(self, task=unwrap_task(self.task), tasks_of_own=seen)

    @property
    def joined(self) -> bool:
        """Whether this step has added samples, extras or tasks of its own samples, beside ``x``, ``y`` and ``mask``."""
        return bool(self.added or self.extras or self.tasks_of_own)

    def joined_samples(self, train_outputs: Tensor | None) -> tuple[Tensor, Samples]:
        """Inputs ``[K, B + M, C, H, W]``, new memory, and all other tensors: own samples first, then added ones.

        Args:
            train_outputs: ``[T, O]`` bool, outputs in the loss of each task, or None for all.
        """
        x, y = self._gather()
        samples = join_samples(y, self.mask, self.task_ids, self.extras, self.added, train_outputs)
        return torch.cat([x, *(part.x for part in self.added)], 1) if self.added else x, samples

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        return self._gather()

    def _gather(self, *part: int | slice) -> tuple[Tensor, Tensor]:
        """The samples of a part of :attr:`index`."""
        if self.gather is None:
            raise RuntimeError("a cohort batch without samples: it has not passed through the data module")
        there = self._known_on_cpu(self.index)
        if there is not None and self.gather_from_cpu is self.gather:
            return self.gather_from_cpu(there[part], device=self.index.device)
        return self.gather(self.index[part])

    @property
    def x(self) -> Tensor:
        """``[K, B, C, H, W]`` network input."""
        return self._samples[0]

    @property
    def y(self) -> Tensor:
        """``[K, B]`` int64 output index."""
        return self._samples[1]

    def samples(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """``[count, C, H, W]`` inputs and ``[count]`` outputs: the first samples of one client, new memory."""
        return self._gather(row, slice(count))

    def stacked_samples(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """``[stop - start, B, C, H, W]`` inputs and ``[stop - start, B]`` outputs of some clients, new memory."""
        return self._gather(slice(start, stop))

    @property
    def opens(self) -> bool:
        """Whether this is the cohort's first step."""
        return self.step == 0

    @property
    def task_ids(self) -> Tensor:
        """``[K, B]`` int64 task of the step's own samples."""
        if self.tasks_of_own is not None:
            return cast(Tensor, self.tasks_of_own(self.index))
        return torch.full(self.index.shape, self.task, device=self.index.device)

    def to(self, device: torch.device | str) -> CohortBatch:
        """The same batch with its index and mask on ``device``."""
        index, mask = moved(self.index, device), moved(self.mask, device)
        return replace(self, index=index, mask=mask, cpu_copies=((index, self.index_on_cpu), (mask, self.mask_on_cpu)))

    @property
    def index_on_cpu(self) -> Tensor:
        """:attr:`index` on the CPU."""
        return self._on_cpu(self.index)

    @property
    def mask_on_cpu(self) -> Tensor:
        """:attr:`mask` on the CPU."""
        return self._on_cpu(self.mask)

    def _on_cpu(self, tensor: Tensor) -> Tensor:
        """Return the CPU tensor that ``tensor`` was moved from, without waiting for an accelerator; else a copy."""
        known = self._known_on_cpu(tensor)
        return tensor.cpu() if known is None else known

    def _known_on_cpu(self, tensor: Tensor) -> Tensor | None:
        """The CPU tensor that ``tensor`` was moved from; None if it is unknown."""
        return next((there for here, there in self.cpu_copies if here is tensor), None)


@dataclass(frozen=True)
class CohortBlock:
    """Consecutive local steps of up to K clients, taken without Lightning's loop in between.

    Attributes:
        clients: the K clients' ids.
        sizes: number of training samples of each of the K clients.
        index: ``[K, S, B]`` int64, see :attr:`CohortBatch.index`.
        mask: ``[K, S, B]`` bool, False where padded.
        widths: ``[S]``, samples of each step's largest batch; entries beyond are padding for all clients.
        lengths: ``[K]``, local steps of each client in the whole round, not only in this block.
        task: the task of all of these clients.
        cohort: number of the cohort within the round.
        first: number of the first step, from 0.
        last_of_round: whether no block or batch follows in this round.
        complete: function that adds to a step the functions that fetch its samples; filled in on the device.
        on_cpu: this block as it was on the CPU, if it was moved to a device.
    """

    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    index: Tensor
    mask: Tensor
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    task: int
    cohort: int
    first: int = 0
    last_of_round: bool = False
    complete: Callable[[CohortBatch], CohortBatch] | None = None
    on_cpu: CohortBlock | None = None

    def __len__(self) -> int:
        """S, the number of steps."""
        return len(self.widths)

    @property
    def opens(self) -> bool:
        """Whether these are the cohort's first steps."""
        return self.first == 0

    @cached_property
    def counts(self) -> list[list[int]]:
        """``[K][S]``, samples of each client in each step."""
        if self.on_cpu is not None:  # counted on the CPU, without waiting for an accelerator
            return self.on_cpu.counts
        counts: list[list[int]] = self.mask.sum(-1).tolist()
        return counts

    @cached_property
    def steps(self) -> tuple[CohortBatch, ...]:
        """The S steps, cached together with the samples that each has fetched."""
        return tuple(map(self.step, range(len(self))))

    @property
    def closes(self) -> tuple[int, ...]:
        """Positions (0..K-1) of the clients whose last step is in this block."""
        within = range(self.first + 1, self.first + len(self) + 1)
        return tuple(row for row, length in enumerate(self.lengths) if length in within)

    def part(self, start: int, stop: int) -> CohortBlock:
        """A block of the steps ``start`` to ``stop - 1``; ``last_of_round`` only if it has this block's last step."""
        return replace(
            self,
            index=self.index[:, start:stop],
            mask=self.mask[:, start:stop],
            widths=self.widths[start:stop],
            first=self.first + start,
            last_of_round=self.last_of_round and stop >= len(self),
            on_cpu=None if self.on_cpu is None else self.on_cpu.part(start, stop),
        )

    def to(self, device: torch.device | str) -> CohortBlock:
        """The same block with its index and mask on ``device``."""
        index, mask = moved(self.index, device), moved(self.mask, device)
        on_cpu = self if self.on_cpu is None else self.on_cpu
        return self if index is self.index else replace(self, index=index, mask=mask, on_cpu=on_cpu)

    def step(self, number: int) -> CohortBatch:
        """Return one of the S steps as a new batch, without cached samples."""
        width, step = self.widths[number], self.first + number
        index, mask = self.index[:, number, :width], self.mask[:, number, :width]
        there = self.on_cpu
        copies = (
            () if there is None else ((index, there.index[:, number, :width]), (mask, there.mask[:, number, :width]))
        )
        batch = CohortBatch(
            clients=self.clients,
            sizes=self.sizes,
            index=index,
            mask=mask,
            padded=min(of[number] for of in self.counts) < width,
            task=self.task,
            cohort=self.cohort,
            step=step,
            closes=tuple(row for row, length in enumerate(self.lengths) if length == step + 1),
            last_of_round=self.last_of_round and number + 1 == len(self),
            cpu_copies=copies,
        )
        return batch if self.complete is None else self.complete(batch)


def _through(names: Callable[[Tensor], Tensor], find: Callable[..., Found]) -> Callable[..., Found]:
    """``find`` with indices mapped by ``names``; the result does not expose the functions it was made of."""
    return lambda index, **options: find(names(index), **options)
