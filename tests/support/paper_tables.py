"""The tables of papers, points of them, and run folders as ``cfl fit`` would leave them, without running anything."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from cfl.papers.definition import SCALE, Table, papers
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.running.resolving import Resolver

NAN = float("nan")
MATRIX = [[80.0, 10.0, 10.0], [70.0, 90.0, 10.0], [60.0, 85.0, 95.0]]
"""Three tasks: ACC 80, FGT (20 + 5) / 2 = 12.5, diagonal mean 88.333..."""


@cache
def resolver() -> Resolver:
    """The resolver that all tests share, because its parser takes long to build and it caches what it has resolved."""
    return Resolver()


@cache
def tables_of(paper_name: str) -> dict[str, Table]:
    """The tables of a paper by name."""
    (paper,) = [paper for paper in papers() if paper.name == paper_name]
    return {table.name: table for table in paper.tables()}


def fot() -> dict[str, Table]:
    """The tables of FOT by name."""
    return tables_of("fot")


def fedcurv() -> dict[str, Table]:
    """The tables of FedCurv by name."""
    return tables_of("fedcurv")


@cache
def every_table() -> dict[str, Table]:
    """The tables of all papers by full name, read once."""
    return {table.full_name: table for paper in papers() for table in paper.tables()}


def point(scale: str = "paper", **axes: str) -> dict[str, str]:
    """A point, by default FedAvg on non-IID Permuted MNIST."""
    return {"benchmark": "pmnist", "partition": "shards", "method": "fedavg", **axes, SCALE: scale}


def write_run(
    folder: Path,
    arguments: Sequence[str],
    seed: int = 0,
    acc: float | None = 80.0,
    matrix: Sequence[Sequence[float]] = MATRIX,
    config: Mapping[str, Any] | None = None,
    **figures: Any,
) -> Path:
    """Write the folder of a finished run.

    Args:
        folder: must not exist yet.
        arguments: of ``cfl fit``; the configuration to which they resolve becomes ``config.yaml``.
        seed: the run's seed.
        acc: ACC in the summary; None where undefined.
        matrix: ``[T][T]``.
        config: replaces the configuration to which the arguments resolve.
        figures: further entries of the summary.
    """
    folder.mkdir(parents=True)
    settings = {**(config or resolver().config(arguments)), "seed_everything": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    write_matrix_csv(folder / "accuracy_matrix.csv", torch.tensor(matrix, dtype=torch.float64))
    with (folder / "rounds.csv").open("w") as file:
        csv.writer(file, lineterminator="\n").writerows([["round", "clients"], [0, 3], [1, 4]])
    methods = list(settings["methods"])
    if "fot" in methods:
        rows = [[t, layer, 10.0 * (t + 1) + k] for t in range(len(matrix) - 1) for k, layer in enumerate(("a", "b"))]
        with (folder / "fot.csv").open("w") as file:
            csv.writer(file, lineterminator="\n").writerows([["task", "layer", "used_space"], *rows])
    summary = {
        "method": "+".join(methods) or "fedavg",
        "benchmark": "made-up",
        "partition": "shards-2",
        "scenario": "domain",
        "seed": seed,
        "acc": acc,
        **dict.fromkeys(("fgt_max", "bwt", "fwt")),
        "fgt": 12.5,
        "uplink_bytes": 1,
        "downlink_bytes": 2,
        "seconds": 100.0,
        "rounds": 2,
        "tasks": len(matrix),
        "clients": 6,
        "config_hash": "0" * 12,
        "machine": "made up",
        "device": "cpu",
        "versions": {"cfl": "0", "torch": "0"},
        **figures,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
