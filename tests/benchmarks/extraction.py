"""W6: a GPSE extraction of FOT against one local epoch of the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.bench import Bench
from benchmarks.config import config_of
from benchmarks.rows import Row, row_of
from benchmarks.wire import Report
from benchmarks.works import W1, W2, Work


@dataclass(frozen=True)
class Extraction:
    """A network, its clients, and how FOT sketches.

    Attributes:
        work: what a round is; every round is a task of its own.
        sketch_size: of the method FOT; with None, second moments are sent instead of sketches.
        scenario: of the data; in ``domain``, the output layer is sketched too.
        paper_ratio: GPSE's seconds over those of a local epoch in FOT's Table 4.
    """

    work: Work
    sketch_size: float | dict[str, float] | None
    scenario: str
    paper_ratio: float


THRESHOLD = 0.5
"""FOT's threshold. It is low so that the bases are neither empty nor full after as many tasks as are measured."""

_SKETCHES = (
    Extraction(replace(W1, name="W6", variant="MLP"), 1.0, "domain", 0.024 / 0.067),
    Extraction(replace(W2, name="W6", variant="AlexNet", tasks=1), {"conv": 1.0, "linear": 5.0}, "task", 0.172 / 0.074),
    Extraction(
        Work(
            name="W6",
            title="",
            variant="ResNet18",
            network="ResNet18",
            options={"width": 32, "norm": "batch_no_stats", "stem_stride": 2},
            shape=(3, 84, 84),
            clients=4,
            sampled=2,
            samples=50,
            batch_size=16,
            lr=0.01,
            classes=5,
        ),
        5.0,
        "task",
        0.215 / 0.194,
    ),
)

EXTRACTIONS = _SKETCHES + tuple(
    replace(case, work=replace(case.work, variant=f"{case.work.variant} covariance"), sketch_size=None)
    for case in _SKETCHES
)


def extraction(bench: Bench, cases: Sequence[Extraction] = EXTRACTIONS) -> list[Row]:
    """Measure the networks in turns.

    Returns:
        A row per network; its round is one local epoch of the sampled clients and one extraction.
    """
    start = {}
    for case in cases:
        config = config_of(case.work, bench.data(case.work), "a task per round", bench.warmup + bench.rounds + 1)
        config["data"]["scenario"] = case.scenario
        options: dict[str, Any] = {"threshold": THRESHOLD, "sketch_size": case.sketch_size}
        options["message"] = "sketch" if case.sketch_size else "covariance"
        config["methods"] = {"fot": {"class_path": "FOT", "init_args": options}}
        start[case.work.variant] = bench.fit(case.work, bench.cfl, config)
    measured = bench.interleave(start)
    rows = []
    for case in cases:
        found = measured[case.work.variant]
        row = row_of(case.work.name, case.work.variant, bench.cfl.name, found)
        row["paper_ratio_to_local_epoch"] = case.paper_ratio
        if row["not_run"] is None:
            row |= extraction_figures(found.rounds)
        rows.append(row)
    return rows


def extraction_figures(reports: Sequence[Report]) -> dict[str, float]:
    """Seconds of extractions and local epochs, medians over rounds, and their ratios.

    The paper's table holds the clients' part only, which is forward passes and sketches. The rest is the server's part.
    """
    whole = [report["task_end_seconds"] for report in reports]
    clients = [report["task_end_clients_seconds"] for report in reports]
    epochs = [report["seconds"] - report["task_end_seconds"] for report in reports]
    return {
        "seconds_per_extraction_median": median(whole),
        "seconds_per_extraction_min": min(whole),
        "clients_seconds_per_extraction_median": median(clients),
        "seconds_per_local_epoch_median": median(epochs),
        "ratio_to_local_epoch": median(w / e for w, e in zip(whole, epochs, strict=True)),
        "clients_ratio_to_local_epoch": median(c / e for c, e in zip(clients, epochs, strict=True)),
    }
