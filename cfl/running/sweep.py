"""Runs every combination of methods, values and seeds, and compares the results."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from cfl.cli.installed_configs import CONFIGS, DEFAULT_CONFIG, find_config
from cfl.cli.parsing import place_of
from cfl.reporting.compare import command as comparing
from cfl.reporting.compare.reading import is_run
from cfl.reporting.experiment import config_hash
from cfl.reporting.measures import ON_VALIDATION
from cfl.running.choosing import FILE, Choice
from cfl.running.finished import Finished, not_recorded, read_finished, read_results
from cfl.running.grid import Values, combinations, named, setting, values_in
from cfl.running.jobs import Lacking, Wanted, lacking
from cfl.running.launcher import Launcher
from cfl.running.resolving import Resolver
from cfl.running.runner import Outcome, Runner
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.command_paths import require_folder
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line
from cfl.runtime.run_files import CONFIG

_OF_THE_SWEEP = {
    "seed_everything": "--seeds",
    "run.dir": "--out, below which every run has its folder",
    "run.overwrite": "no such option: finished runs are kept; remove the folder of one to make it again",
    "ckpt_path": "no such option: the same command goes on where it was interrupted",
    "allow": "no such option, as no run's configuration is taken",
    "print_config": "cfl fit --print_config, or --dry-run",
}
"""Options of ``cfl fit`` that a sweep sets for each run -> what to use instead."""
_PREFIX = 100
"""Bytes of a run folder's name in front of seed and hash; file systems allow 255 for all of it."""


def run(
    options: argparse.Namespace, words: Sequence[str], seeds: Sequence[int], choosing: Sequence[int], launcher: Launcher
) -> int:
    """Make the missing runs, compare all runs, and return the exit status.

    Args:
        options: options of ``cfl sweep``.
        words: options of ``cfl fit``.
        seeds: seeds of every experiment.
        choosing: seeds of the runs by which ``--choose`` chooses.
        launcher: starts the runs.

    Raises:
        ConfigError, NotUnderstood: an option or a value is refused, before anything is run.
        RunFolderError: a finished run by which ``--choose`` chooses is damaged.
    """
    out, resolver = options.out, Resolver()
    if is_run(out) or (out.exists() and not out.is_dir()):
        raise ConfigError("--out", str(out), "a folder of the sweep's own, which is made where there is none")
    methods = wanted(words, ",".join(options.methods) if options.methods else None, _grid(options.set), out, resolver)
    tests = [one for settings in methods.values() for one in settings.values()]
    choice = Choice(options.choose, choosing, methods, out, resolver) if options.choose is not None else None
    making = _Making(out, options.dry_run, resolver, Runner(options.jobs, None, launcher.start))
    without: list[str] = []
    notes: list[str] = []
    if choice is not None:
        made = making.make(choice.wanted, choosing, f" {ON_VALIDATION}")
        chosen = choice.chosen(making.results)
        tests, notes = chosen.tests, chosen.notes
        without = _without([one for one in made.outcomes if not one.diverged], made.after) + chosen.lacking
        if not options.dry_run:
            write_whole(out / FILE, chosen.report)
    made = making.make(tests, seeds)
    incomplete = making.lacking_records(tests, seeds)
    without += incomplete.values()
    if options.dry_run:
        _say(without)
        return 0
    if (signal := making.runner.interrupted_by) is not None:
        _say(["interrupted; the same command goes on"])
        return 128 + signal
    folders = [str(found.folder) for found in made.after.finished if found.folder not in incomplete]
    drawn = ["--pictures", ",".join(options.pictures)] if options.pictures else []
    status = comparing.main([*folders, "--out", str(out), *drawn], notes) if folders else 1
    without += _without(made.outcomes, made.after)
    without += [f"{name}: diverged; remove {folder} to run again" for name, folder in made.before.diverged]
    _say(f"no result of {line}" for line in without)
    return 1 if without else status


