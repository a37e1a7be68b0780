"""How time and memory grow with the numbers of clients, clients per round, tasks, parameters and processes.

Each of these is a line of measured points, which should stay flat or straight.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

import cfl.models
from benchmarks.added_by_methods import METHODS, scenario_for
from benchmarks.bench import Bench, Peak
from benchmarks.config import config_of
from benchmarks.engines import Engine
from benchmarks.flops import round_flops
from benchmarks.machine import machine, versions
from benchmarks.rounds import Measured, interleave
from benchmarks.rows import Row
from benchmarks.running import NotRun, Running
from benchmarks.table import Column, cell, shortened
from benchmarks.works import MANY, W1, Work
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError

ROOM = 4
"""A point is measured only if so many copies of its data fit into the available memory."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
POPULATIONS = (100, 1000, 10_000, 100_000, 1_000_000)
SAMPLED = (10, 100, 1000, 10_000)
TASKS = (5, 10, 20, 50, 100)
PARAMETERS = (10_000, 100_000, 1_000_000, 10_000_000)
PROCESSES = (2, 8, 64)

TASK_WORK = Work(
    name="tasks",
    title="MLP 64-32-32-2, 2 of 2 clients x 40 samples, batch 10, a round per task",
    network="MLP",
    options={"hidden": [32, 32], "dropout": 0.0},
    shape=(1, 8, 8),
    clients=2,
    sampled=2,
    samples=40,
    batch_size=10,
    lr=0.01,
    classes=2,
)
TASK_METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fot": {},
    "gpm": {},
    "rgo": {},
    "ewc": {},
    "fedcurv": {},
    "er": {"size": 10, "per_task": False},
    "gradient-compensation": {"size": 10, "per_task": False},
    "icarl": {"size": 210},
    "fedweit": {},
    "apd": {},
    "cfed": {},
    "fedcil": {"consolidation_steps": 1},
}
"""Files of ``configs/methods`` -> options that are changed here, such as memories of one size for the whole run."""


@dataclass
class Point:
    """One point of a line, measured in one run of ``cfl fit``.

    Attributes:
        row: the part of the point's row that is known before it is measured.
        work: what a round is.
        engine: options and environment of ``cfl fit``.
    """

    row: Row
    work: Work
    engine: Engine = field(default_factory=lambda: Engine("cfl"))


