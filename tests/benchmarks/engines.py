"""What carries a work out: the bare loop, and ``cfl fit`` under several settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cfl.runtime.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    """One way to run a work.

    Attributes:
        name: in tables and results.
        bare: the plain loop; otherwise ``cfl fit``.
        options: more options of ``cfl fit``.
        environment: added to the user's.
    """

    name: str
    bare: bool = False
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_ONE_MATH_THREAD = {"OMP_NUM_THREADS": "1"}

LOOP = Engine("loop", bare=True)
CFL = Engine("cfl")

ENGINES = {
    engine.name: engine
    for engine in (
        LOOP,
        CFL,
        Engine("cfl-k1", options=("--schedule.cohort_width", "1")),
        Engine("cfl-1-thread", environment=_ONE_MATH_THREAD),
        Engine(
            "cfl-2-processes",
            options=("--trainer.strategy", "cfl.training.strategy.ClientParallel", "--trainer.devices", "2"),
            environment=_ONE_MATH_THREAD,
        ),
        Engine("loop-1-thread", bare=True, environment=_ONE_MATH_THREAD),
    )
}
"""By name, in the order in which they are measured when none is named."""


def chosen_engines(names: str) -> list[Engine]:
    """Engines by name, separated by commas; all if there is none.

    ``cfl --any.option value`` is an engine too, under that name.

    Raises:
        ConfigError: an unknown name.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    chosen = []
    for name in wanted or ENGINES:
        if name in ENGINES:
            chosen.append(ENGINES[name])
        elif name.startswith("cfl --"):
            chosen.append(Engine(name, options=tuple(shlex.split(name)[1:])))
        else:
            raise ConfigError("ENGINES", name, f"{', '.join(ENGINES)}, or 'cfl --some.option value'")
    return list({engine.name: engine for engine in chosen}.values())


def loop_command(work_file: Path, data: Path) -> list[str]:
    """The bare loop; the file descriptor of its wire is to be appended."""
    return [sys.executable, "-m", "benchmarks.loop", str(work_file), str(data)]


def fit_command(configs: Sequence[Path], run_folder: Path, options: Sequence[str] = ()) -> list[str]:
    """``cfl fit`` at the coordinator's pace; the file descriptor of its wire is to be appended.

    Args:
        configs: merged from left to right.
        run_folder: of the run, overwritten.
        options: of ``cfl fit``.
    """
    given = [part for config in configs for part in ("--config", str(config))]
    run = ["--run.dir", str(run_folder), "--run.overwrite", "true"]
    pace = ["--trainer.callbacks+=benchmarks.pace.Pace", "--trainer.callbacks.wire"]
    return [sys.executable, "-m", "cfl", "fit", *given, *run, *options, *pace]