class _Made(NamedTuple):
    """What was lacking of some experiments, the outcomes of the runs made, and what is lacking now."""

    before: Lacking[Finished]
    outcomes: list[Outcome]
    after: Lacking[Finished]


class _Making:
    """Makes the runs of a sweep, or only prints their commands.

    Args:
        out: the sweep's folder.
        dry_run: whether commands are only printed.
        resolver: resolves configurations.
        runner: makes the runs.

    Attributes:
        results: the finished and diverged runs in the folder.
    """

    def __init__(self, out: Path, dry_run: bool, resolver: Resolver, runner: Runner) -> None:
        self.out, self.dry_run, self.resolver, self.runner = out, dry_run, resolver, runner
        self.results = read_results(out, read_finished)
        for reason in self.results.left_out:
            print(on_one_line(f"left out: {reason}"), file=sys.stderr)
        if not dry_run:
            require_folder("--out", out)

    def make(self, experiments: Sequence[Wanted], seeds: Sequence[int], said: str = "") -> _Made:
        """Make the runs that experiments lack; ``said`` ends the line with their number."""
        before = lacking(experiments, seeds, self.resolver, self.results)
        if self.dry_run:
            _say([*(job.shown for job in before.jobs), f"{before.counted}{said}"])
            return _Made(before, [], before)
        _say([f"{self.out}: {before.counted}{said}"])
        outcomes = self.runner.run(before.jobs)
        self.results = read_results(self.out, read_finished)
        return _Made(before, outcomes, lacking(experiments, seeds, self.resolver, self.results))

    def lacking_records(self, experiments: Sequence[Wanted], seeds: Sequence[int]) -> dict[Path, str]:
        """Folder -> a line, for finished runs that do not record all that is wanted of them."""
        found: dict[Path, str] = {}
        for one in experiments:
            config = self.resolver.config(one.arguments)
            for seed, run in self.results.of(self.resolver.experiment(one.arguments)).items():
                if seed in seeds and (keys := not_recorded(config, run.folder)):
                    why = f"made without the given {', '.join(keys)}; remove {run.folder} to run again"
                    found[run.folder] = f"{one.name} seed {seed}: {why}"
        return found


