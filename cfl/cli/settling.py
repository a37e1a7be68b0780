"""Fills in the run's name, folder and hash, and the folders of loggers, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from jsonargparse import Namespace

from cfl.cli.class_entries import class_entries
from cfl.cli.leaves import check_path
from cfl.reporting.experiment import benchmark_name, config_hash, experiment_of, method_name
from cfl.reporting.files_of_run import check_method_names, wandb_id_in
from cfl.runtime.run_files import CHECKPOINT


@dataclass(frozen=True)
class Settled:
    """A completed configuration.

    Attributes:
        config: configuration of the subcommand, a changed copy of the parsed one.
        experiment: see :func:`cfl.reporting.experiment.experiment_of`.
        config_hash: hash of the experiment.
        config_yaml: the configuration as it is kept in the run folder.
        wandb_id: id of the run at wandb; None without a logger for wandb, or if the user has set the id.
        methods: name -> class path.
    """

    config: Namespace
    experiment: dict[str, Any]
    config_hash: str
    config_yaml: str
    wandb_id: str | None
    methods: dict[str, str]


def settle(parsed: Namespace, plain: Mapping[str, Any], trains: bool) -> Settled:
    """Set the run's name and folder, and the folders of loggers and profilers. Without training there are no loggers.

    Args:
        parsed: a subcommand's configuration. It is not changed.
        plain: the same configuration as plain dictionaries, lists and values.
        trains: whether the subcommand is ``fit``.

    Raises:
        ConfigError: a method's name cannot be that of a table in the run folder, or all names together are too long for
            a folder's name.
    """
    config = parsed.clone()
    experiment = experiment_of(plain)
    digest = config_hash(experiment)
    check_method_names(plain["methods"])
    method, seed = method_name(plain["methods"]), plain["seed_everything"]
    run = config.run
    run.benchmark = benchmark_name(plain) if run.benchmark is None else run.benchmark
    if run.dir is None:
        run.dir = f"runs/{run.benchmark}/{method}-seed{seed}-{digest[:8]}"
        check_path("run.dir", run.dir)  # of many methods, whose names are part of it
    else:
        run.dir = str(Path(run.dir).expanduser()) if run.dir else run.dir  # an empty name is refused later
    if not trains:  # Lightning opens loggers anyhow: every scoring would be an empty run at wandb
        config.trainer.logger = False
    _put_into(run.dir, config.trainer)
    wandb_id = None
    for _, logger in class_entries(config.trainer.logger):
        own = logger["init_args"]
        if logger["class_path"].endswith("WandbLogger"):
            own["group"] = own.get("group") or f"{run.benchmark}/{method}"
            own["job_type"] = own.get("job_type") or method
            own["name"] = own.get("name") or f"{method}-seed{seed}"
            if not own.get("id"):
                own["id"] = wandb_id = _wandb_id(config.ckpt_path, run.dir)
    methods = {name: str(entry["class_path"]) for name, entry in plain["methods"].items()}
    return Settled(config, experiment, digest, config_for_folder(plain, run.dir, run.benchmark), wandb_id, methods)


def config_for_folder(config: Mapping[str, Any], folder: str, benchmark: str) -> str:
    """The configuration as it is kept in the run folder. It starts the same run again, and never overwrites another.

    It has no ``ckpt_path``, because null in a file would override an option in front of ``--config``.

    Args:
        config: a subcommand's configuration as plain dictionaries, lists and values.
        folder: the run folder.
        benchmark: the benchmark's name.
    """
    run = {**config["run"], "dir": folder, "benchmark": benchmark, "overwrite": False}
    kept = {key: value for key, value in config.items() if key != "ckpt_path"}
    return yaml.safe_dump({**kept, "run": run}, sort_keys=False)


def _put_into(folder: str, trainer: Namespace) -> None:
    """Move the folders of a Trainer's loggers and profiler below the run folder, in place.

    Absolute paths and addresses of other machines stay."""
    for key, option in (("logger", "save_dir"), ("profiler", "dirpath")):
        for _, entry in class_entries(trainer.get(key)):
            own = entry.get("init_args", {})
            if option in own:
                given = str(own[option] or ".")
                own[option] = given if "://" in given else str(Path(folder, Path(given).expanduser()))


def _wandb_id(checkpoint: str | None, folder: str) -> str:
    """The id of the checkpoint's run at wandb, or a new one.

    A resumed run keeps its id, also in another folder. With another id it would count as a second seed."""
    path = Path(folder) / CHECKPOINT if checkpoint == "last" else checkpoint and Path(checkpoint)
    known = wandb_id_in(path.parent) if path and path.is_file() else None
    return known or uuid4().hex[:8]
