"""Settings of a measurement, the machine's peak, and the ways to start engines, which all works share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arrays import data_file
from benchmarks.config import config_of, write_config
from benchmarks.engines import CFL, CFL_GPU, Engine, fit_command, loop_command
from benchmarks.rounds import Measured, interleave
from benchmarks.running import Running
from benchmarks.works import Work

TURNS_BETWEEN_PEAKS = 3


class Peak(AbstractContextManager["Peak"]):
    """The rate of the fastest matrix product so far, measured in a process that sleeps between measurements.

    Args:
        log: file for what the process prints.
        device: whose peak.

    Attributes:
        flops_per_second: the best so far; 0 before the first measurement.
    """

    def __init__(self, log: Path, device: str = "cpu") -> None:
        self.flops_per_second = 0.0
        self._running = Running([sys.executable, "-m", "benchmarks.peak", device], log)
        self._running.ready()

    def measure(self) -> None:
        """Measure again."""
        self.flops_per_second = max(self.flops_per_second, self._running.round()["flops_per_second"])

    def __exit__(self, *reason: object) -> None:
        self._running.end()


@dataclass
class Bench:
    """Settings of one invocation of the benchmarks.

    Attributes:
        folder: for results, data, configurations, logs and run folders.
        rounds: measured rounds per engine.
        warmup: rounds before those.
        engines: engines to compare.
        peak: measures the machine's peak.
        say: prints a line.
        device: ``cpu`` or ``gpu``; used by works that do not compare engines.
    """

    folder: Path
    rounds: int
    warmup: int
    engines: Sequence[Engine]
    peak: Peak
    say: Callable[[str], None]
    device: str = "cpu"

    @property
    def cfl(self) -> Engine:
        """``cfl fit`` with default settings, on the device."""
        return CFL_GPU if self.device == "gpu" else CFL

    def data(self, work: Work) -> Path:
        """The work's data file."""
        return data_file(self.folder / "data", work)

    def loop(self, work: Work, engine: Engine) -> Callable[[], Running]:
        """Return a function that starts a bare loop, or another simulator, on a work."""
        place = self._place(work, engine)
        work_file = place.with_suffix(".json")
        work.save(work_file)
        data = self.data(work)

        def start() -> Running:
            command = loop_command(engine, work_file, data, self.folder / "environments")
            return Running(command, place.with_suffix(".log"), engine.environment)

        return start

    def fit(
        self,
        work: Work,
        engine: Engine,
        config: Mapping[str, Any] | None = None,
        methods: Sequence[Path] = (),
        name: str = "",
    ) -> Callable[[], Running]:
        """Return a function that starts ``cfl fit`` on a work.

        Args:
            work: what is trained.
            engine: options and environment of ``cfl fit``.
            config: configuration; None makes that of federated averaging on the work.
            methods: configurations merged after it.
            name: of files and run folder; by default the engine's.
        """
        place = self._place(work, engine, name)
        written = write_config(place.with_suffix(".yaml"), dict(config or config_of(work, self.data(work))))
        command = fit_command([written, *methods], place, engine.options)
        return lambda: Running(command, place.with_suffix(".log"), engine.environment)

    def interleave(self, start: Mapping[str, Callable[[], Running]]) -> dict[str, Measured]:
        """Call :func:`benchmarks.rounds.interleave`; measure the peak before every third turn and at the end."""

        def between(turn: int) -> None:
            if turn % TURNS_BETWEEN_PEAKS == 0 or turn == self.warmup + self.rounds:
                self.peak.measure()

        settled = [e.name for e in self.engines if e.on_gpu and e.is_settled]
        together = [name for name in start if any(name == s or name.startswith(f"{s} ") for s in settled)]
        return interleave(start, self.rounds, self.warmup, self.say, between, together)

    def _place(self, work: Work, engine: Engine, name: str = "") -> Path:
        folder = self.folder / work.label
        folder.mkdir(parents=True, exist_ok=True)
        words = (name or engine.name).replace("--", "").replace("/", "-").split()
        # A dot would be taken for the beginning of a suffix.
        return folder / "-".join(words).replace(".", "_")