def _say(lines: Iterable[str]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in lines:
        console.print(line)


def _without(outcomes: Sequence[Outcome], after: Lacking[Finished]) -> list[str]:
    """A line for each run that was to be made and has no result, with the reason."""
    elsewhere = {found.folder for found in after.finished}  # includes runs that another sweep in this folder made
    lost = {job.folder for job in after.jobs}
    without = [_reason(one) for one in outcomes if one.state != "finished" and one.job.folder not in elsewhere]
    return without + [
        f"{outcome.job.name}: {outcome.job.folder / CONFIG} is not of the experiment that was asked for"
        for outcome in outcomes
        if outcome.state == "finished" and outcome.job.folder in lost
    ]


def _reason(outcome: Outcome) -> str:
    """The reason why a run has no result, in one line that ends with the last line of its log."""
    why, *said = outcome.reason.splitlines()
    return f"{outcome.job.name}: {outcome.state}, {why}{f': {said[-1].strip()}' if said else ''}"


def wanted(
    words: Sequence[str], methods: str | None, grid: Mapping[str, Sequence[str]], out: Path, resolver: Resolver
) -> dict[str, dict[Values, Wanted]]:
    """The experiments of a sweep, without seeds: method -> its combinations of values -> the experiment.

    Args:
        words: options of ``cfl fit`` for all experiments.
        methods: names or files of methods, separated by commas; None for the methods that ``words`` give.
        grid: config key -> values.
        out: the folder in which the run folders are.
        resolver: resolves the configurations.

    Raises:
        ConfigError, NotUnderstood: ``cfl fit`` would refuse one of them, or two are the same experiment.
    """
    for key in (word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")):
        _refuse_own(f"--{key}", key, "for all runs")
    for key, values in grid.items():
        _refuse_own("--set", key, f"{key}={','.join(values)}")
    bases = {name: _with_method(words, file) for name, file in _methods(methods).items()}
    used = {name: set(resolver.config(arguments)["methods"]) for name, arguments in bases.items()}
    known = set().union(*used.values())
    found: dict[str, Wanted] = {}
    every: dict[str, dict[Values, Wanted]] = {}
    for name, arguments in bases.items():
        # Options of other methods of the sweep are left out. An option of no method is refused like in cfl fit.
        axes = {key: grid[key] for key in grid if _method_in(key) not in known - used[name]}
        for combination in combinations(axes):
            one = _wanted(name, arguments, combination, out)
            try:
                resolver.check(one.arguments)
            except ConfigError as error:
                error.args = (f"{error}{place_of(error)}",)
                raise
            other = found.setdefault(config_hash(resolver.experiment(one.arguments)), one)
            if other is not one:
                valid = "different experiments: no result depends on what differs between these"
                raise ConfigError("cfl sweep", f"{other.name} and {one.name}", valid)
            every.setdefault(name or "run", {})[combination] = one
    return every


def _wanted(method: str, arguments: Sequence[str], values: Values, out: Path) -> Wanted:
    described = ", ".join(part for part in (method, named(values)) if part) or "run"
    prefix = re.sub(r"[^\w.+-]+", "-", described).strip("-").encode()[:_PREFIX].decode(errors="ignore")
    return Wanted(described, [*arguments, *(setting(key, value) for key, value in values)], out, prefix)


def _refuse_own(option: str, key: str, value: Any) -> None:
    """Refuse an option of ``cfl fit`` that the sweep itself gives its runs."""
    if key in _OF_THE_SWEEP:
        raise ConfigError(option, value, _OF_THE_SWEEP[key])


def _grid(given: Sequence[str]) -> dict[str, list[str]]:
    """Config key -> values, as ``--set`` has them."""
    grid: dict[str, list[str]] = {}
    for text in given:
        key, _, values = text.partition("=")
        key = key.strip().removeprefix("--")
        if not key or not values.strip() or "" in values_in(values):
            raise ConfigError("--set", text, "an option and its values, e.g. model.optimizer.lr=0.01,0.1")
        if key in grid:
            raise ConfigError("--set", text, f"each option once: {key} has values already")
        grid[key] = values_in(values)
    return grid


def _methods(given: str | None) -> dict[str, Path | None]:
    """Name -> configuration file of each method. Without ``--methods``: an empty name without a file."""
    if given is None:
        return {"": None}
    found: dict[str, Path | None] = {}
    for text in values_in(given):
        file = _method_file(text)
        if file.stem in found:
            raise ConfigError("--methods", given, f"each method once: {file.stem} stands twice")
        found[file.stem] = file
    return found


def _method_file(text: str) -> Path:
    """The configuration file that a name stands for."""
    if text.endswith((".yaml", ".yml", ".json")):
        return find_config("--methods", text)
    names = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
    if text not in names:
        close = get_close_matches(text, names, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError("--methods", text, f"one of {', '.join(names)}, or a file of yours (.yaml){meant}")
    return find_config("--methods", f"methods/{text}.yaml")


def _with_method(words: Sequence[str], file: Path | None) -> list[str]:
    """Insert a method's file into the words after the last ``--config``, so that later options override it.

    If there is no file at all, the default configuration is named. A resumed run would otherwise use the configuration
    in its folder.
    """
    files = [k for k, word in enumerate(words) if word.partition("=")[0] in ("--config", "-c")]
    place = max((k + (1 if "=" in words[k] else 2) for k in files), default=0)
    added = [file] if file is not None else [] if files else [DEFAULT_CONFIG]
    return [*words[:place], *(f"--config={path}" for path in added), *words[place:]]


def _method_in(key: str) -> str | None:
    """The method of which a key is an option, if any."""
    section, _, rest = key.partition(".")
    return rest.partition(".")[0] if section == "methods" else None
