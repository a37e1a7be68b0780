"""Works by name, and one invocation from selection to results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import added_by_methods as methods
from benchmarks.bench import Bench, Peak
from benchmarks.engines import Engine
from benchmarks.extraction import extraction
from benchmarks.fisher import WORK as W7
from benchmarks.fisher import fisher
from benchmarks.machine import machine, versions
from benchmarks.personal import WORK as W8
from benchmarks.personal import personal
from benchmarks.rows import Row, add_floor, ran
from benchmarks.side_by_side import side_by_side
from benchmarks.store import replace_rows, stored_rows
from benchmarks.works import FEW, MANY, W1, W2, W3, W9
from cfl.runtime.errors import ConfigError

Measure = Callable[[Bench], list[Row]]

WORKS: dict[str, Measure] = {
    "W1": partial(side_by_side, works=[W1]),
    "W2": partial(side_by_side, works=[W2]),
    "W3": partial(side_by_side, works=[W3]),
    "W4": partial(side_by_side, works=[FEW, MANY]),
    "W5": methods.added_by_methods,
    "W6": extraction,
    "W7": fisher,
    "W8": personal,
    "W9": partial(side_by_side, works=[W9]),
}

TITLES = {
    **{work.name: work.title for work in (W1, W2, W3, MANY, methods.WORK, W7, W8, W9)},
    "W6": "GPSE: an extraction against one local epoch",
}


def chosen_works(names: str, works: Mapping[str, Measure] = WORKS) -> dict[str, Measure]:
    """Return the works whose names are given, separated by commas, in the suite's order; all if none is given.

    Raises:
        ConfigError: an unknown name.
    """
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(wanted - set(works)):
        raise ConfigError("WORKS", name, f"{', '.join(works)}, separated by commas")
    return {name: measure for name, measure in works.items() if name in wanted or not wanted}


def run_suite(
    works: Mapping[str, Measure],
    engines: list[Engine],
    rounds: int,
    warmup: int,
    folder: Path,
    say: Callable[[str], None],
    device: str = "cpu",
) -> list[Row]:
    """Measure works one after another; write the results after each.

    Args:
        works: name -> function that measures the work.
        engines: engines to compare.
        rounds: measured rounds per engine, at least 1.
        warmup: rounds before those, at least 1.
        folder: gets ``bench.json`` and everything else.
        say: prints a line.
        device: ``cpu`` or ``gpu``: whose peak is measured, and where works that do not compare engines run.

    Returns:
        The rows of this invocation.

    Raises:
        ConfigError: fewer than 1 round, or a ``bench.json`` that does not hold rows.
    """
    for key, value in (("ROUNDS", rounds), ("WARMUP", warmup)):
        if value < 1:
            raise ConfigError(key, value, "an integer of at least 1")
    folder = folder.absolute()
    results = folder / "bench.json"
    stored_rows(results)  # refuses a malformed file now, not after the first work
    rows: list[Row] = []
    with Peak(folder / "peak.log", "cuda" if device == "gpu" else "cpu") as peak:
        bench = Bench(folder, rounds, warmup, engines, peak, say, device)
        for name, measure in works.items():
            say(f"{name} {TITLES.get(name, '')}".rstrip())
            about = {"machine": machine(), "versions": versions(), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S")}
            found = [row | about for row in measure(bench)]
            replace_rows(results, found)
            rows += found
        # A later work may have measured a higher peak; all rows of one invocation use the highest.
        for row in rows:
            if ran(row) and "flops_per_round" in row:
                add_floor(row, row["flops_per_round"], peak.flops_per_second)
        for name in works:
            replace_rows(results, [row for row in rows if row["work"] == name])
    return rows
