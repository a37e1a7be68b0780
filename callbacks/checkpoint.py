"""Checkpoints between rounds, written as often as a given share of the run's time allows."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from cfl.callbacks.federated_orchestrator import built_federation
from cfl.callbacks.run_record import RunRecord
from cfl.callbacks.streamed_checkpoints import StreamedCheckpoints
from cfl.federation.channel import payload_bytes
from cfl.federation.federation import Federation
from cfl.reporting.experiment import config_hash
from cfl.runtime import distributed, signals
from cfl.runtime.atomic_write import replacing
from cfl.runtime.option_checks import check_numbers
from cfl.runtime.run_files import CHECKPOINT
from cfl.training.access import callback_of, federation_of


class RoundCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` into the run folder: the whole federation, between two rounds.

    It is written after the first round, at the end of the run, and after the running round on SIGTERM, SIGINT and
    SIGHUP. In between it is written if the time for all files so far, this file and the last one stays within ``share``
    of the run's time so far. The file is replaced atomically, so that it is complete whenever the process is killed.
    With several processes the first decides and writes; a signal to any of them stops all. Lightning calls it at an
    epoch's end after all other callbacks, because it is a ``Checkpoint``.

    Args:
        share: greatest share of the run's time spent on writing, in (0, 1].
        enabled: whether checkpoints are written.
    """

    def __init__(self, share: float = 0.02, enabled: bool = True) -> None:
        check_numbers("checkpoint", "(0, 1]", share=share)
        self.share, self.enabled = share, enabled
        self._started = 0.0
        self._writes: list[_Write] = []
        self._signal: int | None = None

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended the run early, or None."""
        return self._signal

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier fit, and set up checkpoint files and the folder of clients' states."""
        self._signal, self._started, self._writes = None, 0.0, []
        record = record_of(trainer)
        record.prepare_once(trainer, stage)
        if record.folder.is_dir() and os.access(record.folder, os.W_OK):
            built_federation(trainer, pl_module, stage).clients.folder = record.folder
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the user's own plugin is kept
            trainer.strategy.checkpoint_io = StreamedCheckpoints()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers, with which several processes would wait for each other."""
        self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install handlers with which a first SIGTERM, SIGINT or SIGHUP ends the run after the running round.

        When the fit ends, also after an error, Lightning restores the handlers from before it.
        """
        if not self._started:
            self._started = time.perf_counter()
        if self._signal is not None:  # a signal came during the evaluation before training
            return
        for number in signals.NUMBERS:
            try:
                if not signals.is_ignored(number):
                    signal.signal(number, self._on_signal)
            except ValueError:  # only the main thread can set signal handlers
                return

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let signals end the program at once when a checkpoint is evaluated outside of a fit."""
        if trainer.state.fn != "fit":
            signals.take_over()

    on_test_start = on_validation_start

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, signals.at_once(number))
        signals.leave_terminal(number)
        # No print: the signal may have interrupted one, and buffered files are not re-entrant.
        os.write(2, b"\nstopping after this round; the same signal again stops at once\n")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a checkpoint is due after the round."""
        federation = federation_of(pl_module)
        everyones = distributed.gather((self._signal, self._due(federation)))
        agreed = next((number for number, _ in everyones if number is not None), None)
        stopping = agreed is not None
        if self.enabled and (stopping or federation.finished or everyones[0][1]):
            self._save(trainer, record_of(trainer).folder / CHECKPOINT)
        if stopping:
            self._signal = agreed
            trainer.should_stop = True

    def _due(self, federation: Federation) -> bool:
        """Whether writing a file now and at the end of the run stays within the share of time.

        The size of the last file is extrapolated from the growth so far, to at most twice the current size."""
        if not self._writes:
            return True
        first, before, now = self._writes[0], self._writes[-1], _size(federation)
        growth = (now - first.size) / (federation.round - first.round)
        last = min(2 * now, now + growth * (federation.schedule.num_rounds - federation.round))
        needed = sum(write.seconds for write in self._writes) + before.seconds * (now + last) / before.size
        return needed <= self.share * (time.perf_counter() - self._started)

    def _save(self, trainer: Trainer, path: Path) -> None:
        started = time.perf_counter()
        if distributed.rank() == 0:
            with replacing(path, sync=True) as file:
                trainer.save_checkpoint(file.path)
        else:
            trainer.save_checkpoint(path)  # Lightning needs the call in every process, but only the first writes
        federation = federation_of(trainer.lightning_module)
        self._writes.append(_Write(federation.round, _size(federation), time.perf_counter() - started))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the experiment's configuration to the file, so that no other experiment is resumed from it."""
        record = record_of(trainer)
        checkpoint["experiment"] = record.experiment
        checkpoint["config_hash"] = config_hash(record.experiment)


class _Write(NamedTuple):
    """A checkpoint that was written: after how many rounds, of what size in bytes, and how long it took."""

    round: int
    size: int
    seconds: float


def _size(federation: Federation) -> int:
    """Bytes of the model and of all that clients keep: nearly all of a checkpoint's file."""
    return federation.clients.bytes() + payload_bytes(dict(federation.network.named_parameters()))


def record_of(trainer: Trainer) -> RunRecord:
    """The Trainer's RunRecord.

    Raises:
        RuntimeError: if it has none.
    """
    record = callback_of(trainer, RunRecord)
    if record is None:
        raise RuntimeError("RoundCheckpoint writes into the run folder: add cfl.callbacks.RunRecord to the Trainer")
    return record
