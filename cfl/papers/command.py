"""The command line ``python -m cfl.papers``: run the missing cells of a table, write reports, keep runs, sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from cfl.papers.adopting import adopt
from cfl.papers.cells import Experiments
from cfl.papers.definition import OPTIONS, papers, table_named
from cfl.papers.kept import keep
from cfl.papers.recipes import NotAvailable
from cfl.papers.report import REPORTS, Report, write_report
from cfl.papers.reproducibility import page
from cfl.papers.results import read_result, read_results
from cfl.papers.sweeps import Sweep, SweepState, read_sweep
from cfl.reporting.csv_file import RunFolderError
from cfl.running.grid import seeds_in, values_in
from cfl.running.jobs import Job
from cfl.running.launcher import Launcher, environment_for
from cfl.running.missing_data import MISSING, MissingData
from cfl.running.resolving import Resolver
from cfl.running.runner import Runner, exit_status
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.command_paths import given_path, require_file, require_folder
from cfl.runtime.errors import ConfigError, NotUnderstood
from cfl.runtime.printable import on_one_line, printable
from cfl.runtime.run_files import CONFIG

RUNS = Path("runs/tables")
_PAGE = Path("docs/generated/reproducibility.md")
_SHORT = {option.removeprefix("--"): axis for axis, option in OPTIONS.items()}


def chosen_values(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the chosen values of a table's axes: axis -> values.

    Raises:
        ConfigError: ``--only`` is not ``axis=value,value``, or names an axis that already has values.
    """
    found: dict[str, list[str]] = {}
    for option, axis in _SHORT.items():
        if (text := getattr(options, option)) is not None:
            found[axis] = values_in(text)
    for text in options.only or []:
        axis, equals, values = text.partition("=")
        if not (axis.strip() and equals and values.strip()):
            raise ConfigError("--only", text, "an axis and its values, e.g. threshold=0.87,0.90")
        if axis.strip() in found:
            raise ConfigError("--only", text, f"each axis once: {axis.strip()} has values already")
        found[axis.strip()] = values_in(values)
    return found


def experiments_in(runs: Path, resolver: Resolver | None = None) -> Experiments:
    """Read the finished runs below a folder; those that are left out are named on stderr."""
    results = read_results(runs)
    for reason in results.left_out:
        print(on_one_line(f"left out: {reason}"), file=sys.stderr)
    return Experiments(resolver or Resolver(), results, MissingData(runs / MISSING))


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the missing cells of a table, then write its report."""
    table, chosen = table_named(options.table), chosen_values(options)
    seeds = range(table.seeds) if options.seeds is None else seeds_in(options.seeds)
    launcher = Launcher(environment_for(options.jobs))
    runner = _runner(options, launcher)
    known = experiments_in(options.runs)
    lacks = known.jobs(table, options.scale, chosen, seeds, options.runs)
    for name, reason in lacks.cannot:
        console.print(f"cannot run here ({reason}): {name}")
    for name, reason in lacks.refused:
        console.print(f"failed   {name}: {reason}")
    for name, folder in lacks.diverged:
        console.print(f"diverged; remove {folder} to run again: {name}")
    status = 1 if lacks.refused else 0
    if options.dry_run:
        for job in lacks.jobs:
            console.print(job.shown)
        console.print(lacks.counted)
        return status
    console.print(f"{table.full_name}, {options.scale}: {lacks.counted}")
    require_folder("--runs", options.runs)
    with closing(launcher):
        outcomes = runner.run(lacks.jobs)
    known = experiments_in(options.runs, known.resolver)
    written = write_report(known, table, options.scale, chosen, options.runs, seeds)
    _show(written, console)
    return max(status, exit_status(outcomes, runner.interrupted_by))


def _runner(options: argparse.Namespace, launcher: Launcher) -> Runner:
    return Runner(options.jobs, MissingData(options.runs / MISSING), launcher.start, read=read_result)


def _check_runs(options: argparse.Namespace) -> None:
    if not options.runs.is_dir():
        raise ConfigError("--runs", str(options.runs), "a folder in which runs lie")


def report(options: argparse.Namespace, console: Console) -> int:
    """Write the report of a table from the finished runs."""
    table, chosen = table_named(options.table), chosen_values(options)
    seeds = None if options.seeds is None else seeds_in(options.seeds)
    _check_runs(options)
    written = write_report(experiments_in(options.runs), table, options.scale, chosen, options.runs, seeds)
    _show(written, console)
    return 0


def _show(written: Report, console: Console) -> None:
    """Print the report of the chosen cells, and the paths of the files with the whole table."""
    console.print(written.text)
    for path in written.files:
        console.print(str(path))


def list_tables(options: argparse.Namespace, console: Console) -> int:
    """List all tables with their axes, values and scales."""
    for paper in papers():
        lines, tables = [paper.title], paper.tables()
        width = max(len(table.full_name) for table in tables)
        for table in tables:
            lines.append(f"  {table.full_name:<{width}} {table.title}")
            lines += [f"  {'':<{width}}   {axis}: {', '.join(values)}" for axis, values in table.axes.items()]
        lines += [f"  scale {scale}: {meaning}" for scale, meaning in paper.scales.items()]
        console.print("\n".join(lines))
    return 0


def keep_runs(options: argparse.Namespace, console: Console) -> int:
    """Write a small file for every finished run."""
    _check_runs(options)
    for paper in papers():
        kept = keep(paper, options.runs, values_in(options.scale))
        for path in kept.written:
            console.print(str(path))
        for reason in kept.left_out:
            print(on_one_line(f"left out: {reason}"), file=sys.stderr)
    return 0


def write_page(options: argparse.Namespace, console: Console) -> int:
    """Write the reproducibility page from the kept runs."""
    require_file("--out", options.out)
    write_whole(options.out, page(papers(), Resolver()))
    console.print(str(options.out))
    return 0


def adopt_runs(options: argparse.Namespace, console: Console) -> int:
    """Copy finished runs that were made elsewhere."""
    resolver = Resolver()
    for folder in options.folders:
        console.print(f"{folder} -> {adopt(folder, papers(), options.runs, resolver)}")
    return 0


def run_sweep(options: argparse.Namespace, console: Console) -> int:
    """Run a sweep's missing candidates until it needs no more, and write the result."""
    sweep, resolver = read_sweep(options.file), Resolver()
    sweep.check(resolver)
    with closing(Launcher(environment_for(options.jobs))) as launcher:
        state, jobs, status = _until_complete(options, sweep, resolver, _runner(options, launcher))
    if options.dry_run:
        for job in jobs:
            console.print(job.shown)
        return 0
    path = options.runs / sweep.paper / REPORTS / f"sweep-{sweep.name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, state.markdown())
    console.print(state.markdown())
    console.print(str(path))
    return status


