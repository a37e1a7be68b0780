"""A Trainer callback that starts each round of ``cfl fit`` when the coordinator says so, and measures it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.accelerator import NOTED_ROUND, busy, device_memory, wait
from benchmarks.memory import memory
from benchmarks.wire import Report, Wire


class Pace(Callback):
    """Waits before every round for the coordinator's word.

    A round is measured from the moment when its loader is requested to the moment when Lightning's loop over its
    batches is done: sampling, dealing, sending, local training, collecting, aggregation, and what methods do at a
    task's end. Evaluation, the run folder's files and the progress line come later and are reported as the time between
    rounds.

    This callback has no hooks that read gradients, because engines would then have to keep them.

    Args:
        wire: file descriptor of a socket to the coordinator, open in the first process.
    """

    def __init__(self, wire: int) -> None:
        self.descriptor = wire
        self._wire: Wire | None = None
        self._report: Report = {}
        self._started: float | None = None
        self._ended: float | None = None
        self._step_seconds = self._collect_seconds = 0.0
        self._backward_started: float | None = None
        self._bytes = (0, 0)
        self._task_end = [0.0, 0.0]
        self._close_clients = 0.0
        self._last_uplink = 0.0
        self._rounds = 0
        self._noted: Report = {}
        self._noting = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect to the coordinator, and make the next round's loader wait for its word."""
        if trainer.is_global_zero:
            self._wire = Wire.from_descriptor(self.descriptor)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        loader = data.train_dataloader

        @wraps(loader)
        def when_told() -> Any:
            self._wait(trainer, pl_module)
            return loader()

        data.train_dataloader = when_told

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what methods do at a task's end, and in ``finish_clients``.

        The clients' part of a task's end lasts until their last message.
        """
        federation: Any = pl_module.federation
        uplink = federation.channel.uplink

        @wraps(uplink)
        def timed_uplink(*args: Any, **kwargs: Any) -> Any:
            result = uplink(*args, **kwargs)
            self._last_uplink = time.perf_counter()
            return result

        federation.channel.uplink = timed_uplink
        for method in federation.methods.values():
            self._time_end_task(method)
            self._time_close_clients(method)

    def _time_close_clients(self, method: Any) -> None:
        finish_clients = method.finish_clients

        @wraps(finish_clients)
        def timed_close_clients(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = finish_clients(*args, **kwargs)
            self._close_clients += time.perf_counter() - started
            return result

        method.finish_clients = timed_close_clients

    def _time_end_task(self, method: Any) -> None:
        end_task = method.end_task

        @wraps(end_task)
        def timed_end_task(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = end_task(*args, **kwargs)
            self._task_end[0] += time.perf_counter() - started
            self._task_end[1] += max(0.0, self._last_uplink - started)
            return result

        method.end_task = timed_end_task

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure forward and backward passes and the optimizer's steps.

        A block of steps also collects from clients that have finished; that time is subtracted.
        """
        strategy: Any = trainer.strategy
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        work: Any = pl_module.work
        training_step, backward, collect = strategy.training_step, strategy.backward, work.collect

        @wraps(training_step)
        def timed_training_step(*args: Any, **kwargs: Any) -> Any:
            started, collected = time.perf_counter(), self._collect_seconds
            result = training_step(*args, **kwargs)
            self._step_seconds += time.perf_counter() - started - (self._collect_seconds - collected)
            return result

        @wraps(backward)
        def timed_backward(*args: Any, **kwargs: Any) -> Any:
            if data.steps_per_block == 1:  # longer blocks compute backward within the training step, which is timed
                self._backward_started = time.perf_counter()
            return backward(*args, **kwargs)

        @wraps(collect)
        def timed_collect(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = collect(*args, **kwargs)
            self._collect_seconds += time.perf_counter() - started
            return result

        work.collect = timed_collect

        def after_step(*_: Any) -> None:
            if self._backward_started is not None:  # includes what methods do to gradients before the optimizer's step
                self._step_seconds += time.perf_counter() - self._backward_started
                self._backward_started = None

        strategy.training_step, strategy.backward = timed_training_step, timed_backward
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(after_step)

    # The round ends with the hook that comes first.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the round before an evaluation that follows it."""
        if not trainer.sanity_checking:
            self._close(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the round, unless an evaluation has ended it."""
        self._close(pl_module)

    def _close(self, pl_module: LightningModule) -> None:
        if self._started is None or self._ended is not None:
            return
        wait(pl_module.device)
        self._noting.close()
        self._ended = time.perf_counter()
        channel: Any = pl_module.federation.channel  # type: ignore[union-attr]
        total = (channel.total_uplink_bytes, channel.total_downlink_bytes)
        self._report = self._noted | {
            "started": self._started,
            "seconds": self._ended - self._started,
            "step_seconds": self._step_seconds,
            "uplink_bytes": total[0] - self._bytes[0],
            "downlink_bytes": total[1] - self._bytes[1],
            "task_end_seconds": self._task_end[0],
            "task_end_clients_seconds": self._task_end[1],
            "close_clients_seconds": self._close_clients,
        }
        self._noted = {}
        self._bytes, self._task_end, self._close_clients = total, [0.0, 0.0], 0.0

    # Waiting for the coordinator.

    def _wait(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._ended is None:
            self._report = information(trainer, pl_module)
        else:
            self._report |= {"between_seconds": time.perf_counter() - self._ended, **memory()}
        word = "round"
        if self._wire is not None:
            self._wire.send(self._report)
            word = self._wire.receive()["do"]
        word = trainer.strategy.broadcast(word)  # the other processes wait here
        if word == "stop":
            self._stop(trainer)
        self._ended, self._step_seconds = None, 0.0
        self._rounds += 1
        if self._rounds == NOTED_ROUND:
            self._noting.enter_context(busy(pl_module.device, self._noted))
        self._started = time.perf_counter()

    def _stop(self, trainer: Trainer) -> None:
        """Report the memory of all processes together, and exit at once, without evaluation, figures or checkpoint."""
        taken = {**memory(), **device_memory()}
        own = torch.tensor([*taken.values()], dtype=torch.float64)
        total = trainer.strategy.reduce(own, reduce_op="sum")
        if self._wire is not None:
            self._wire.send(dict(zip(taken, total.tolist(), strict=True)))
        trainer.strategy.barrier()
        os._exit(0)


def information(trainer: Trainer, pl_module: LightningModule) -> Report:
    """Return the report about the process that the coordinator gets before the first round."""
    choice: Any = getattr(pl_module, "engine_choice", None)
    return {
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
        "settings": None if choice is None else str(choice),
    }
