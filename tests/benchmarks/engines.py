"""Programs that compute a work: bare loops, and ``cfl fit`` under several settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.simulators.environments import environment
from cfl.runtime.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    """One way to run a work.

    Attributes:
        name: in tables and results.
        bare: a loop in plain PyTorch, or another simulator; otherwise ``cfl fit``.
        options: more options of ``cfl fit``.
        environment: added to the user's.
        device: of the bare loop; ``cfl fit`` has ``trainer.accelerator`` among its options.
        module: of the bare loop, in this package; of a simulator, in :mod:`benchmarks.simulators`.
        requires: the package of another simulator, as pip reads it; it gets an environment of its own.
    """

    name: str
    bare: bool = False
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    module: str = "loop"
    requires: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on a GPU."""
        return self.device == "cuda" or "gpu" in self.options

    @property
    def is_settled(self) -> bool:
        """Whether it is a bare loop or fixes the cohort width. On a GPU, such an engine starts without a trial."""
        return self.bare or "--schedule.cohort_width" in self.options


_ONE_MATH_THREAD = {"OMP_NUM_THREADS": "1"}

LOOP = Engine("loop", bare=True)
HAND = Engine("hand", bare=True, module="hand")
CFL = Engine("cfl")

ENGINES = {
    engine.name: engine
    for engine in (
        LOOP,
        HAND,
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

SIMULATORS = {
    engine.name: engine
    for engine in (
        Engine("flower", bare=True, module="flower", requires="flwr[simulation]==1.42.0"),
        Engine(
            "pfl-research",
            bare=True,
            module="pfl_research",
            requires="pfl[pytorch]==0.6.0",
            environment=_ONE_MATH_THREAD,
        ),
        Engine("fedjax", bare=True, module="fed_jax", requires="fedjax==0.0.17 jax==0.5.3"),
    )
}
"""Simulators of others by name; measured only when named."""


def _on_gpu(name: str, *options: str) -> Engine:
    return Engine(name, options=("--trainer.accelerator", "gpu", *options))


LOOP_GPU = Engine("loop-gpu", bare=True, device="cuda")
CFL_GPU = _on_gpu("cfl-gpu")

GPU_ENGINES = {
    engine.name: engine
    for engine in (
        LOOP_GPU,
        CFL_GPU,
        _on_gpu("cfl-gpu-k1", "--schedule.cohort_width", "1"),
        _on_gpu("cfl-gpu-k16", "--schedule.cohort_width", "16"),
        _on_gpu("cfl-gpu-k64", "--schedule.cohort_width", "64"),
        _on_gpu("cfl-gpu-k64-tf32", "--schedule.cohort_width", "64", "--engine.matmul_precision", "high"),
        _on_gpu("cfl-gpu-k64-bf16", "--schedule.cohort_width", "64", "--trainer.precision", "bf16-mixed"),
        _on_gpu("cfl-gpu-k64-compiled", "--schedule.cohort_width", "64", "--engine.compile", "default"),
    )
}
"""Engines of a GPU by name, in the order in which they are measured when none is named."""


def chosen_engines(names: str, gpu: bool = False) -> list[Engine]:
    """Return the engines whose names are given, separated by commas; all of the CPU or of the GPU if none is given.

    The name ``cfl --any.option value`` stands for ``cfl fit`` with that option.

    Raises:
        ConfigError: an unknown name.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    chosen = []
    known = {**ENGINES, **GPU_ENGINES, **SIMULATORS}
    for name in wanted or (GPU_ENGINES if gpu else ENGINES):
        if name in known:
            chosen.append(known[name])
        elif name.startswith("cfl --"):
            chosen.append(Engine(name, options=tuple(shlex.split(name)[1:])))
        else:
            raise ConfigError("ENGINES", name, f"{', '.join(known)}, or 'cfl --some.option value'")
    return list({engine.name: engine for engine in chosen}.values())


def loop_command(engine: Engine, work_file: Path, data: Path, environments: Path) -> list[str]:
    """Return the command of a bare loop or a simulator, to which the file descriptor of its wire must be appended.

    Args:
        engine: what is started.
        work_file: the work.
        data: its data file.
        environments: folder of the simulators' environments; one that is missing is made.

    Raises:
        NotRun: a simulator cannot be installed.
    """
    arguments = [str(work_file), str(data), engine.device]
    if not engine.requires:
        return [sys.executable, "-m", f"benchmarks.{engine.module}", *arguments]
    python = environment(environments / engine.name, engine.requires)
    return [str(python), "-m", "benchmarks.simulators", engine.module, *arguments]


def fit_command(configs: Sequence[Path], run_folder: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command of a ``cfl fit`` that the coordinator paces; the descriptor of its wire must be appended.

    Args:
        configs: merged from left to right.
        run_folder: of the run, overwritten.
        options: of ``cfl fit``.
    """
    return [*fit_options(configs, run_folder, options), "--trainer.callbacks+=benchmarks.pace.Pace", *_WIRE]


_WIRE = ("--trainer.callbacks.wire",)


def fit_options(configs: Sequence[Path], run_folder: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command of a ``cfl fit`` without a coordinator; arguments as for :func:`fit_command`."""
    given = [part for config in configs for part in ("--config", str(config))]
    run = ["--run.dir", str(run_folder), "--run.overwrite", "true"]
    return [sys.executable, "-m", "cfl", "fit", *given, *run, *options]
