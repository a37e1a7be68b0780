"""A Trainer for rounds, for those who build data and clients themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from cfl.callbacks import (
    AccuracyTargets,
    DashboardLog,
    FederatedOrchestrator,
    LocalModels,
    PrivacyBudget,
    RoundCheckpoint,
    RoundProgress,
    RunRecord,
)
from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.cli.quiet import silence_libraries
from cfl.data.datamodule import FederatedDataModule
from cfl.runtime.yaml_file import read_yaml


def trainer(
    data: FederatedDataModule,
    run_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    """A Lightning Trainer with the settings and callbacks that communication rounds need.

    Lightning's remarks that hold for every such Trainer are silenced in this process.

    One epoch is one round. ``trainer.fit(client, data)`` then trains; ``client.federation`` holds the results, and so
    does the run folder.

    Args:
        data: what is trained on; it knows the number of rounds.
        run_dir: the run folder, with tables, pictures, summary and checkpoint; None writes nothing.
        callbacks: further ones. One of the program's own, e.g. ``FederatedOrchestrator(server_lr=0.5)``, takes the
            place of the one with default options.
        settings: of the Trainer, over those of ``configs/default.yaml``.

    Raises:
        MisconfigurationException: settings that Lightning's Trainer does not accept. Those that allow no rounds are
            refused when the fit begins.
    """
    silence_libraries()
    # The order of cfl fit: what others add comes first.
    own: list[Callback] = [LocalModels(), FederatedOrchestrator(), AccuracyTargets(), PrivacyBudget()]
    if run_dir is not None:
        own += [RunRecord(dir=str(run_dir)), DashboardLog(), RoundCheckpoint()]
    own.append(RoundProgress())
    settings = {
        **read_yaml(DEFAULT_CONFIG)["trainer"],
        "enable_checkpointing": run_dir is not None,  # by RoundCheckpoint
        "max_epochs": data.num_rounds,
        "default_root_dir": run_dir,  # for what has no other place, such as a profiler's file
        **settings,
    }
    return Trainer(
        callbacks=[*callbacks, *(one for one in own if not any(isinstance(given, type(one)) for given in callbacks))],
        **settings,
    )