def fixed_engine(width: int, stack: int, workers: int = 2, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Options of ``cfl fit`` that fix the engine, so that none is chosen by timing."""
    kind = ("--engine.kind", "workers", "--engine.workers", str(workers), "--engine.products", "blas")
    return (*kind, "--engine.stack", str(stack), "--schedule.cohort_width", str(width), *more)


def stacked_engine(sampled: int) -> Engine:
    """Return an engine with cohorts of at most 128 clients, half of them stacked on each of two threads."""
    width = min(128, sampled)
    return Engine("cfl", options=fixed_engine(width, -(-width // 2)))


# Figures.


def hidden_width(parameters: int, inputs: int = 64, outputs: int = 10) -> int:
    """Units of each of two hidden layers with which an MLP has about ``parameters`` parameters."""
    linear = inputs + outputs + 2
    return round((-linear + (linear**2 + 4 * (parameters - outputs)) ** 0.5) / 2)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last fifth of the values; a fifth has at least two values."""
    part = min(len(values), max(2, len(values) // 5))
    return median(values[:part]), median(values[-part:])


def spread(values: Sequence[float]) -> float:
    """Interquartile range of the values, divided by their median."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return (high - low) / middle


def add_slopes(rows: Sequence[Row], per: str, keys: Mapping[str, str]) -> None:
    """Add to each row but the first the slope since the row before: the change of ``key`` over that of ``per``.

    Args:
        rows: changed in place; rows that were not run are left out.
        per: key of the numbers by which is divided.
        keys: key of a figure -> key of its slope.
    """
    known = [row for row in rows if not row.get("not_run")]
    for before, row in pairwise(known):
        for key, slope in keys.items():
            row[slope] = (row[key] - before[key]) / (row[per] - before[per])


def ring_seconds(processes: int, size: int, latency: float, bytes_per_second: float) -> float:
    """Seconds of a sum over a ring of ``n`` processes: each sends ``2 (n - 1)`` parts of ``size / n`` bytes."""
    steps = 2 * (processes - 1)
    return steps * (latency + size / processes / bytes_per_second)


# Measuring.


def available_bytes() -> int:
    """Memory that a new process could have."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def measure(bench: Bench, points: Sequence[Point], rounds: int) -> list[Row]:
    """Let the processes of a line take rounds in turns; returns the points' rows with their figures."""
    start = {}
    for point in points:
        name = str(point.row["point"])
        if ROOM * point.work.data_bytes(False) > available_bytes():
            continue
        work = replace(point.work, name=str(point.row["line"]), variant=name)
        start[name] = bench.fit(work, point.engine, config_of(work, bench.data(work)), name=name)
    measured = interleave(start, rounds, bench.warmup, bench.say, lambda turn: turn % 5 or bench.peak.measure())
    rows = []
    for point in points:
        found = measured.get(str(point.row["point"]), Measured(failure="its data would not fit into the free memory"))
        row = point.row | {"not_run": found.failure}
        if found.failure is None:
            seconds = [report["seconds"] for report in found.rounds]
            row |= {**found.info, **found.memory, "seconds": median(seconds), "spread": spread(seconds)}
            row |= {"rounds": rounds, "seconds_of_rounds": seconds, "data_mb": point.work.data_bytes(False) / 1e6}
            row["seconds_per_client"] = row["seconds"] / point.work.sampled
            row["beyond_data_mb"] = row["rss_mb"] - row["processes"] * row["data_mb"]
            row["peak_beyond_data_mb"] = row["peak_rss_mb"] - row["processes"] * row["data_mb"]
        rows.append(row)
    return rows


def population(bench: Bench) -> list[Row]:
    """More clients, of which 100 train in a round."""
    works = [replace(MANY, clients=clients, sampled=100) for clients in POPULATIONS]
    points = [Point({"line": "clients", "point": w.clients}, w, stacked_engine(w.sampled)) for w in works]
    rows = measure(bench, points, 3 * bench.rounds)
    add_slopes(rows, "point", {"beyond_data_mb": "mb_per_client"})
    return rows


def per_round(bench: Bench) -> list[Row]:
    """More clients in a round, out of 10,000."""
    works = [replace(MANY, clients=10_000, sampled=sampled) for sampled in SAMPLED]
    points = [Point({"line": "round", "point": w.sampled}, w, stacked_engine(w.sampled)) for w in works]
    rows = measure(bench, points, bench.rounds)
    add_slopes(rows, "point", {"seconds": "seconds_per_added_client"})
    return rows


def size(bench: Bench) -> list[Row]:
    """Larger networks, against their arithmetic and their parameters."""
    base = replace(MANY, clients=20, sampled=10, samples=128, batch_size=64, lr=0.01)
    points = []
    for wanted in PARAMETERS:
        options = {"hidden": [hidden_width(wanted)] * 2, "dropout": 0.0}
        network = getattr(cfl.models, base.network)(base.shape, base.classes, **options)
        row = {"line": "size", "point": wanted, "parameters": sum(p.numel() for p in network.parameters())}
        points.append(Point(row, replace(base, options=options), Engine("cfl", options=fixed_engine(10, 1))))
    rows = measure(bench, points, bench.rounds)
    for row, point in zip(rows, points, strict=True):
        row["floor_seconds"] = round_flops(point.work) / bench.peak.flops_per_second
        row["peak_gflops_per_second"] = bench.peak.flops_per_second / 1e9
        if not row["not_run"]:
            row["over_floor"] = row["seconds"] / row["floor_seconds"]
            row["model_mb"] = 4e-6 * row["parameters"]
    add_slopes(rows, "model_mb", {"peak_rss_mb": "copies"})
    return rows


def processes(bench: Bench) -> list[Row]:
    """More processes: one and two are measured, more are computed from one with their share of the clients."""
    shares = [W1.sampled // n for n in PROCESSES]
    parallel = ("--trainer.strategy", "cfl.training.strategy.ClientParallel", "--trainer.devices", "2")
    points = [
        Point(
            {"line": "processes", "point": f"1 process, {sampled} client" + "s" * (sampled > 1), "processes": 1},
            replace(W1, sampled=sampled),
            Engine("cfl", options=fixed_engine(min(16, sampled), 1, 1), environment=ONE_THREAD),
        )
        for sampled in (W1.sampled, *shares)
    ]
    engine = Engine("cfl", options=fixed_engine(16, 1, 1, parallel), environment=ONE_THREAD)
    points.append(Point({"line": "processes", "point": "2 processes, 64 clients", "processes": 2}, W1, engine))
    rows = measure(bench, points, bench.rounds)
    if any(row["not_run"] for row in rows):
        return rows
    model = getattr(cfl.models, W1.network)(W1.shape, W1.classes, **W1.options)
    message = sum(4 * p.numel() for p in model.parameters())
    nothing, whole = (sum_seconds(count) for count in (1, message // 4))
    latency, rate = nothing / 2, message / max(whole - nothing, 1e-9)
    for n, share in zip(PROCESSES, rows[1 : 1 + len(shares)], strict=True):
        added = ring_seconds(n, message, latency, rate)
        row = {"line": "processes", "point": f"{n} processes, computed", "processes": n, "not_run": None}
        row |= {"seconds": share["seconds"] + added, "sum_seconds": added, "message_bytes": message}
        rows.append(row | {"latency": latency, "bytes_per_second": rate})
    for row in [rows[0], *rows[1 + len(shares) :]]:
        row["over_ideal"] = row["seconds"] * row["processes"] / rows[0]["seconds"]
    return rows


def sum_seconds(count: int, trials: int = 30) -> float:
    """Median seconds in which two processes add ``count`` float32 numbers up, as they do with clients' updates."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sum, (folder, count, trials), nprocs=2)
        return float(Path(folder, "seconds").read_text())


def _sum(rank: int, folder: str, count: int, trials: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    tensor, seconds = torch.ones(count), []
    for _ in range(trials):
        dist.barrier()
        started = time.perf_counter()
        distributed.add_up({"update": tensor})
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        Path(folder, "seconds").write_text(str(median(seconds)))
    dist.barrier()
    dist.destroy_process_group()


def tasks(bench: Bench, methods: Mapping[str, Mapping[str, Any]] = TASK_METHODS) -> list[Row]:
    """More tasks: their last rounds against their first ones, for every method that keeps something of a task."""
    rows = []
    for method, options in methods.items():
        start: dict[int, Callable[[], Running]] = {}
        folders = {}
        for count in TASKS:
            work = replace(TASK_WORK, variant=f"{method} {count}")
            config = config_of(work, bench.data(work), "a task per round", count + 1)
            config |= method_config(method, options)
            config["data"]["scenario"] = scenario_for(config["methods"])
            # The second task, the first in which a method has something to remember, is warm-up for some rounds.
            config["schedule"]["rounds_per_task"] = [1, 1 + bench.warmup] + [1] * (count - 1)
            config["checkpoint"] = {"enabled": True}
            name = f"{method}-{count}"
            folders[count] = bench.folder / work.label / name
            start[count] = bench.fit(work, Engine("cfl", options=fixed_engine(2, 1)), config, name=name)
        with ExitStack() as stack:
            running = {count: stack.enter_context(begin()) for count, begin in start.items()}
            found = {count: Measured() for count in running}
            for word in ("ready", "rounds"):  # all are idle before the first is measured
                for count, process in running.items():
                    _drive(process, word, count + bench.warmup, folders[count] / "last.ckpt", found[count])
        for count, one in found.items():
            row = {"line": "tasks", "point": f"{method}, {count} tasks", "method": method, "tasks": count}
            rows.append(row | {"not_run": one.failure} | ({} if one.failure else task_figures(one, 1 + bench.warmup)))
            bench.say(f"  {row['point']}: {one.failure or 'measured'}")
    return rows


def method_config(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file of ``configs/methods`` with some options replaced, and with a small classifier."""
    config: dict[str, Any] = yaml.safe_load((METHODS / f"{method}.yaml").read_text())
    for entry in (config["methods"] or {}).values():
        entry["init_args"] = {**entry.get("init_args", {}), **options}
    if "model" in config:
        optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": TASK_WORK.lr}}
        classifier = config["model"]["network"]["init_args"]["classifier"]
        classifier["init_args"] = dict(TASK_WORK.options)
        config["model"]["optimizer"] = optimizer
    return config


def _drive(process: Running, word: str, rounds: int, checkpoint: Path, found: Measured) -> None:
    if found.failure:
        return
    try:
        if word == "ready":
            found.info = process.ready()
            return
        for _ in range(rounds):
            report = process.round()
            found.rounds.append(report | {"checkpoint_bytes": checkpoint.stat().st_size})
        found.memory = process.finish()
    except NotRun as reason:
        found.failure = str(reason)


def task_figures(found: Measured, warmup: int) -> Row:
    """Early and late medians, and their ratio, of a process's reports at each task's end from the second task on."""
    reports = found.rounds[warmup:]
    series = {
        "round": [r["seconds"] - r["task_end_seconds"] for r in reports],
        "task_end": [r["task_end_seconds"] for r in reports],
        "between": [r["between_seconds"] for r in reports],
        "rss": [r["rss_mb"] for r in reports],
        "checkpoint": [r["checkpoint_bytes"] for r in reports],
    }
    row: Row = dict(found.memory)
    for key, values in series.items():
        row[f"{key}_early"], row[f"{key}_late"] = early, late = ends(values)
        row[f"{key}_growth"] = late / early if early else None
    return row | {"series": series}


LINES: dict[str, Callable[[Bench], list[Row]]] = {
    "clients": population,
    "round": per_round,
    "tasks": tasks,
    "size": size,
    "processes": processes,
}

# Tables.

_SECONDS: list[Column] = [("ms a round", "seconds", ".1f", 1e3), ("spread %", "spread", ".0f", 100)]
_MEMORY: list[Column] = [
    ("data MB", "data_mb", ".0f", 1),
    ("MB beyond the data", "beyond_data_mb", ".0f", 1),
    ("peak beyond it", "peak_beyond_data_mb", ".0f", 1),
]
COLUMNS: dict[str, list[Column]] = {
    "clients": [
        *_SECONDS,
        ("ms per sampled client", "seconds_per_client", ".3f", 1e3),
        ("start-up s", "startup_seconds", ".1f", 1),
        *_MEMORY,
        ("bytes per added client", "mb_per_client", ".0f", 1e6),
    ],
    "round": [
        *_SECONDS,
        ("ms per sampled client", "seconds_per_client", ".3f", 1e3),
        ("ms per added client", "seconds_per_added_client", ".3f", 1e3),
        *_MEMORY,
    ],
    "tasks": [
        ("round ms, first", "round_early", ".1f", 1e3),
        ("last", "round_late", ".1f", 1e3),
        ("x", "round_growth", ".2f", 1),
        ("task end ms, first", "task_end_early", ".1f", 1e3),
        ("last", "task_end_late", ".1f", 1e3),
        ("x", "task_end_growth", ".2f", 1),
        ("test and checkpoint ms, first", "between_early", ".0f", 1e3),
        ("last", "between_late", ".0f", 1e3),
        ("x", "between_growth", ".2f", 1),
        ("MB, first", "rss_early", ".0f", 1),
        ("last", "rss_late", ".0f", 1),
        ("checkpoint kB, first", "checkpoint_early", ".0f", 1e-3),
        ("last", "checkpoint_late", ".0f", 1e-3),
    ],
    "size": [
        ("exactly", "parameters", ",d", 1),
        *_SECONDS,
        ("floor ms", "floor_seconds", ".2f", 1e3),
        ("x floor", "over_floor", ".2f", 1),
        ("peak MB", "peak_rss_mb", ".0f", 1),
        ("copies of the added parameters", "copies", ".1f", 1),
    ],
    "processes": [
        *_SECONDS,
        ("of it the sum ms", "sum_seconds", ".2f", 1e3),
        ("x ideal", "over_ideal", ".2f", 1),
        ("peak MB", "peak_rss_mb", ".0f", 1),
    ],
}
POINTS = {"clients": "clients", "round": "sampled", "tasks": "method", "size": "parameters", "processes": "what"}


def markdown(line: str, rows: Sequence[Row]) -> str:
    """The table of a line."""
    columns = COLUMNS[line]
    heads = [POINTS[line], *(column[0] for column in columns)]
    lines = [heads, ["---", *["---:"] * len(columns)]]
    for row in rows:
        point = f"{row['point']:,}" if isinstance(row["point"], int) else row["point"]
        if row["not_run"]:
            lines.append([point, f"not run: {shortened(row['not_run'])}", *[""] * (len(columns) - 1)])
        else:
            lines.append([point, *(cell(row, column) for column in columns)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(results: Mapping[str, Any]) -> str:
    """Return all tables, and the machine and versions of the measurement, in Markdown."""
    about = {**results["machine"], **results["versions"]}
    parts = ["# Growth", ", ".join(f"{key} {value}" for key, value in about.items() if value)]
    for line, rows in results["lines"].items():
        title = (LINES[line].__doc__ or "").splitlines()[0]
        parts += [f"## {line}", title, markdown(line, rows)]
    return "\n\n".join(parts) + "\n"


def chosen_lines(names: str) -> list[str]:
    """Return the lines whose names are given, separated by commas, in the order of ``LINES``; all if none is given.

    Raises:
        ConfigError: an unknown name.
    """
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(wanted - set(LINES)):
        raise ConfigError("--lines", name, f"{', '.join(LINES)}, separated by commas")
    return [name for name in LINES if name in wanted or not wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and store; return the exit status."""
    parser = ArgumentParser(prog="python -m benchmarks.growth", description="What grows; see docs/growth.md.")
    parser.add_argument("--lines", default="", help="names separated by commas; all by default")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"), help="folder of growth.json and growth.md")
    given = parser.parse_args(arguments)
    try:
        names = chosen_lines(given.lines)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = given.out.absolute()
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "lines": {}, "minutes": {}}
    with Peak(folder / "peak.log") as peak:
        bench = Bench(folder, given.rounds, given.warmup, [], peak, lambda line: print(line, flush=True))
        for name in names:
            started = time.perf_counter()
            rows = LINES[name](bench)
            results["lines"][name] = rows
            results["minutes"][name] = (time.perf_counter() - started) / 60
            bench.say(f"\n{markdown(name, rows)}\n")
            (folder / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
            (folder / "growth.md").write_text(page(results))
    bench.say(f"results: {folder / 'growth.json'}")
    return 1 if any(row["not_run"] for rows in results["lines"].values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
