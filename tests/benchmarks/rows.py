"""Rows of the results, computed from reports: medians, ratios, warnings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.rounds import Measured
from benchmarks.wire import Report

Row = dict[str, Any]

REQUIRED = (
    "work",
    "engine",
    "seconds_per_round_median",
    "seconds_per_round_min",
    "ratio_to_loop",
    "ratio_to_floor",
    "peak_rss_mb",
)
"""Keys of every row. Figures are numbers, or None where they were not measured."""


def share_outside_steps(reports: Sequence[Report]) -> float:
    """Median share of a round that is neither forward nor backward pass nor optimizer step, in [0, 1]."""
    return median(1 - report["step_seconds"] / report["seconds"] for report in reports)


def row_of(work: str, variant: str, engine: str, measured: Measured) -> Row:
    """One engine's row, without figures that compare it with others.

    Args:
        work: the work's name.
        variant: tells rows of one work and engine apart.
        engine: the engine's name.
        measured: the process's reports; if it failed, all figures are None and ``not_run`` says why.
    """
    row: Row = dict.fromkeys(REQUIRED)
    row |= {"work": work, "engine": engine, "variant": variant, "not_run": measured.failure, "warning": None}
    if measured.failure is not None or not measured.rounds:
        return row
    seconds = [report["seconds"] for report in measured.rounds]
    if all("between_seconds" in report for report in measured.rounds):
        row["seconds_between_rounds_median"] = median(report["between_seconds"] for report in measured.rounds)
    return row | {
        "seconds_per_round_median": median(seconds),
        "seconds_per_round_min": min(seconds),
        "rounds": len(seconds),
        "share_outside_steps": share_outside_steps(measured.rounds) if "step_seconds" in measured.rounds[0] else None,
        **measured.memory,
        **measured.info,
        "seconds_of_rounds": seconds,
        **_of_device(measured, median(seconds)),
    }


def _of_device(measured: Measured, seconds: float) -> Row:
    """``device_seconds`` and ``device_kernels`` of the noted round; ``device_busy``, the seconds' share of a round."""
    noted = next((r for r in measured.warmup if "device_seconds" in r), None)
    if noted is None:
        return {}
    device_seconds = noted["device_seconds"]
    return {
        "device_seconds": device_seconds,
        "device_kernels": noted["device_kernels"],
        "device_busy": device_seconds / seconds,
    }


def ran(row: Row) -> bool:
    """Whether the row has figures."""
    return row["seconds_per_round_median"] is not None


def add_rates(row: Row, client_steps: int, clients: int) -> None:
    """Add client steps per second and seconds per sampled client to a row.

    Args:
        row: changed in place.
        client_steps: of a round.
        clients: of a round.
    """
    row["client_steps_per_second"] = row["seconds_per_sampled_client"] = None
    if ran(row):
        row["client_steps_per_second"] = client_steps / row["seconds_per_round_median"]
        row["seconds_per_sampled_client"] = row["seconds_per_round_median"] / clients


def add_ratios_to_loop(rows: Sequence[Row], loop: str = "loop") -> None:
    """Add each row's median divided by that of the loop of the same work and variant; 1 for the loop itself."""
    medians = {(r["work"], r["variant"]): r["seconds_per_round_median"] for r in rows if r["engine"] == loop and ran(r)}
    for row in rows:
        base = medians.get((row["work"], row["variant"]))
        row["ratio_to_loop"] = row["seconds_per_round_median"] / base if base is not None and ran(row) else None


def add_floor(row: Row, flops: int, flops_per_second: float) -> None:
    """Add the seconds that the arithmetic alone would take, and how many times as long the round took.

    Args:
        row: changed in place. It gets a warning if a round was faster, which means that the peak was measured badly.
        flops: of a round.
        flops_per_second: the machine's best.
    """
    floor = flops / flops_per_second
    row |= {
        "flops_per_round": flops,
        "peak_gflops_per_second": flops_per_second / 1e9,
        "floor_seconds": floor,
        "ratio_to_floor": None,
        "warning": None,
    }
    if ran(row):
        row["ratio_to_floor"] = row["seconds_per_round_median"] / floor
        if row["seconds_per_round_min"] < floor:
            row["warning"] = "a round was faster than the arithmetic floor: measure on a quiet machine"


def add_memory_beyond_data(row: Row, data_bytes: int) -> None:
    """Add the resident memory beyond the training samples to a row.

    Args:
        row: changed in place.
        data_bytes: of the training samples as the engine holds them.
    """
    row["data_mb"] = data_bytes / 1e6
    for key in ("peak_rss", "rss"):
        measured = row.get(f"{key}_mb")
        row[f"{key}_beyond_data_mb"] = None if measured is None else measured - data_bytes / 1e6
