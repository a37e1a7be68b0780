"""``cfl sweep``: reads the command line before modules that are slow to import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cfl.reporting.compare.picture_formats import add_pictures
from cfl.reporting.csv_file import RunFolderError
from cfl.running.grid import seeds_in
from cfl.running.launcher import Launcher, environment_for
from cfl.runtime.command_paths import given_path
from cfl.runtime.errors import ConfigError, NotUnderstood
from cfl.runtime.printable import printable

OUT = Path("runs/sweep")
CHOOSING = "1000-1000"
"""Seeds of the runs that choose, far from those of usual tests."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cfl sweep",
        usage="cfl sweep [--methods NAME,...] [--seeds N|A-B] [--set KEY=VALUE,...] [--jobs N] [--out FOLDER] "
        "[--choose FIGURE] [--choose-seeds N|A-B] [--pictures [FORMAT,...]] [--dry-run] [--config FILE] [--KEY VALUE]",
        description="Run every combination of methods, values and seeds, several at a time, and compare them as cfl "
        "compare does. The same command goes on where it was interrupted, and repeats no run that is finished.",
        epilog="Every other option is one of cfl fit and holds for all runs. cfl fit --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--methods",
        metavar="NAME,...",
        action="append",
        default=[],
        help="names of the methods that come along (cfl configs methods), and configuration files of your own; unless "
        "given: what the other options say",
    )
    parser.add_argument("--seeds", metavar="N|A-B", help="N: seeds 0 .. N-1; A-B: seeds A .. B (default: 1)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE,...",
        action="append",
        default=[],
        help="values of an option, each of which is run; of several --set every combination. An option of a method "
        "(methods.ewc.strength) is set where the method is used",
    )
    parser.add_argument(
        "--choose",
        metavar="FIGURE",
        help="test each method only with its best combination of the values of --set, by this figure (acc) of runs on "
        "validation samples (data.validation)",
    )
    parser.add_argument("--choose-seeds", metavar="N|A-B", help=f"seeds of the runs that choose (default: {CHOOSING})")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--out", metavar="FOLDER", type=given_path, default=OUT, help=f"for runs, tables and page (default: {OUT})"
    )
    add_pictures(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Args:
        arguments: the command line without the program's name and ``sweep``.

    Returns:
        Exit status: 0 if every run is finished, 1 if not, 2 if the command is refused, 128 plus the signal that ended
        the command.
    """
    parser = _parser()
    options, words = parser.parse_known_args(arguments)
    if not (options.methods or options.set or words or options.seeds is not None):
        parser.error("one of the following is required: --methods, --seeds, --set, or an option of cfl fit")
    try:
        seeds = seeds_in("1" if options.seeds is None else options.seeds)
        if options.choose_seeds is not None and options.choose is None:
            raise ConfigError("--choose-seeds", options.choose_seeds, "--choose FIGURE beside it")
        text = CHOOSING if options.choose_seeds is None else options.choose_seeds
        choosing = seeds_in(text, "--choose-seeds")
        if options.choose is not None and (twice := sorted({*choosing} & {*seeds})):
            valid = f"seeds with which nothing is tested, unlike {', '.join(map(str, twice))}"
            if text.isdecimal():
                valid += f"; {text} is how many, from seed 0 on: {text}-{text} is seed {text}"
            raise ConfigError("--choose-seeds", text, valid)
        launcher = Launcher(environment_for(options.jobs))
        if not options.dry_run:
            launcher.begin()  # now, so that both processes import at the same time
        try:
            from cfl.running import sweep

            return sweep.run(options, words, seeds, choosing, launcher)
        finally:
            launcher.close()
    except (ConfigError, NotUnderstood, RunFolderError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
