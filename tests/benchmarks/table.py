"""Rows as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row

Column = tuple[str, str, str, float]
"""Heading, key of the row, format, factor."""

_ROUND: list[Column] = [
    ("median s", "seconds_per_round_median", ".3f", 1),
    ("min s", "seconds_per_round_min", ".3f", 1),
]
_RATIOS: list[Column] = [
    ("x loop", "ratio_to_loop", ".2f", 1),
    ("x floor", "ratio_to_floor", ".2f", 1),
]
_MEMORY: list[Column] = [("peak MB", "peak_rss_mb", ".0f", 1)]
_SIDE_BY_SIDE: list[Column] = [
    ("threads", "threads", "d", 1),
    *_ROUND,
    *_RATIOS,
    ("steps/s", "client_steps_per_second", ".0f", 1),
    ("outside %", "share_outside_steps", ".1f", 100),
    *_MEMORY,
    ("beyond data MB", "rss_beyond_data_mb", ".0f", 1),
]
_DEVICE: list[Column] = [
    ("GPU busy %", "device_busy", ".0f", 100),
    ("kernels", "device_kernels", "d", 1),
    ("peak GPU MB", "peak_gpu_mb", ".0f", 1),
]
COLUMNS: dict[str, list[Column]] = {
    "W4": [
        ("ms/client", "seconds_per_sampled_client", ".3f", 1e3),
        *_SIDE_BY_SIDE,
        ("peak beyond data MB", "peak_rss_beyond_data_mb", ".0f", 1),
    ],
    "W5": [
        *_ROUND,
        ("added s", "added_seconds_per_round", "+.3f", 1),
        ("added FLOPs", "added_flops_share", "+.0%", 1),
        ("added / needed", "added_over_needed", ".2f", 1),
        ("added up MB", "added_uplink_bytes_per_round", "+.2f", 1e-6),
        ("added down MB", "added_downlink_bytes_per_round", "+.2f", 1e-6),
        ("task end s", "added_task_end_seconds", ".2f", 1),
        ("task end up MB", "added_task_end_uplink_bytes", "+.1f", 1e-6),
        ("task end down MB", "added_task_end_downlink_bytes", "+.1f", 1e-6),
        *_MEMORY,
    ],
    "W6": [
        ("extraction s", "seconds_per_extraction_median", ".3f", 1),
        ("of it clients s", "clients_seconds_per_extraction_median", ".3f", 1),
        ("epoch s", "seconds_per_local_epoch_median", ".3f", 1),
        ("x epoch", "ratio_to_local_epoch", ".2f", 1),
        ("clients x epoch", "clients_ratio_to_local_epoch", ".2f", 1),
        ("paper", "paper_ratio_to_local_epoch", ".2f", 1),
        *_MEMORY,
    ],
    "W7": [
        *_ROUND,
        ("Fishers s", "fisher_seconds_per_round_median", ".3f", 1),
        ("plain round s", "fedavg_seconds_per_round_median", ".3f", 1),
        ("Fishers x epoch", "fisher_ratio_to_local_epoch", ".2f", 1),
        ("round x epoch", "round_ratio_to_local_epoch", ".2f", 1),
        *_MEMORY,
    ],
    "W8": [
        *_ROUND,
        ("late x early tasks", "ratio_of_last_to_first_tasks", ".2f", 1),
        *_MEMORY,
        ("beyond data MB", "rss_beyond_data_mb", ".0f", 1),
    ],
}


def cell(row: Row, column: Column) -> str:
    """One figure; a dash where there is none."""
    _, key, form, factor = column
    value: Any = row.get(key)
    if value is None:
        return "-"
    return format(value if form == "d" else value * factor, form)


def shortened(text: str, length: int = 90) -> str:
    """The beginning of a text; the results file has all of it."""
    return text if len(text) <= length else text[: length - 3] + "..."


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of one work's rows."""
    columns = COLUMNS.get(rows[0]["work"], _SIDE_BY_SIDE)
    if any(row.get("peak_gpu_mb") for row in rows):
        columns = [*columns, *_DEVICE]
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for column in columns:
        table.add_column(column[0], justify="right")
    table.add_column("remarks")
    for row in rows:
        reason = row.get("not_run")
        remarks = [f"not run: {shortened(reason)}" if reason else None, row.get("warning"), row.get("settings")]
        name = " ".join(filter(None, [row["engine"], row.get("variant")]))
        table.add_row(name, *(cell(row, column) for column in columns), "; ".join(filter(None, remarks)))
    return table


def show(rows: Sequence[Row], titles: dict[str, str], console: Console) -> None:
    """Print a table per work, then the machine, the versions and the arithmetic peak."""
    for work in dict.fromkeys(row["work"] for row in rows):
        own = [row for row in rows if row["work"] == work]
        console.print(table_of(f"{work} {titles.get(work, '')}", own))
    if rows:
        about = {**rows[-1]["machine"], **rows[-1]["versions"]}
        console.print(", ".join(f"{key} {value}" for key, value in about.items() if value), highlight=False)
        peaks = [row["peak_gflops_per_second"] for row in rows if row.get("peak_gflops_per_second")]
        if peaks:
            console.print(f"arithmetic peak {max(peaks):.0f} GFLOP/s (float32 matrix product)", highlight=False)
