"""W1 to W4: the same rounds by the bare loop and by ``cfl fit``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench import Bench
from benchmarks.flops import round_flops
from benchmarks.rows import Row, add_floor, add_memory_beyond_data, add_rates, add_ratios_to_loop, row_of
from benchmarks.works import Work


def side_by_side(bench: Bench, works: Sequence[Work]) -> list[Row]:
    """Measure works of one name, all their engines in turns.

    Returns:
        A row per work and engine.
    """
    entries = {f"{engine.name} {work.variant}".strip(): (work, engine) for work in works for engine in bench.engines}
    start = {n: (bench.loop(w, e) if e.bare else bench.fit(w, e)) for n, (w, e) in entries.items()}
    measured = bench.interleave(start)
    rows = []
    for name, (work, engine) in entries.items():
        row = row_of(work.name, work.variant, engine.name, measured[name])
        add_rates(row, work.client_steps, work.sampled)
        add_floor(row, round_flops(work), bench.peak.flops_per_second)
        add_memory_beyond_data(row, row.get("processes", 1) * work.data_bytes(floats=engine.bare))
        rows.append(row)
    add_ratios_to_loop(rows)
    return rows
