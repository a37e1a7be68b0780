"""``cfl compare RUN... [--group-by KEY,...] [--baseline METHOD] [--out FOLDER] [--columns KEY,...] [--pictures]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from cfl.reporting.compare.groups import DEFAULT_KEYS, compare
from cfl.reporting.compare.latex import check_columns, latex_report
from cfl.reporting.compare.page import page_of
from cfl.reporting.compare.picture_formats import FORMATS, add_pictures
from cfl.reporting.compare.reading import LeftOut, find_runs, is_run, read_all
from cfl.reporting.compare.rows import Compared, Comparison, Row
from cfl.reporting.compare.tables import caption, differences_table, means_table
from cfl.reporting.compare.writing import (
    markdown_report,
    write_differences_csv,
    write_means_csv,
    write_runs_csv,
)
from cfl.reporting.measures import CURVES, FIGURES
from cfl.reporting.text_table import TextTable, print_table
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.command_paths import given_path, require_folder
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line

_PICTURE = re.compile(rf"({'|'.join(CURVES)})_(curve|heatmaps|rounds)(_[1-9]\d*)?\.({'|'.join(FORMATS)})")
"""Names that :mod:`cfl.reporting.compare.pictures` gives its files."""


def write_report(
    folder: Path,
    compared: Compared,
    left_out: Sequence[LeftOut] = (),
    warnings: Sequence[str] = (),
    pictures: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Write ``report.html``, ``comparison.md``, ``comparison.tex``, ``runs.csv``, ``means.csv``, ``differences.csv``.

    Args:
        folder: made if absent. Files of an earlier comparison are replaced, and its pictures removed; others are kept.
        compared: the tables, each with the row against which differences are taken.
        left_out: folders that are not compared.
        warnings: lines about parts of runs that could not be read.
        pictures: formats in which pictures are drawn; empty draws none. Their names are described in
            :func:`cfl.reporting.compare.pictures.write_pictures`.
        columns: columns of ``comparison.tex``, as for :func:`cfl.reporting.compare.latex.latex_report`.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables, comparisons = text_tables(compared), [comparison for comparison, _ in compared]
    for old in [path for path in folder.iterdir() if _PICTURE.fullmatch(path.name)]:
        old.unlink(missing_ok=True)  # another comparison in the folder may have removed it
    names: Sequence[str] = ()
    if pictures:
        from cfl.reporting.compare.pictures import write_pictures  # matplotlib is slow to import

        names = write_pictures(folder, comparisons, pictures)
    texts = {
        "report.html": page_of(compared, left_out, warnings),
        "comparison.md": markdown_report(tables, comparisons, left_out, warnings, names),
        "comparison.tex": latex_report(compared, columns),
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    write_runs_csv(folder / "runs.csv", comparisons)
    write_means_csv(folder / "means.csv", comparisons)
    write_differences_csv(folder / "differences.csv", compared)


def text_tables(compared: Compared) -> list[TextTable]:
    """Return each comparison's table of means and, if runs can be paired, its table of differences."""
    found = []
    for comparison, baseline in compared:
        found.append(means_table(comparison))
        differences = differences_table(comparison, baseline)
        if differences is not None:
            found.append(differences)
    return found


def with_baselines(comparisons: Sequence[Comparison], name: str | None) -> list[tuple[Comparison, Row | None]]:
    """Return each table with its baseline, adding the notes of :meth:`Comparison.about_baseline`.

    Raises:
        ConfigError: no table has a row of that name.
    """
    rows = [row for comparison in comparisons for row in comparison.rows]
    known = dict.fromkeys(text for row in rows for text in (row.method, row.label))
    if name is not None and name not in known:
        raise ConfigError("--baseline", name, f"one of {', '.join(known)}")
    return [
        (replace(comparison, notes=[*comparison.notes, *comparison.about_baseline(name)]), comparison.baseline(name))
        for comparison in comparisons
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cfl compare",
        description="Compare finished runs: means over seeds, paired differences, ranks; with --out also as one HTML "
        "page with charts, as Markdown, LaTeX and CSV.",
        epilog="\n".join(wrap(caption(), 100)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=given_path,
        help="folder of a run, or one with run folders below",
    )
    parser.add_argument(
        "--group-by",
        metavar="KEY,...",
        help="average runs over seeds that agree in these: benchmark, partition, scenario (a table each), method, "
        "participation, tasks, clients, rounds, or dotted keys of the configuration that decide results, such as "
        "methods.fot.threshold. "
        f"Unless given: {','.join(DEFAULT_KEYS)}, and any other setting in which runs of one method differ",
    )
    parser.add_argument("--baseline", metavar="METHOD", help="differences are taken to this row; unless given: fedavg")
    parser.add_argument(
        "--out", metavar="FOLDER", type=given_path, help="write report.html, comparison.md, .tex, CSV files"
    )
    parser.add_argument(
        "--columns",
        metavar="KEY,...",
        type=_columns,
        default=(),
        help="with --out, the columns of comparison.tex: "
        f"{', '.join(figure.key for figure in FIGURES)}, rounds_to_90 (a target of the runs), seeds, rank; "
        "unless given: acc,fgt,bwt, of densities nll,nll_task_aware,nll_forgetting",
    )
    add_pictures(parser, "with --out, ", "; a RUN stands before this option")
    return parser


def _listed(text: str) -> list[str]:
    """The parts of a text between commas, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def _columns(text: str) -> list[str]:
    columns = _listed(text)
    if not columns:
        raise argparse.ArgumentTypeError(f"{text!r} cannot work; valid: at least one column, e.g. acc")
    return columns


def main(arguments: Sequence[str], notes: Sequence[str] = ()) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name and ``compare``.
        notes: lines that every table has as notes.

    Returns:
        Exit status: 0 if anything was compared, else 2. What was left out is named on standard error.
    """
    options = _parser().parse_args(arguments)
    keys = None if options.group_by is None else _listed(options.group_by)
    try:
        for name in ("pictures", "columns"):
            if (value := getattr(options, name)) and options.out is None:
                raise ConfigError(f"--{name}", ",".join(value), "--out FOLDER beside it")
        if (out := options.out) is not None:
            if is_run(out):
                valid = f"a folder of the comparison's own, e.g. {out / 'report'}: this one is a run's"
                raise ConfigError("--out", str(out), valid)
            require_folder("--out", out)
        folders, nothing = find_runs(options.runs)
        readings, left_out, warnings = read_all(folders)
        left_out = [*nothing, *left_out]
        for one in left_out:
            said = one.reason if one.reason.startswith(str(one.folder)) else f"{one.folder}: {one.reason}"
            _say("warning", f"{said}; not compared")
        for warning in warnings:
            _say("warning", warning)
        if not readings:
            _say("error", "there is no finished run to compare")
            return 2
        comparisons = [replace(one, notes=[*notes, *one.notes]) for one in compare(readings, keys)]
        compared = with_baselines(comparisons, options.baseline)
        check_columns(options.columns, comparisons)
        for k, table in enumerate(tables := text_tables(compared)):
            print_table(table.terminal(caption(tables, comparisons) if k == len(tables) - 1 else ""))
        if out is not None:
            write_report(out, compared, left_out, warnings, options.pictures, options.columns)
            print(out / "report.html")
    except (ConfigError, OSError) as error:
        _say("error", str(error))
        return 2
    return 0


def _say(kind: str, text: str) -> None:
    print(f"{kind}: {on_one_line(text)}", file=sys.stderr)
