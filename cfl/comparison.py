"""Compare finished runs: a table, a CSV and Markdown copy of it, accuracy curves and heatmaps.

``python -m cfl.comparison RUN... --out FOLDER``. A run folder holds two files:

- ``summary.json``: an object with the keys of :data:`SUMMARY_KEYS`; ``acc``, ``fgt``, ``fgt_max``, ``bwt`` and
  ``fwt`` as in :data:`cfl.metrics.FORMULAS`, null where undefined; ``used_space`` (percent or null) may be absent;
  so may ``rounds_to_accuracy`` (target in percent -> rounds or null); other keys are ignored.
- ``accuracy_matrix.csv``: see :func:`write_matrix_csv`.

and, if there is a learning curve, ``rounds.csv``: see :func:`read_curve`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import IO, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from cfl.figures import accuracy_curve, accuracy_heatmaps, cell_colours, learning_curves, save
from cfl.metrics import FORMULAS, average_accuracy

_TEXT, _COUNT, _NUMBER, _NUMBER_OR_NULL = "text", "an integer", "a number", "a number or null"
SUMMARY_KEYS: dict[str, str] = {
    "method": _TEXT,
    "benchmark": _TEXT,
    "partition": _TEXT,
    "scenario": _TEXT,
    "seed": _COUNT,
    "acc": _NUMBER_OR_NULL,
    "fgt": _NUMBER_OR_NULL,
    "fgt_max": _NUMBER_OR_NULL,
    "bwt": _NUMBER_OR_NULL,
    "fwt": _NUMBER_OR_NULL,
    "uplink_bytes": _COUNT,
    "downlink_bytes": _COUNT,
    "seconds": _NUMBER,
    "rounds": _COUNT,
    "tasks": _COUNT,
    "clients": _COUNT,
    "config_hash": _TEXT,
}
"""Keys that every ``summary.json`` has, and what their values are."""

CAPTION = (
    "ACC: mean accuracy over all tasks at the end. FGT: mean loss since each task was learned, lower is better. "
    "BWT, FWT: backward and forward transfer in points. MB = 1e6 bytes, all clients and rounds together."
)
TABLE_WIDTH = 110
"""Least width, in characters, of a printed table, also when it is written to a file or a pipe."""

_MISSING = "-"


class RunFolderError(ValueError):
    """A run folder that cannot be read; the message is one line naming the file and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run as read from its folder.

    Attributes:
        folder: where it was read from.
        method: name of the method or methods.
        benchmark: name of the task stream.
        partition: how samples were dealt to clients.
        scenario: task-, class- or domain-incremental.
        seed: the run's seed.
        acc: ACC in percent; None where undefined, like the following four.
        fgt: FGT in points, diagonal form.
        fgt_max: FGT in points against the best earlier accuracy.
        bwt: BWT in points.
        fwt: FWT in points.
        uplink_bytes: sent by all clients over all rounds.
        downlink_bytes: received by all clients over all rounds.
        seconds: duration of the run.
        rounds: number of communication rounds.
        tasks: number of tasks T.
        clients: number of clients.
        config_hash: identifies the configuration.
        used_space: share of the input space that a subspace method uses up, in percent; None for other methods.
        matrix: ``[T, T]`` float64 accuracy matrix in percent, NaN where not evaluated.
        initial: ``[T]`` accuracies before training in percent, or None where the file has none.
        curve: ACC in percent after each round, None after those without an evaluation; empty where the run was
            evaluated at task ends only.
        rounds_to_accuracy: the run's targets: percent -> rounds until ACC first reached it, None if never.
        stopped_early: whether it ended once its targets were met, so that ``rounds`` is a result and no setting.
    """

    folder: Path
    method: str
    benchmark: str
    partition: str
    scenario: str
    seed: int
    acc: float | None
    fgt: float | None
    fgt_max: float | None
    bwt: float | None
    fwt: float | None
    uplink_bytes: int
    downlink_bytes: int
    seconds: float
    rounds: int
    tasks: int
    clients: int
    config_hash: str
    used_space: float | None
    matrix: Tensor
    initial: Tensor | None
    curve: Sequence[float | None] = ()
    rounds_to_accuracy: Mapping[str, int | None] = field(default_factory=dict)
    stopped_early: bool = False

    def rounds_to(self, target: str) -> int | None:
        """Rounds until ACC first reached a target in percent, its own or not; None where it never did or is unknown."""
        known = self.rounds_to_accuracy
        return known[target] if target in known else rounds_to(self.curve, float(target))


def write_matrix_csv(path: Path, matrix: Tensor, initial: Tensor | None = None) -> None:
    """Write an accuracy matrix so that :func:`read_matrix_csv` returns the same bits.

    The header is ``after_task,task_0,task_1,...``. A first row ``init`` has the accuracies before training. Row
    ``t`` has those after learning task t. What was not evaluated is an empty cell.

    Args:
        path: the file; its folder must exist.
        matrix: ``[T, T]`` in percent, NaN where not evaluated.
        initial: ``[T]`` in percent; None leaves the row out.

    Raises:
        ValueError: wrong shapes, or an infinite value.
    """
    tasks = len(matrix)
    if matrix.shape != (tasks, tasks) or not tasks or (initial is not None and initial.shape != (tasks,)):
        shape = None if initial is None else list(initial.shape)
        raise ValueError(f"a matrix [T, T] and initial [T] are needed, got {list(matrix.shape)} and {shape}")
    rows = [] if initial is None else [("init", initial)]
    rows += [(str(t), row) for t, row in enumerate(matrix)]
    if any(bool(torch.isinf(row).any()) for _, row in rows):
        raise ValueError("an accuracy is infinite")
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["after_task", *(f"task_{i}" for i in range(tasks))])
        for label, row in rows:
            writer.writerow([label, *("" if math.isnan(x) else repr(x) for x in row.double().tolist())])


def read_matrix_csv(path: Path) -> tuple[Tensor, Tensor | None]:
    """Read what :func:`write_matrix_csv` wrote; rows may be absent (not evaluated) and in any order.

    Returns:
        ``matrix [T, T]`` float64, NaN where not evaluated, and ``initial [T]`` or None where there is no such row.

    Raises:
        RunFolderError: the file is missing or not such a table; the message names the file and the line.
    """
    with _open(path) as file:
        try:
            lines = [(number, line) for number, line in enumerate(csv.reader(file), start=1) if line]
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path}: not a CSV file: {error}") from None
    header = lines[0][1] if lines else []
    tasks = len(header) - 1
    if tasks < 1 or header != ["after_task", *(f"task_{i}" for i in range(tasks))]:
        raise RunFolderError(f"{path}: the first line must be after_task,task_0,task_1,... but is {','.join(header)!r}")
    rows: dict[str, Tensor] = {}
    valid = ["init", *(str(t) for t in range(tasks))]
    for number, (label, *cells) in lines[1:]:
        if label not in valid:
            raise RunFolderError(f"{path}, line {number}: row {label!r} cannot be; valid: init, 0 .. {tasks - 1}")
        if label in rows:
            raise RunFolderError(f"{path}, line {number}: row {label!r} appears twice")
        if len(cells) != tasks:
            raise RunFolderError(f"{path}, line {number}: {len(cells)} values instead of {tasks}")
        rows[label] = torch.tensor([_cell(cell, path, number) for cell in cells], dtype=torch.float64)
    unknown = torch.full((tasks,), math.nan, dtype=torch.float64)
    return torch.stack([rows.get(str(t), unknown) for t in range(tasks)]), rows.get("init")


def _cell(text: str, path: Path, number: int) -> float:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.inf
    if math.isinf(value) or (text and math.isnan(value)):
        raise RunFolderError(f"{path}, line {number}: {text!r} is neither a finite number nor empty")
    return value


def read_curve(path: Path) -> list[float | None]:
    """Read a run's learning curve off its table of rounds.

    Args:
        path: ``rounds.csv``; of its columns ``round``, from 0, and ``acc``, in percent or empty, are read.

    Returns:
        ACC after each round, None after those without an evaluation; empty where there is no such file or column.

    Raises:
        RunFolderError: a value that cannot be; the message names the file and the line.
    """
    if not path.is_file():
        return []
    found: dict[int, float | None] = {}
    with _open(path) as file:
        try:
            for number, row in enumerate(csv.DictReader(file), start=2):
                if row.get("acc") is None:
                    return []
                if not (row.get("round") or "").isdecimal():
                    raise RunFolderError(f"{path}, line {number}: {row.get('round')!r} is no round")
                value = _cell(row["acc"], path, number)
                found[int(row["round"])] = None if math.isnan(value) else value
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path}: not a CSV file: {error}") from None
    return [found.get(round) for round in range(max(found, default=-1) + 1)]


def rounds_to(curve: Sequence[float | None], accuracy: float) -> int | None:
    """Rounds until a learning curve first reaches an accuracy: the least r, from 1, with ACC of at least that after it.

    Only rounds with an evaluation can be found, so the answer is as fine as these are dense. ACC is compared after
    rounding to 6 digits behind the point, as kept runs hold it: a mean that misses by a rounding error has reached.

    Args:
        curve: ACC in percent after each round, None where not evaluated.
        accuracy: in percent.

    Returns:
        None where the curve never gets there.
    """
    return next((r for r, acc in enumerate(curve, start=1) if acc is not None and round(acc, 6) >= accuracy), None)


def read_run(folder: Path) -> Run:
    """Read one run.

    Args:
        folder: holds ``summary.json`` and ``accuracy_matrix.csv``, and ``rounds.csv`` where there is a learning curve.

    Raises:
        RunFolderError: the folder or a file is missing or broken, or a key is missing or of the wrong type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder")
    path = folder / "summary.json"
    with _open(path) as file:
        try:
            summary = json.load(file, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise RunFolderError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path}: must hold an object with the keys {', '.join(SUMMARY_KEYS)}")
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise RunFolderError(f"{path}: missing {', '.join(missing)}")
    values = {"used_space": None} | {key: summary[key] for key in (*SUMMARY_KEYS, "used_space") if key in summary}
    for key, value in values.items():
        kind = SUMMARY_KEYS.get(key, _NUMBER_OR_NULL)
        if not _is(value, kind):
            raise RunFolderError(f"{path}: {key} = {json.dumps(value)} cannot be; valid: {kind}")
    matrix_path = folder / "accuracy_matrix.csv"
    matrix, initial = read_matrix_csv(matrix_path)
    if len(matrix) != values["tasks"]:
        raise RunFolderError(f"{matrix_path}: {len(matrix)} tasks, but summary.json says tasks = {values['tasks']}")
    targets, stopped = summary.get("rounds_to_accuracy", {}), summary.get("stopped_early", False)
    if not isinstance(targets, dict) or not all(
        _is_number(name) and (rounds is None or _is(rounds, _COUNT)) for name, rounds in targets.items()
    ):
        valid = "target in percent -> an integer or null"
        raise RunFolderError(f"{path}: rounds_to_accuracy = {json.dumps(targets)} cannot be; valid: {valid}")
    if not isinstance(stopped, bool):
        raise RunFolderError(f"{path}: stopped_early = {json.dumps(stopped)} cannot be; valid: true or false")
    curve = read_curve(folder / "rounds.csv")
    # With at most an evaluation per task there is nothing that the accuracy matrix does not say.
    curve = curve if targets or sum(acc is not None for acc in curve) > values["tasks"] else []
    values |= {"curve": curve, "rounds_to_accuracy": targets, "stopped_early": stopped}
    return Run(folder=folder, matrix=matrix, initial=initial, **values)


