"""The command line of the benchmarks."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import ENVIRONMENT
from benchmarks.accelerator import NOTED_ROUND
from benchmarks.engines import CFL, CFL_GPU, LOOP, LOOP_GPU, chosen_engines
from benchmarks.suite import TITLES, chosen_works, run_suite
from benchmarks.table import show
from cfl.runtime.errors import ConfigError

FEWEST_ROUNDS = 10
"""The fewest measured rounds for figures to report; fewer rounds only try out the suite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and store; return the exit status.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    parser = ArgumentParser(prog="python -m benchmarks", description="Speed and memory; see docs/benchmarks.md.")
    parser.add_argument("--works", default="", help="names separated by commas; all by default")
    parser.add_argument("--engines", default="", help="names separated by commas; all by default")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="whose engines and peak")
    parser.add_argument("--rounds", type=int, default=FEWEST_ROUNDS, help="measured rounds of every engine")
    parser.add_argument("--warmup", type=int, help=f"rounds before those; by default 2, on a GPU {NOTED_ROUND}")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of bench.json")
    given = parser.parse_args(arguments)
    # Wide enough for every column, also where the output is no terminal.
    console = Console(width=None if sys.stdout.isatty() else 200)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        works, engines = chosen_works(given.works), chosen_engines(given.engines, given.device == "gpu")
        if given.rounds < FEWEST_ROUNDS:
            say(f"a trial: {given.rounds} round(s), figures want at least {FEWEST_ROUNDS}")
        for key in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
            if key in ENVIRONMENT:
                say(f"{key}={ENVIRONMENT[key]} is set: every process gets it")
        warmup = (NOTED_ROUND if given.device == "gpu" else 2) if given.warmup is None else given.warmup
        rows = run_suite(works, engines, given.rounds, warmup, given.out, say, given.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(rows, TITLES, console)
    say(f"results: {given.out / 'bench.json'}")
    needed = [row for row in rows if row["engine"] in {e.name for e in (LOOP, CFL, LOOP_GPU, CFL_GPU)}]
    return 1 if any(row["not_run"] for row in needed) else 0