def _until_complete(
    options: argparse.Namespace, sweep: Sweep, resolver: Resolver, runner: Runner
) -> tuple[SweepState, list[Job], int]:
    """Run candidates until a sweep needs no more or a run fails; return its state, its missing runs and exit status."""
    broken: list[str] = []
    made: set[Path] = set()
    status = 0
    while True:
        state = SweepState(sweep, resolver, read_results(options.runs), broken)
        state.check()
        jobs = state.jobs(options.runs)
        lost = [job for job in jobs if job.folder in made]
        broken.extend(f"{job.name}: {job.folder / CONFIG} is not of the experiment that was asked for" for job in lost)
        if options.dry_run or broken or not jobs:
            return state, jobs, status or (1 if broken else 0)
        require_folder("--runs", options.runs)
        # Only the first runs: they show whether runs record the value that is compared.
        outcomes = runner.run(jobs if state.compared else jobs[: options.jobs])
        failed = [outcome for outcome in outcomes if not outcome.diverged]
        status = max(status, exit_status(failed, runner.interrupted_by))
        # Other failures than divergence do not decide on a candidate. The sweep ends unfinished; a rerun continues it.
        broken = [outcome.job.name for outcome in failed if outcome.state != "finished"]
        made |= {outcome.job.folder for outcome in outcomes if outcome.state == "finished"}


def _parser() -> argparse.ArgumentParser:
    description = "Published tables: run their missing cells, compare, keep what came out."
    parser = argparse.ArgumentParser(prog="python -m cfl.papers", description=description, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, handler: object, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(handler=handler)
        if name not in ("list", "reproducibility"):
            added.add_argument("--runs", type=given_path, default=RUNS, help=f"where the runs lie (default: {RUNS})")
        if name in ("run", "sweep"):
            added.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
            added.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
        return added

    for name, handler, text, default_seeds in (
        ("run", run, "run the missing cells of a table, then report", "as the table's file says)"),
        ("report", report, "report a table from the runs that are finished", "all that there are)"),
    ):
        added = command(name, handler, text)
        added.add_argument("table", metavar="TABLE", help="e.g. fot-table1; `list` shows all")
        added.add_argument("--bench", help="only these benchmarks: a,b")
        added.add_argument("--methods", help="only these methods: a,b")
        added.add_argument("--partition", help="only these partitions: a,b")
        added.add_argument("--only", action="append", metavar="AXIS=VALUES", help="only these values of any other axis")
        added.add_argument("--scale", default="paper", help="paper (default), short, smoke")
        added.add_argument(
            "--seeds", metavar="N|A-B", help="N: seeds 0 .. N-1; A-B: seeds A .. B (default: " + default_seeds
        )
    command("list", list_tables, "list all tables")
    kept = command("keep", keep_runs, "keep every finished run as a small file in cfl/papers/<paper>/results")
    kept.add_argument("--scale", default="paper,short", help="runs at these scales (default: paper,short)")
    written = command("reproducibility", write_page, "write the state of every cell from the kept runs")
    written.add_argument("--out", type=given_path, default=_PAGE, help=f"the Markdown file to write (default: {_PAGE})")
    adopted = command("adopt", adopt_runs, "take finished runs that were made elsewhere")
    adopted.add_argument("folders", metavar="RUN", nargs="+", type=given_path, help="folder of a finished run")
    swept = command("sweep", run_sweep, "run a sweep's missing candidates, write the chosen value")
    swept.add_argument("file", metavar="FILE", type=given_path, help="e.g. configs/papers/fot/sweeps/gpm-pmnist.yaml")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status.

    Args:
        arguments: the command line without the program's name; None takes the process's own.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.handler(options, Console(highlight=False, markup=False, soft_wrap=True))
    except (ConfigError, NotUnderstood, NotAvailable, RunFolderError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return status
