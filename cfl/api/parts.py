"""A Trainer for rounds, for those who build data and clients themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from cfl.callbacks import OF_SECTIONS, DashboardLog, RoundCheckpoint, RunRecord
from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.cli.quiet import silence_libraries
from cfl.cli.trainer_settings import accelerator_for
from cfl.data.datamodule import FederatedDataModule
from cfl.runtime.errors import ConfigError
from cfl.runtime.yaml_file import read_yaml
from cfl.training.strategy import DECIDE_STRATEGY, strategy_for

_OF_A_RUN_FOLDER = (RunRecord, DashboardLog, RoundCheckpoint)


def trainer(
    data: FederatedDataModule,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    """Return a Lightning Trainer with the settings and callbacks that communication rounds need.

    ``trainer.fit(client, data)`` then trains; one epoch is one round. ``client.federation`` and the run folder hold the
    results. Lightning's warnings about intended behaviour of such a Trainer, and torch's about attention on a CPU, are
    silenced in this process.

    Args:
        data: the data module to train on. It gives the number of rounds.
        run_dir: the run folder, with tables, pictures, summary and checkpoint; None writes nothing. Loggers need one.
        callbacks: further callbacks. One of the program's own, e.g. ``FederatedOrchestrator(server_lr=0.5)``, replaces
            the one with default options.
        settings: settings of the Trainer, which override those of ``configs/default.yaml``.

    Raises:
        ConfigError: a logger without ``run_dir``, an object that is no callback, or a GPU where there is no CUDA GPU.
        MisconfigurationException: Lightning's Trainer does not accept the settings. Settings with which there can be no
            rounds are refused when the fit begins.
    """
    silence_libraries()
    require_callbacks(callbacks)
    if run_dir is None and (logger := settings.get("logger")) and not _has(callbacks, DashboardLog):
        shown = logger if isinstance(logger, bool) else type(logger).__name__
        raise ConfigError("logger", shown, "false without run_dir: loggers get the figures of the run folder")
    # The order of callbacks is that of cfl fit: those of the user come first.
    own: list[Callback] = [
        RunRecord(dir=str(Path(run_dir).expanduser())) if run_dir is not None and kind is RunRecord else kind()
        for kind in OF_SECTIONS.values()
        if run_dir is not None or kind not in _OF_A_RUN_FOLDER
    ]
    settings = {
        **read_yaml(DEFAULT_CONFIG)["trainer"],
        "enable_checkpointing": run_dir is not None,  # by RoundCheckpoint
        "max_epochs": data.num_rounds,
        "default_root_dir": run_dir,  # for what has no other place, such as a profiler's file
        **settings,
    }
    settings["accelerator"] = accelerator_for(settings["accelerator"], "accelerator")
    settings["strategy"] = strategy_for(**{name: settings[name] for name in DECIDE_STRATEGY if name in settings})
    return Trainer(
        callbacks=[*callbacks, *(one for one in own if not _has(callbacks, type(one)))],
        **settings,
    )


def require_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse anything but a list or tuple of callbacks, which would fail deep inside Lightning.

    Raises:
        ConfigError: names the first type that cannot be.
    """
    for one in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
        if not isinstance(one, Callback) or one is callbacks:
            valid = "a list of objects of subclasses of lightning.pytorch.Callback"
            raise ConfigError("callbacks", type(one).__name__, valid)


def _has(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(one, kind) for one in callbacks)
