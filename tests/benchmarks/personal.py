"""W8: FedWeIT with more clients, and over more tasks. Both should add no cost but that of the clients' own state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.config import config_of
from benchmarks.rows import Row, add_memory_beyond_data, ran, row_of
from benchmarks.works import Work

WORK = Work(
    name="W8",
    title="FedWeIT: LeNet, 5 of 5, 20 and 100 clients x 200 samples, batch 100; and a task per round",
    network="LeNet",
    options={},
    shape=(3, 32, 32),
    clients=5,
    sampled=5,
    samples=200,
    batch_size=100,
    lr=3.3e-4,
    classes=5,
)
POPULATIONS = (5, 20, 100)
TASKS = {"a task per round": True, "a task per round frozen": False}
"""Variant -> whether adaptive weights of earlier tasks go on being trained, which costs more with every task."""


def personal(
    bench: Bench, work: Work = WORK, populations: Sequence[int] = POPULATIONS, state_memory_mb: float = 2048
) -> list[Row]:
    """Measure populations in the second task, and both variants of FedWeIT as tasks pass, all in turns.

    Args:
        bench: settings.
        work: what a round is; its number of clients is replaced by ``populations`` and kept where tasks pass.
        populations: numbers of clients.
        state_memory_mb: see ``federated.client_state_memory_mb``.

    Returns:
        A row per population and variant.
    """
    works = {
        f"{clients} clients": replace(work, clients=clients, variant=f"{clients} clients") for clients in populations
    }
    start, data_bytes = {}, {}
    for name, of in works.items():
        config = config_of(of, bench.data(of), "second task")
        start[name] = bench.fit(of, bench.cfl, _with_fedweit(config, True, state_memory_mb))
        data_bytes[name] = of.data_bytes(floats=False)
    for name, retroactive in TASKS.items():
        of = replace(work, variant=name)
        config = config_of(of, bench.data(of), "a task per round", bench.warmup + bench.rounds + 1)
        start[name] = bench.fit(of, bench.cfl, _with_fedweit(config, retroactive, state_memory_mb))
        data_bytes[name] = of.data_bytes(floats=False)
    measured = bench.interleave(start)
    rows = []
    for name, found in measured.items():
        row = row_of(work.name, name, bench.cfl.name, found)
        add_memory_beyond_data(row, data_bytes[name])
        if ran(row) and name in TASKS:
            row["ratio_of_last_to_first_tasks"] = late_over_early(row["seconds_of_rounds"])
        rows.append(row)
    return rows


def _with_fedweit(config: dict[str, Any], retroactive: bool, state_memory_mb: float) -> dict[str, Any]:
    method = {"class_path": "FedWeIT", "init_args": {"retroactive": retroactive}}
    lr = config["model"]["optimizer"]["init_args"]["lr"]
    config["model"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": lr}}
    return config | {"methods": {"fedweit": method}, "federated": {"client_state_memory_mb": state_memory_mb}}


def late_over_early(seconds: Sequence[float]) -> float:
    """Median seconds of the later half of the rounds over that of the earlier half."""
    half = len(seconds) // 2
    return median(seconds[len(seconds) - half :]) / median(seconds[:half]) if half else 1.0
