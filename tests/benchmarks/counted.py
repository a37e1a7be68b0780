"""FLOPs of a whole round of ``cfl fit``, whatever methods do in it, counted while it runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.config import write_config
from benchmarks.engines import fit_options
from benchmarks.running import TESTS

TIMEOUT = 600
COUNTED = 2
"""Number of the counted round, from 0: the second round of the second task. One more round follows, so that what
methods do to prepare it is counted, too."""


class CountFlops(Callback):
    """Writes the FLOPs of matrix products and convolutions in one round.

    Args:
        path: a text file with one number.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._counter: FlopCounterMode | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting at the beginning of the counted round."""
        if trainer.current_epoch == COUNTED:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting and write the FLOPs."""
        self._stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting before an evaluation, which is not part of the round."""
        self._stop()

    def _stop(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.path.write_text(str(self._counter.get_total_flops()))
            self._counter = None


def counted_flops(place: Path, config: Mapping[str, Any], methods: Sequence[Path] = ()) -> int | None:
    """FLOPs of the round after the first of the second task, or None if the run failed.

    All clients are computed in one pass in one thread, because the counter sees only the thread that started it.

    Args:
        place: path without suffix, for configuration, log, run folder and result.
        config: as for the measured run.
        methods: configurations merged after it.
    """
    config = {**config, "schedule": {**config["schedule"], "rounds_per_task": [1, COUNTED + 1]}}
    written, result = write_config(place.with_suffix(".yaml"), config), place.with_suffix(".txt")
    result.unlink(missing_ok=True)
    command = fit_options([written, *methods], place, ("--engine.kind", "vmap", "--schedule.cohort_width", "64"))
    command += ["--schedule.evaluate_every", "0", "--trainer.callbacks+=benchmarks.counted.CountFlops"]
    command += ["--trainer.callbacks.path", str(result)]
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with place.with_suffix(".log").open("wb") as log:
        try:
            subprocess.run(
                command, cwd=TESTS.parent, env=environment, stdout=log, stderr=log, timeout=TIMEOUT, check=True
            )
        except (subprocess.SubprocessError, OSError):
            return None
    return int(result.read_text()) if result.is_file() else None
