"""The progress line of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cfl.data.cohorts import CohortBatch
from cfl.data.schedule import RoundPlan
from cfl.federation.federation import Federation
from cfl.reporting.rounding import rounded
from cfl.runtime.option_checks import check_numbers
from cfl.training.access import client_of, federation_of


def clock(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_GAP = "  "
_BAR = (10, 30)
"""Least and greatest width of the bar."""
_DROPPED = ("clients", "loss", "mean", "bar", "round", "task")
"""Parts of the line that are left out if the terminal is too narrow, in this order. The time left always stays."""


def fitting(parts: Mapping[str, str], width: int) -> tuple[dict[str, str], int]:
    """The parts of a line that fit into a terminal, and the width of the bar in front of them, 0 for no bar.

    Args:
        parts: name -> text, in their order. Parts that are not in :data:`_DROPPED` always stay.
        width: number of columns.
    """
    kept, least, most = dict(parts), *_BAR
    for name in ("", *_DROPPED):
        kept.pop(name, None)
        least = 0 if name == "bar" else least
        needed = sum(len(text) + len(_GAP) for text in kept.values()) - len(_GAP)
        if least and needed + len(_GAP) + least <= width:
            return kept, min(most, width - needed - len(_GAP))
        if not least and needed <= width:
            break
    return kept, 0


class _LiveLine(Live):
    """A line that is rewritten in place, even if the window has become narrower than the line.

    The terminal then wraps the line, and the cursor stays with its character. Between refreshes the cursor is therefore
    on the first character.
    """

    def refresh(self) -> None:
        """Remove the line, however many rows it fills by now, and show the new one."""
        self._write("\r\x1b[J")
        super().refresh()
        self._write("\r")

    def leave(self, text: Text) -> None:
        """Print a text above the line."""
        self._write("\r\x1b[J")
        self.console.print(text, highlight=False)

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


class RoundProgress(Callback):
    """Shows task, round, clients done, loss, last ACC and time left: a live line on a terminal, else plain lines.

    Tasks and rounds count from 0, as in the run folder's files: ``task 2/9`` is the third of ten. The live line has a
    bar of the whole run, and as many of these figures as fit into the terminal, always with the time left. NO_COLOR in
    the environment removes its colours; with TERM=dumb there are plain lines.
    Evaluations that take longer than the time between two lines show their own progress. With several processes only
    the first shows the line. During a round, it counts clients and loss of this process only.

    Args:
        enabled: whether to show progress.
        plain_seconds: without a terminal, seconds between two lines. Task ends and the run's end are always shown.
        live_seconds: on a terminal, seconds between two refreshes.

    Raises:
        ConfigError: seconds below 0.
    """

    def __init__(self, enabled: bool = True, plain_seconds: float = 10.0, live_seconds: float = 0.25) -> None:
        check_numbers("progress", "[0, inf]", plain_seconds=plain_seconds, live_seconds=live_seconds)
        self.enabled, self.plain_seconds, self.live_seconds = enabled, plain_seconds, live_seconds
        self.console = Console()
        self._live: _LiveLine | None = None
        self._shown_at = self._started = self._evaluation_shown_at = 0.0
        self._first_round = self._total = self._rounds = self._done = self._clients = 0
        self._plan: RoundPlan | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the line."""
        if not (self.enabled and trainer.is_global_zero):
            return
        self._started = self._shown_at = time.perf_counter()
        federation = federation_of(pl_module)
        self._first_round, self._total = federation.round, _num_rounds(federation)
        # isatty too, because with FORCE_COLOR rich takes a file for a terminal.
        if self.console.file.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = _LiveLine(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the number of finished clients."""
        federation = federation_of(pl_module)
        self._plan = federation.schedule.round(federation.round)
        self._rounds, self._done = self._plan.round, 0
        self._clients = len(federation.data.trained_here(self._plan))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Count finished clients."""
        self._done += len(batch.closes)
        if self._live is not None and time.perf_counter() - self._shown_at >= self.live_seconds:
            self._show(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the end of a round if a line is due; always show the end of a task."""
        if not (self.enabled and trainer.is_global_zero):
            return
        federation, plan = federation_of(pl_module), self._plan
        if plan is None:
            return
        self._rounds, self._done = plan.round + 1, len(plan.clients)
        self._clients = self._done
        pause = self.live_seconds if self._live is not None else self.plain_seconds
        keep = plan.last_of_task or federation.finished
        if keep or time.perf_counter() - self._shown_at >= pause:
            self._show(pl_module, keep)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when an evaluation begins: before training, after a round, or of a checkpoint."""
        self._evaluation_shown_at = time.perf_counter()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the progress of a long evaluation."""
        if not (self.enabled and trainer.is_global_zero):
            return
        pause = self.live_seconds if self._live is not None else self.plain_seconds
        if time.perf_counter() - self._evaluation_shown_at < pause:
            return
        self._evaluation_shown_at = time.perf_counter()  # separate from the rounds' lines
        federation = federation_of(pl_module)
        done, rounds = federation.round, federation.schedule.num_rounds
        when = f"after {done} of {rounds} rounds" if done else "before training"
        last = federation.data.stream.num_tasks - 1
        self._print({"evaluated": f"evaluating task {dataloader_idx}/{last}", "round": when})

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end

    def _parts(self, pl_module: LightningModule) -> dict[str, str]:
        """The line's parts by name, in their order."""
        client, federation = client_of(pl_module), federation_of(pl_module)
        plan = self._plan
        if plan is None:
            return {"round": "no round has started"}
        rounds = federation.schedule.rounds_of(plan.task)
        run = self._rounds_done() - self._first_round
        left = "-"
        if run:
            per_round = (time.perf_counter() - self._started) / run
            self._total = _num_rounds(federation)
            rounds_left = 0 if federation.stopped else self._total - self._rounds_done()
            left = clock(per_round * rounds_left)
        known = next((acc for acc in reversed(federation.curve) if acc is not None), None)
        acc = "-" if known is None else rounded(known, federation.measure.columns[0].decimals)  # as in tables
        return {
            "task": f"task {plan.task}/{federation.data.num_tasks - 1}",
            "round": f"round {plan.round_in_task}/{rounds - 1}",
            "clients": f"clients {self._done}/{self._clients}",
            "loss": f"loss {client.mean_loss:.4f}",
            "mean": f"last {federation.measure.mean_label} {acc}",
            "left": f"left {left}",
        }

    def _rounds_done(self) -> float:
        """Number of finished rounds, plus the share of the running round's clients that have finished."""
        running = self._plan is not None and self._rounds == self._plan.round
        return self._rounds + (self._done / max(self._clients, 1) if running else 0)

    def _show(self, pl_module: LightningModule, keep: bool = False) -> None:
        self._shown_at = time.perf_counter()
        self._print(self._parts(pl_module), keep)

    def _print(self, parts: Mapping[str, str], keep: bool = False) -> None:
        if self._live is None:
            print(_GAP.join(parts.values()), flush=True)
            return
        width = self.console.width - 1  # a character in the last column would leave the cursor between two rows
        shown, bar = fitting(parts, width)
        text = Text(_GAP).join(Text(part, "bold" if name == "left" else "") for name, part in shown.items())
        text.truncate(width, overflow="ellipsis")
        if keep:
            self._live.leave(text)
        row = Table.grid(padding=(0, len(_GAP)), pad_edge=False)
        done = ProgressBar(self._total, self._rounds_done(), bar, complete_style="cyan", finished_style="green")
        row.add_row(*[done] * (bar > 0), text)
        self._live.update(row, refresh=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the live line before the figures are printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the live line before the error is printed."""
        self.on_train_end(trainer, pl_module)


def _num_rounds(federation: Federation) -> int:
    """The number of rounds of a run, or the number that its privacy budget allows."""
    schedule = federation.schedule
    return schedule.num_rounds if schedule.ends_after is None else schedule.ends_after
