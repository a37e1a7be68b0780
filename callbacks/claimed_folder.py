"""Claims the folder of a run for one process, and removes what an earlier run has left in it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from cfl.reporting import folder_lock
from cfl.reporting.files_of_run import files_of_earlier_run
from cfl.runtime.disk import why
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import CHECKPOINT, CONFIG, SUMMARY


class ClaimedFolder:
    """The folder into which a run writes.

    Args:
        path: the folder, which need not exist.

    Attributes:
        path: the folder.
        claimed: whether :meth:`claim` has succeeded for the present fit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claimed = False
        self._resuming: bool | None = False
        self._stale: list[Path] = []

    def claim(self, resuming: bool | None, overwrite: bool, write: bool) -> None:
        """Create and lock the folder, and check that it can be used; see :meth:`cfl.callbacks.RunRecord.prepare`.

        Raises:
            ConfigError: the folder cannot be written, another process uses it, or it holds a run and ``overwrite`` is
                false.
        """
        made = write and not self.path.exists()
        try:
            if write:
                self.path.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=self.path).close()
            alone = not write or folder_lock.take(self.path, made)
        except OSError as error:
            valid = f"a folder that can be written ({why(self.path, error)})"
            raise ConfigError("run.dir", str(self.path), valid) from None
        if not alone:
            raise ConfigError("run.dir", str(self.path), "a folder in which no other process is at work")
        if resuming is False:
            self._refuse_another_run(overwrite)
        # Also in a folder without a run: one that died before its first checkpoint may have left tables.
        # Listed now, because loggers open files of the new run before the fit begins.
        self._stale = [] if resuming else files_of_earlier_run(self.path)
        self.claimed, self._resuming = True, resuming

    def _refuse_another_run(self, overwrite: bool) -> None:
        held = [name for name in (SUMMARY, CHECKPOINT) if (self.path / name).exists()]
        if held and not overwrite:
            state = "a finished run" if SUMMARY in held else "an interrupted run (--ckpt_path last resumes it)"
            valid = f"a folder without a run; this one holds {state}; or run.overwrite=true"
            raise ConfigError("run.dir", str(self.path), valid)

    def decide(self, checkpoint: str | Path | None, overwrite: bool) -> None:
        """Find out whether the folder's run is resumed, if :meth:`claim` was not told.

        Args:
            checkpoint: the Trainer's checkpoint, if it has one.
            overwrite: whether another run in the folder may be replaced.

        Raises:
            ConfigError: the folder holds another run than that of the checkpoint, and ``overwrite`` is false.
        """
        if self._resuming is not None:
            return
        self._resuming = bool(checkpoint and Path(checkpoint).parent.resolve() == self.path.resolve())
        if self._resuming:
            self._stale = []
        else:
            self._refuse_another_run(overwrite)

    def clear(self, keeps_config: bool) -> None:
        """Remove what an earlier run has left, after all checks that may refuse this one.

        Args:
            keeps_config: whether the run writes its configuration. A run made of parts has none, and would pass for one
                of the earlier run's configuration.
        """
        if self._stale and not keeps_config:
            (self.path / CONFIG).unlink(missing_ok=True)
        for path in self._stale:
            if path.is_dir():
                shutil.rmtree(path)
                continue
            path.unlink(missing_ok=True)
            if path.parent != self.path:
                with suppress(OSError):  # others' files are in it
                    path.parent.rmdir()
        self._stale = []

    def release(self) -> None:
        """Release the folder for other processes. Another fit has to claim it anew."""
        folder_lock.release(self.path)
        self.claimed, self._resuming, self._stale = False, False, []
