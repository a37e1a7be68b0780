"""Run folders as a fit leaves them, with made-up figures."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from cfl.metrics.transfer import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forgetting_max,
    forward_transfer,
)
from cfl.reporting.compare.reading import Reading, read
from cfl.reporting.matrix_file import read_matrix_csv, write_matrix_csv
from cfl.reporting.method_names import PRINTED, plain

METHOD_CLASSES = {plain(name): f"cfl.methods.{name}" for name in PRINTED if name}


def config_of(
    method: str, seed: int, benchmark: str, tasks: int, clients: int, rounds: int, **own: Any
) -> dict[str, Any]:
    """A resolved configuration, cut down; ``own`` are the method's options."""
    methods = {
        name: {"class_path": METHOD_CLASSES.get(plain(name), f"cfl.methods.{name}"), "init_args": dict(own)}
        for name in method.split("+")
        if name != "fedavg"
    }
    return {
        "seed_everything": seed,
        "trainer": {"precision": None, "devices": 1},
        "model": {
            "network": {"class_path": "cfl.models.MLP", "init_args": {"hidden": [10]}},
            "engine": {"kind": "auto"},
        },
        "data": {
            "stream": {"class_path": "cfl.data.streams.Permuted", "init_args": {"num_tasks": tasks}},
            "partition": {"class_path": "cfl.data.partitions.Shards", "init_args": {"per_client": 2}},
            "participation": None,
            "num_clients": clients,
            "root": None,
        },
        "methods": methods,
        "schedule": {"rounds_per_task": rounds // tasks, "batch_size": 16, "cohort_width": "auto"},
        "federated": {"server_lr": 1.0, "client_state_memory_mb": 2048},
        "run": {"benchmark": benchmark},
        "ckpt_path": None,
    }


def matrices(tasks: int, level: float, forgets: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Accuracies that start near ``level`` and lose ``forgets`` points a task, with noise; and those of the start."""
    noise = np.random.default_rng([seed, tasks, int(1000 * level)])
    a = np.full((tasks, tasks), 10.0)
    for t in range(tasks):
        for i in range(tasks):
            a[t, i] = level - forgets * (t - i) if i <= t else 12.0
    a = np.clip(a + noise.normal(0, 1.5, a.shape), 1, 99)
    return torch.from_numpy(a), torch.from_numpy(noise.uniform(8, 12, tasks))


def matrix(tasks: int, seed: int = 0) -> torch.Tensor:
    """Accuracies in per cent, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return 100 * torch.rand(tasks, tasks, generator=generator, dtype=torch.float64)


def make_run(
    folder: Path,
    method: str = "fot",
    seed: int = 0,
    benchmark: str = "digits",
    tasks: int = 3,
    level: float = 85.0,
    forgets: float = 2.0,
    clients: int = 10,
    rounds: int = 12,
    evaluate_every: int = 0,
    personal: int = 0,
    nll: bool = False,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write one run folder.

    Args:
        folder: must not exist yet.
        method: names joined by ``+``.
        level: accuracy of a task when it is learned.
        forgets: points lost per task.
        evaluate_every: rounds between evaluations; 0 evaluates at task ends only.
        personal: how many clients are evaluated one by one.
        nll: whether there is a matrix of negative log-likelihoods.
        options: the method's options.
        changes: entries of ``summary.json`` to replace; None removes one.
    """
    folder.mkdir(parents=True)
    a, b = matrices(tasks, level, forgets, seed)
    if changes.get("acc") is not None:
        a[-1] = changes["acc"]
    config = config_of(method, seed, benchmark, tasks, clients, rounds, **(options or {}))
    bytes_up = 1_000_000 * rounds * (2 if method == "fot" else 1)

    def number(value: torch.Tensor) -> float | None:
        return None if bool(torch.isnan(value)) else value.item()

    summary = {
        "method": method,
        "benchmark": benchmark,
        "partition": "shards-2",
        "participation": "all",
        "scenario": "domain",
        "seed": seed,
        "acc": number(average_accuracy(a)),
        "fgt": number(forgetting(a)),
        "fgt_max": number(forgetting_max(a)),
        "bwt": number(backward_transfer(a)),
        "fwt": number(forward_transfer(a, b)),
        "uplink_bytes": bytes_up,
        "downlink_bytes": bytes_up,
        "seconds": 0.25 * rounds + 0.01 * seed,
        "rounds": rounds,
        "tasks": tasks,
        "clients": clients,
        "config_hash": hashlib.blake2b(json.dumps(config).encode(), digest_size=6).hexdigest(),
        "used_space": 40.0 if method == "fot" else None,
    } | changes
    write_matrix_csv(folder / "accuracy_matrix.csv", a, b)
    if nll:
        write_matrix_csv(folder / "nll_matrix.csv", (100 - a) / 40)
    for client in range(personal):
        (folder / "clients").mkdir(exist_ok=True)
        own = a + 3 * np.sin(client + seed)
        write_matrix_csv(folder / "clients" / f"accuracy_matrix_{client:03d}.csv", own)
    _rounds(folder, a, rounds, tasks, bytes_up, float(summary["seconds"] or 0), evaluate_every)
    _partition(folder, tasks, clients, seed)
    if "fot" in method.split("+"):
        rows = [
            [task, layer, 64, 10, 15.0 * (task + 1) / (k + 1)]
            for task in range(tasks - 1)
            for k, layer in enumerate(("layers.0", "layers.1"))
        ]
        _table(folder / "fot.csv", ["task", "layer", "input_dim", "basis_size", "used_space"], rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def readings(folder: Path, *runs: dict[str, Any]) -> list[Reading]:
    """Write runs and read them; options of each as for :func:`make_run`."""
    return [read(make_run(folder / f"run{k}", **options), []) for k, options in enumerate(runs)]


def make_density_run(folder: Path, method: str = "fedweit", seed: int = 0, **options: Any) -> Path:
    """Write the folder of a density run, with tasks known and unknown in tests; options as for :func:`make_run`."""
    make_run(folder, method, seed, nll=True, **{"scenario": "density", **options})
    summary = json.loads((folder / "summary.json").read_text())
    summary = {key: value for key, value in summary.items() if key not in ("acc", "fgt", "fgt_max", "bwt", "fwt")}
    matrix = read_matrix_csv(folder / "nll_matrix.csv")[0]
    write_matrix_csv(folder / "nll_matrix_task_aware.csv", matrix / 2)
    nll = matrix[-1].mean().item()
    (folder / "summary.json").write_text(json.dumps(summary | {"nll": nll, "nll_task_aware": nll / 2}))
    (folder / "accuracy_matrix.csv").unlink()
    table = folder / "rounds.csv"
    header, *rows = [line.rpartition(",") for line in table.read_text().splitlines()]
    lines = [f"{header[0]},nll", *(f"{row[0]},{(100 - float(row[2])) / 40 if row[2] else ''}" for row in rows)]
    table.write_text("\n".join(lines) + "\n")
    return folder


def _rounds(
    folder: Path, a: torch.Tensor, rounds: int, tasks: int, bytes_up: int, seconds: float, evaluate_every: int
) -> None:
    per_task = rounds // tasks
    rows = []
    for r in range(rounds):
        task, within = divmod(r, per_task)
        end = within == per_task - 1
        acc: Any = ""
        if end or (evaluate_every and (within + 1) % evaluate_every == 0):
            full = a[task, : task + 1].mean().item()
            acc = full if end else full * (0.7 + 0.3 * (within + 1) / per_task)
        rows.append([r, task, 5, 1.0, bytes_up * (r + 1) // rounds, seconds * (r + 1) / rounds, acc])
    _table(folder / "rounds.csv", ["round", "task", "clients", "loss", "uplink_bytes", "seconds", "acc"], rows)


def _partition(folder: Path, tasks: int, clients: int, seed: int) -> None:
    noise = np.random.default_rng([7, seed])
    rows: list[list[Any]] = []
    for task in range(tasks):
        for client in range(clients):
            counts = noise.integers(0, 40, 10) * (noise.random(10) < 0.25)
            rows.append([task, client, int(counts.sum()), int((counts > 0).sum()), *counts.tolist(), "00"])
    _table(
        folder / "partition.csv",
        ["task", "client", "samples", "classes", *(f"class_{k:02d}" for k in range(10)), "hash"],
        rows,
    )


def _table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