def _open(path: Path) -> IO[str]:
    try:
        return Path(path).open(encoding="utf-8", newline="")
    except OSError as error:
        raise RunFolderError(f"{path}: {'no such file' if not Path(path).exists() else error.strerror}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value, use null")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return kind == _NUMBER_OR_NULL
    if kind == _TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind == _COUNT else (int, float)):
        return False
    return math.isfinite(value)  # 1e999 is valid JSON


_NAMED_SETTINGS = ("benchmark", "partition", "scenario")
_COUNTED_SETTINGS = ("tasks", "rounds", "clients")


def _setting(run: Run, key: str) -> Any:
    return None if key == "rounds" and run.stopped_early else getattr(run, key)


def comparability_notes(runs: Sequence[Run]) -> list[str]:
    """One line for each setting other than method and seed in which the runs differ; empty if they differ in none."""
    notes = []
    for key in (*_NAMED_SETTINGS, *_COUNTED_SETTINGS):
        values = [str(value) for value in dict.fromkeys(_setting(run, key) for run in runs) if value is not None]
        if len(values) > 1:
            what = f"{key}s" if key in _NAMED_SETTINGS else f"numbers of {key}"
            notes.append(f"NOTE: different {what} are compared: {', '.join(values)}")
    return notes


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A name per run, no two alike: the method, then every setting in which the runs differ, as in ``fot (seed 1)``.

    Where that leaves names alike, the name of the folder is added, or its whole path if those are alike too.
    """
    keys = (*_NAMED_SETTINGS, *_COUNTED_SETTINGS, "seed")
    differing = [key for key in keys if len({_setting(run, key) for run in runs} - {None}) > 1]
    labels = []
    for run in runs:
        words = []
        for key in differing:
            value = _setting(run, key)
            if value is None:
                continue
            words.append(f"{value} {key}" if key in _COUNTED_SETTINGS else f"seed {value}" if key == "seed" else value)
        labels.append(f"{run.method} ({', '.join(words)})" if words else run.method)
    named = [(label, run.folder.resolve().name) for label, run in zip(labels, runs, strict=True)]
    return [
        label
        if labels.count(label) == 1
        else f"{label} [{name}]"
        if named.count((label, name)) == 1
        else f"{label} [{run.folder}]"
        for (label, name), run in zip(named, runs, strict=True)
    ]


def _fixed(decimals: int, sign: str = "") -> Callable[[float | None], str]:
    def text(value: float | None) -> str:
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        return _MISSING if value is None else f"{round(value, decimals) + 0.0:{sign},.{decimals}f}"

    return text


_COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("ACC %", lambda run: _fixed(2)(run.acc)),
    ("FGT %", lambda run: _fixed(2)(run.fgt)),
    ("BWT", lambda run: _fixed(2, "+")(run.bwt)),
    ("FWT", lambda run: _fixed(2, "+")(run.fwt)),
    ("uplink MB", lambda run: _fixed(2)(run.uplink_bytes / 1e6)),
    ("downlink MB", lambda run: _fixed(2)(run.downlink_bytes / 1e6)),
    ("seconds", lambda run: _fixed(1)(run.seconds)),
    ("used input space %", lambda run: _fixed(2)(run.used_space)),
)


def _targets(runs: Sequence[Run]) -> list[str]:
    """The targets of any of the runs, lowest first."""
    return sorted({name for run in runs for name in run.rounds_to_accuracy}, key=float)


def _columns(runs: Sequence[Run]) -> list[tuple[str, Callable[[Run], str]]]:
    """Heading and cell text of every column; of rounds-to-accuracy there are as many as the runs have targets."""

    def rounds(name: str) -> Callable[[Run], str]:
        def text(run: Run) -> str:
            found = run.rounds_to(name)
            return f"> {run.rounds:,}" if found is None and run.curve else _fixed(0)(found)

        return text

    return [*_COLUMNS, *((f"rounds to {name} %", rounds(name)) for name in _targets(runs))]


def comparison_table(runs: Sequence[Run]) -> Table:
    """The runs, one to a line in the order given, with notes above where they are not directly comparable.

    Method names are never shortened; print with :func:`print_table`, which makes the console wide enough.
    """
    notes = comparability_notes(runs)
    table = Table(
        title=Text("\n".join(notes)) if notes else None,
        title_justify="left",
        title_style="bold",
        caption=CAPTION,
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    columns = _columns(runs)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, run in zip(run_labels(runs), runs, strict=True):
        table.add_row(Text(label), *(text(run) for _, text in columns))
    return table


def matrix_table(matrix: Tensor) -> Table:
    """One accuracy matrix for the terminal: cells coloured by accuracy, ACC over the tasks seen in the last column.

    Cells of tasks not learned yet are lighter; what was not evaluated is left empty. Accuracies have one decimal,
    beyond ten tasks none.

    Args:
        matrix: ``[T, T]`` in percent.

    Raises:
        ValueError: ``matrix`` is not ``[T, T]``.
    """
    tasks = len(matrix)
    if matrix.shape != (tasks, tasks) or not tasks:
        raise ValueError(f"an accuracy matrix to show is [T, T], got {list(matrix.shape)}")
    decimals = 1 if tasks <= 10 else 0
    table = Table(title="accuracy (%) on each task", title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("after task", justify="right", no_wrap=True)
    for i in range(tasks):
        table.add_column(str(i), justify="right", no_wrap=True)
    table.add_column("ACC", justify="right", no_wrap=True, style="bold")
    for t, row in enumerate(matrix.tolist()):
        cells = []
        for i, accuracy in enumerate(row):
            background, ink = cell_colours(accuracy, seen=i <= t) if not math.isnan(accuracy) else ("", "")
            cells.append(Text(f"{accuracy:.{decimals}f}", f"{ink} on {background}") if background else Text(""))
        average = average_accuracy(matrix, after=t).item()
        table.add_row(str(t), *cells, "" if math.isnan(average) else f"{average:.2f}")
    return table


def print_table(table: Table, file: IO[str] | None = None) -> None:
    """Print a table in full: at least :data:`TABLE_WIDTH` characters wide and never cut off, also into a pipe.

    Args:
        table: any table.
        file: where to; None is standard output.
    """
    console = Console(file=file)
    needed = Console(file=file, width=10_000).measure(table).maximum
    console.width = max(TABLE_WIDTH, needed)
    console.print(table)


def comparison_markdown(runs: Sequence[Run], pictures: Sequence[str] = ()) -> str:
    """The comparison as a Markdown text: notes, table, caption, formulas, pictures.

    Args:
        runs: the runs, in the order of the lines.
        pictures: file names of pictures, relative to where the text will be.
    """
    columns = _columns(runs)
    headings = ["method", *(heading for heading, _ in columns)]
    lines = ["# Comparison of runs", ""]
    for note in comparability_notes(runs):
        lines += [f"> {note}", ""]
    lines += ["| " + " | ".join(headings) + " |", "|---" + "|---:" * len(columns) + "|"]
    for label, run in zip(run_labels(runs), runs, strict=True):
        cells = [label.replace("|", "\\|"), *(text(run) for _, text in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", CAPTION, ""]
    lines += [f"- `{key}`: {formula}" for key, formula in FORMULAS.items()]
    for picture in pictures:
        lines += ["", f"![{Path(picture).stem.replace('_', ' ')}]({picture})"]
    return "\n".join(lines) + "\n"


def write_comparison(runs: Sequence[Run], out: Path) -> None:
    """Write ``comparison.csv``, ``comparison.md``, ``accuracy_curve.png`` and ``accuracy_heatmaps.png``.

    If any of the runs was evaluated between task ends also ``accuracy_rounds.png``, the learning curves of those that
    were. The CSV has every key of ``summary.json`` unrounded, bytes as bytes, and ``rounds_to_<target>`` for every
    target of any run; an empty cell is an undefined value.

    Args:
        runs: at least one run.
        out: the folder; made if absent, and files of an earlier comparison are replaced.

    Raises:
        ValueError: there is no run.
        OSError: the folder cannot be written.
    """
    if not runs:
        raise ValueError("there is no run to compare")
    out.mkdir(parents=True, exist_ok=True)
    keys = [*SUMMARY_KEYS, "used_space"]
    with (out / "comparison.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        targets = _targets(runs)
        writer.writerow(["run", *keys, *(f"rounds_to_{name}" for name in targets), "folder"])
        for label, run in zip(run_labels(runs), runs, strict=True):
            values: list[Any] = [getattr(run, key) for key in keys]
            values += [run.rounds_to(name) for name in targets]
            writer.writerow([label, *("" if value is None else value for value in values), run.folder])
    matrices: Mapping[str, Tensor] = dict(zip(run_labels(runs), (run.matrix for run in runs), strict=True))
    save(accuracy_curve(matrices), out / "accuracy_curve.png")
    save(accuracy_heatmaps(matrices), out / "accuracy_heatmaps.png")
    pictures = ["accuracy_curve.png", "accuracy_heatmaps.png"]
    curves = {label: run.curve for label, run in zip(run_labels(runs), runs, strict=True) if run.curve}
    (out / "accuracy_rounds.png").unlink(missing_ok=True)  # of an earlier comparison
    if curves:
        save(learning_curves(curves, [float(name) for name in targets]), out / "accuracy_rounds.png")
        pictures.append("accuracy_rounds.png")
    text = comparison_markdown(runs, pictures)
    (out / "comparison.md").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None takes ``sys.argv``.

    Returns:
        Exit status: 0, or 2 after a one-line message on standard error.
    """
    formulas = (f"  {key:<8} {text}" for key, text in FORMULAS.items())
    parser = argparse.ArgumentParser(
        prog="python -m cfl.comparison",
        description="Compare finished runs: prints a table; with --out also writes it, and pictures, to a folder.",
        epilog="\n".join(["figures:", *formulas, "", *wrap(CAPTION, 100)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a finished run")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where comparison.csv, .md and the pictures go")
    options = parser.parse_args(arguments)
    try:
        folders: dict[Path, Path] = {}
        for folder in options.runs:
            if folder.resolve() in folders:
                raise RunFolderError(f"{folder}: given twice")
            folders[folder.resolve()] = folder
        runs = [read_run(folder) for folder in folders.values()]
        print_table(comparison_table(runs))
        if options.out is not None:
            write_comparison(runs, options.out)
            print(options.out)
    except (RunFolderError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
