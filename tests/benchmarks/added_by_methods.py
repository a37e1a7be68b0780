"""W5: what each method adds to a round of federated averaging, on W1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import cfl.methods
from benchmarks.bench import Bench
from benchmarks.config import config_of
from benchmarks.counted import counted_flops
from benchmarks.flops import round_flops
from benchmarks.rounds import Measured
from benchmarks.rows import Row, add_floor, add_rates, row_of
from benchmarks.running import TESTS
from benchmarks.works import W1, Work

METHODS = TESTS.parent / "configs" / "methods"
WORK = replace(W1, name="W5", title="methods: what each adds to a round of W1, in its second task")


def added_by_methods(bench: Bench, work: Work = WORK, files: Sequence[Path] | None = None) -> list[Row]:
    """Measure every method against federated averaging, the two in turns.

    ``fedavg.yaml`` against federated averaging itself shows how far two equal runs differ.

    Args:
        bench: settings; its engines do not matter here.
        work: what a round is.
        files: configurations of methods; None takes all of ``configs/methods``.

    Returns:
        A row per method.
    """
    rows = []
    plain: dict[str, int | None] = {}
    for file in sorted(METHODS.glob("*.yaml")) if files is None else files:
        config = config_of(work, bench.data(work), "second task")
        config["data"]["scenario"] = scenario_for(yaml.safe_load(file.read_text())["methods"] or {})
        bench.say(f"{work.name} {file.stem}")
        measured = bench.interleave(
            {
                "federated averaging": bench.fit(work, bench.cfl, config, name=f"{file.stem}-base"),
                file.stem: bench.fit(work, bench.cfl, config, [file], name=file.stem),
            }
        )
        row = row_of(work.name, file.stem, bench.cfl.name, measured[file.stem])
        row["not_run"] = row["not_run"] or measured["federated averaging"].failure
        add_rates(row, work.client_steps, work.sampled)
        add_floor(row, round_flops(work), bench.peak.flops_per_second)
        if row["not_run"] is None:
            row |= added(measured[file.stem], measured["federated averaging"])
            scenario, place = config["data"]["scenario"], bench.folder / work.label
            if scenario not in plain:
                plain[scenario] = counted_flops(place / f"flops-{scenario}", config)
            row |= needed(row, counted_flops(place / f"flops-of-{file.stem}", config, [file]), plain[scenario])
        rows.append(row)
    return rows


def scenario_for(methods: dict[str, Any]) -> str:
    """Return the first of ``domain``, ``task`` and ``class`` that all methods support; ``domain`` if there is none.

    Args:
        methods: as in a configuration, name -> ``{class_path: ...}``.
    """
    classes = [getattr(cfl.methods, entry["class_path"].rpartition(".")[2]) for entry in methods.values()]
    return next((s for s in ("domain", "task", "class") if all(s in method.scenarios for method in classes)), "domain")


def needed(row: Row, flops: int | None, plain: int | None) -> dict[str, float | None]:
    """Seconds that a method's added FLOPs need at the rate of federated averaging, beside the seconds that it adds.

    Args:
        row: with seconds of federated averaging, and added seconds.
        flops: of a round with the method; None if they could not be counted.
        plain: of a round of federated averaging; None if they could not be counted.

    Returns:
        ``added_flops_share``, a share of the FLOPs of federated averaging; ``needed_seconds_per_round``;
        ``added_over_needed``, which is None where less than a hundredth is added: the added seconds are then
        elementwise work and noise.
    """
    if not flops or not plain:
        return {"added_flops_share": None, "needed_seconds_per_round": None, "added_over_needed": None}
    share = (flops - plain) / plain
    seconds = share * row["fedavg_seconds_per_round_median"]
    over = row["added_seconds_per_round"] / seconds if share > 0.01 else None
    return {"added_flops_share": share, "needed_seconds_per_round": seconds, "added_over_needed": over}


def added(method: Measured, base: Measured) -> dict[str, float]:
    """Seconds, bytes and memory that one run has more than another, in a round and at the first task's end.

    Figures of a round are medians over turns of the difference between the two rounds of a turn. Bytes of the task's
    end are without those that a round adds.
    """
    pairs = list(zip(method.rounds, base.rounds, strict=True))
    first, base_first = method.warmup[0], base.warmup[0]
    uplink, downlink = (median(m[key] - b[key] for m, b in pairs) for key in ("uplink_bytes", "downlink_bytes"))
    return {
        "fedavg_seconds_per_round_median": median(b["seconds"] for _, b in pairs),
        "added_seconds_per_round": median(m["seconds"] - b["seconds"] for m, b in pairs),
        "added_uplink_bytes_per_round": uplink,
        "added_downlink_bytes_per_round": downlink,
        "added_task_end_seconds": first["task_end_seconds"],
        "added_task_end_uplink_bytes": first["uplink_bytes"] - base_first["uplink_bytes"] - uplink,
        "added_task_end_downlink_bytes": first["downlink_bytes"] - base_first["downlink_bytes"] - downlink,
        "added_peak_rss_mb": method.memory["peak_rss_mb"] - base.memory["peak_rss_mb"],
    }
