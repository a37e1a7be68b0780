"""Configurations of tiny runs: one for every method, and some for options of the federation that add state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from methods.test_registry import ENTRIES
from support import tiny_cli

import cfl.methods

_SYNTHETIC = {"num_classes": 3, "shape": [1, 4, 4], "train_size": 40, "test_size": 3}
_OPTIONS: dict[str, dict[str, Any]] = {
    "CFeD": {"surrogate": {"class_path": "Synthetic", "init_args": _SYNTHETIC}},
    "LearningRateDecay": {"factor": 2.0, "patience": 1, "threshold": 0.9},
}
"""Options of methods whose options in the registry cannot be written into a file, or end a task's training early."""
NETWORKS: dict[str, dict[str, Any]] = {
    "L2P": {
        "class_path": "PromptedViT",
        "init_args": {
            "pool_size": 4,
            "prompt_length": 2,
            "top_k": 2,
            "image_size": 4,
            "patch_size": 2,
            "num_layers": 1,
            "num_heads": 2,
            "hidden_dim": 8,
            "mlp_dim": 8,
        },
    },
    "FedCIL": {
        "class_path": "ACGAN",
        "init_args": {
            "classifier": {"class_path": "MLP", "init_args": {"hidden": [8]}},
            "widths": [6],
            "noise_dim": 4,
        },
    },
}
"""Method -> the tiny network that it needs."""
_CLASSES: dict[str, Any] = {
    "data": {
        "stream": {
            "class_path": "ClassSplit",
            "init_args": {
                "num_tasks": 2,
                "source": {
                    "class_path": "Synthetic",
                    "init_args": {"num_classes": 4, "shape": [1, 4, 4], "train_size": 160, "test_size": 40},
                },
            },
        },
        "scenario": "class",
    },
}
_OF_THE_FEDERATION: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "momentum": {
        "federated": {"server_momentum": 0.9, "client_weighting": "samples"},
        "model": {"network": {"class_path": "MLP", "init_args": {"hidden": [8], "dropout": 0.3}}},
        "schedule": {"evaluate_every": 2},
    },
    "rows on disk": {
        "methods": {"own": {"class_path": "PersonalLayers", "init_args": {"layers": ["head.*"]}}},
        "federated": {"client_state_memory_mb": 0},
    },
    "classes": _CLASSES,
    "workers": {"engine": {"kind": "workers", "workers": 1, "stack": 1, "batch_last": False, "products": "blas"}},
}


def _of_a_method(name: str) -> dict[str, Any]:
    entry = ENTRIES[name]
    options = _OPTIONS.get(name, dict(entry.active))
    needs_classes = "domain" not in getattr(cfl.methods, name).scenarios
    data = {**(_CLASSES["data"] if needs_classes else {}), **entry.data}
    config: dict[str, Any] = {"methods": {"tried": {"class_path": name, "init_args": options}}, "data": data}
    if name in NETWORKS:
        config["model"] = {"network": NETWORKS[name]}
    return config


TRIALS: Mapping[str, dict[str, Any]] = {**_OF_THE_FEDERATION, **{name: _of_a_method(name) for name in ENTRIES}}
"""Name -> configuration that is merged into tiny.yaml."""


def arguments(name: str, folder: Path) -> list[str]:
    """Return the command line of a trial, which resumes the run if it has a checkpoint.

    Args:
        name: one of TRIALS.
        folder: the run folder; the trial's configuration is written beside it.
    """
    file = folder.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(TRIALS[name], sort_keys=False))
    files = ("--config", str(tiny_cli.TINY), "--config", str(file))
    return ["fit", *files, "--run.dir", str(folder), "--ckpt_path", "last"]
