"""W7: FedCurv's Fishers after local training against one plain local epoch of the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.config import config_of
from benchmarks.rows import Row, row_of
from benchmarks.wire import Report
from benchmarks.works import Work

WORK = Work(
    name="W7",
    title="FedCurv on MNIST: MnistCNN, 16 of 96 clients x 612 samples, batch 256",
    network="MnistCNN",
    options={},
    shape=(1, 28, 28),
    clients=96,
    sampled=16,
    samples=612,
    batch_size=256,
    lr=0.01,
)

STRENGTH = 1e-4
"""FedCurv's strength. It is small because images are random here, so clients never agree and a strong pull diverges."""


def fisher(bench: Bench, work: Work = WORK) -> list[Row]:
    """Measure FedCurv and federated averaging in turns.

    Returns:
        A row; its round is one local epoch of the sampled clients, and their Fishers.
    """
    base = config_of(work, bench.data(work))
    options: dict[str, Any] = {"strength": STRENGTH, "fisher_batch_size": work.batch_size}
    config = base | {"methods": {"fedcurv": {"class_path": "FedCurv", "init_args": options}}}
    measured = bench.interleave(
        {
            "federated averaging": bench.fit(work, bench.cfl, base, name="base"),
            "fedcurv": bench.fit(work, bench.cfl, config, name="fedcurv"),
        }
    )
    plain, found = measured["federated averaging"], measured["fedcurv"]
    row = row_of(work.name, "fedcurv", bench.cfl.name, found)
    row["not_run"] = row["not_run"] or plain.failure
    if row["not_run"] is None:
        row |= fisher_figures(found.rounds, plain.rounds)
    return [row]


def fisher_figures(reports: Sequence[Report], base: Sequence[Report]) -> dict[str, float]:
    """Seconds of a round's Fishers and of a plain round, medians over turns, and the ratios within turns.

    Args:
        reports: reports of FedCurv's rounds; ``close_clients_seconds`` covers computing, sending and keeping Fishers.
        base: reports of federated averaging's rounds, in the same turns.
    """
    pairs = list(zip(reports, base, strict=True))
    return {
        "fisher_seconds_per_round_median": median(r["close_clients_seconds"] for r in reports),
        "fisher_seconds_per_round_min": min(r["close_clients_seconds"] for r in reports),
        "fedavg_seconds_per_round_median": median(b["seconds"] for b in base),
        "fisher_ratio_to_local_epoch": median(r["close_clients_seconds"] / b["seconds"] for r, b in pairs),
        "round_ratio_to_local_epoch": median(r["seconds"] / b["seconds"] for r, b in pairs),
    }
