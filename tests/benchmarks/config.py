"""A work as a configuration of ``cfl fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.arrays import MEAN, STD
from benchmarks.works import Work

ENDLESS = 1_000_000
"""More rounds than any benchmark takes; the coordinator stops the run before."""

Stream = Literal["one task", "second task", "a task per round"]


def config_of(work: Work, data: Path, stream: Stream = "one task", num_tasks: int = 1) -> dict[str, Any]:
    """The configuration that trains a work without evaluation, checkpoints or progress line.

    Args:
        work: what is trained.
        data: its ``.npz`` file.
        stream: ``one task`` for ever; ``second task``: one round of a first task, then the second for ever; ``a task
            per round``: ``num_tasks`` permutations, one round each.
        num_tasks: see ``stream``.
    """
    channels = work.shape[0]
    source = {
        "class_path": "Arrays",
        "init_args": {
            "path": str(data.absolute()),
            "shape": list(work.shape),
            "num_classes": work.outputs,
            "channels": "first",
            "mean": [MEAN] * channels,
            "std": [STD] * channels,
        },
    }
    rounds: int | list[int] = ENDLESS
    if stream == "one task" and work.tasks > 1:
        tasks: dict[str, Any] = {"class_path": "ClassSplit", "init_args": {"num_tasks": work.tasks}}
        rounds = [ENDLESS] + [1] * (work.tasks - 1)
    else:
        if stream != "one task":
            num_tasks = 2 if stream == "second task" else num_tasks
            rounds = [1, ENDLESS] if stream == "second task" else 1
        tasks = {
            "class_path": "Permuted",
            "init_args": {"num_tasks": num_tasks, "first_is_identity": not work.permuted},
        }
    tasks["init_args"]["source"] = source
    return {
        "seed_everything": 0,
        "data": {
            "stream": tasks,
            "partition": {"class_path": "IID"},
            "num_clients": work.clients,
            "scenario": "task" if work.tasks > 1 else "domain",
        },
        "schedule": {
            "rounds_per_task": rounds,
            "clients_per_round": work.sampled,
            "local_epochs": 1,
            "batch_size": work.batch_size,
        },
        "model": {
            "network": {"class_path": work.network, "init_args": dict(work.options)},
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": work.lr}},
        },
        "run": {"benchmark": work.label},
        "checkpoint": {"enabled": False},
        "progress": {"enabled": False},
        "trainer": {"accelerator": "cpu", "num_sanity_val_steps": 0},
    }


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """Write a configuration as YAML; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
