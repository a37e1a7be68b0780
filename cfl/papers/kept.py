"""Finished runs as small files that stay with the project when the run folders are gone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cfl.papers.cells import each_recipe
from cfl.papers.definition import Paper
from cfl.papers.results import Result, read_result
from cfl.reporting.attention import Attention
from cfl.reporting.csv_file import RunFolderError
from cfl.running.missing_data import MISSING, MissingData, needs_of
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import SUMMARY, folders_below

RESULTS = "results"
MOST_ATTENTION = 1000
"""Largest number of attention values in a kept run; a hundred clients would have about ten thousand per layer."""
_DIGEST = "sha256"
_RUN_NAME = re.compile(r"(?P<scale>[^-]+)-seed(?P<seed>\d+)-[0-9a-f]{8}")


class Kept(NamedTuple):
    """The result of :func:`keep`.

    Attributes:
        written: the files written.
        left_out: a line with the reason for each finished run that was not kept, except runs at other scales.
    """

    written: list[Path]
    left_out: list[str]


def keep(paper: Paper, runs: Path, scales: Sequence[str], folder: Path | None = None) -> Kept:
    """Write a file for every finished run of a paper, and a file that names the data missing for its runs.

    Args:
        paper: the paper.
        runs: folder of all runs; those of the paper are below ``<runs>/<paper>``.
        scales: keep runs at these scales.
        folder: folder of the written files; None is the paper's ``results``.

    Raises:
        ConfigError: a scale that the paper does not have.
    """
    for scale in scales:
        if scale not in paper.scales:
            raise ConfigError("--scale", scale, f"one or more of {','.join(paper.scales)}")
    target = folder or paper.folder / RESULTS
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    left_out: list[str] = []
    present: set[str] = set()
    for place, _, names in folders_below(runs / paper.name):
        if SUMMARY not in names:
            continue
        name = _RUN_NAME.fullmatch(place.name)
        if name is None or name["scale"] not in paper.scales:
            left_out.append(f"{place}: not named as a table's run, <scale>-seed<n>-<hash>")
            continue
        if name["scale"] not in scales:
            continue
        try:
            result = read_result(place)
        except RunFolderError as error:
            left_out.append(str(error))
            continue
        where = place.relative_to(runs / paper.name)
        written.append(target / f"{'-'.join(where.parts)}.json")
        write_whole(written[-1], as_text(result, name["scale"]))
        present.update(needs_of(result.experiment))
    missing = runs / MISSING if (runs / MISSING).is_file() else target / MISSING
    if missing.is_file():
        texts = _texts(paper)
        listed = MissingData(missing).known.items()
        known = {name: said for name, said in listed if name in texts and name not in present}
        (target / MISSING).unlink(missing_ok=True)
        MissingData(target / MISSING).add(known)
        written += [target / MISSING] if known else []
    return Kept(written, left_out)


def _texts(paper: Paper) -> str:
    """Return the configurations of all of a paper's tables as text, which names the data that its runs read."""
    recipes = (recipe for table in paper.tables() for scale in paper.scales for _, recipe in each_recipe(table, scale))
    arguments = {argument for recipe in recipes for argument in recipe.arguments}
    files = [Path(argument.removeprefix("--config=")) for argument in arguments if argument.startswith("--config=")]
    return "\n".join([*arguments, *(path.read_text(encoding="utf-8") for path in files)])


def as_text(result: Result, scale: str) -> str:
    """A run as JSON, a line per part.

    The parts are the SHA-256 of all others, scale, hash, experiment, summary, matrix, used space per layer and task,
    and clients' epochs. ACC and further columns by round follow if the run was evaluated between task ends, the matrix
    with known tasks if the run has one, and the last task's attention if it has at most :data:`MOST_ATTENTION` values.
    """
    parts: dict[str, Any] = {
        "scale": scale,
        "config_hash": result.hash,
        "experiment": result.experiment,
        "summary": _rounded(result.summary),
        "matrix": _rounded(result.matrix),
        "space": _rounded(result.space),
        "client_epochs": result.client_epochs,
    }
    if result.rounds:
        parts["rounds"] = _rounded(list(result.rounds))
    if result.columns:
        parts["columns"] = _rounded({name: list(values) for name, values in result.columns.items()})
    if result.matrix_task_il:
        parts["matrix_task_il"] = _rounded(list(result.matrix_task_il))
    last = {layer: (max(tasks), tasks[max(tasks)]) for layer, tasks in result.attention.items()}
    if last and sum(len(of.borrowers) * len(of.lenders) for _, of in last.values()) <= MOST_ATTENTION:
        parts["attention"] = {
            layer: {
                "task": task,
                "borrowers": list(of.borrowers),
                "lenders": [list(lender) for lender in of.lenders],
                "values": _rounded([list(row) for row in of.values]),
            }
            for layer, (task, of) in last.items()
        }
    lines = [f'"{key}": {json.dumps(part, sort_keys=True)}' for key, part in parts.items()]
    return "{\n" + ",\n".join([f'"{_DIGEST}": "{_digest(lines)}"', *lines]) + "\n}\n"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _require_unchanged(text: str, digest: str) -> None:
    """Refuse a file whose digest, in its second line, is not that of the lines below without their final commas.

    Raises:
        ValueError: the digests differ.
    """
    if _digest(line.removesuffix(",") for line in text.splitlines()[2:-1]) != digest:
        raise ValueError("its figures have another SHA-256 than when they were written")


def _rounded(tree: Any) -> Any:
    if isinstance(tree, float):
        return round(tree, 6)
    if isinstance(tree, Mapping):
        return {key: _rounded(part) for key, part in tree.items()}
    return [_rounded(part) for part in tree] if isinstance(tree, list) else tree


def _attention(of: Mapping[str, Any]) -> Attention:
    return Attention(of["borrowers"], [(client, task) for client, task in of["lenders"]], of["values"])


def read_kept(paper: Paper, folder: Path | None = None) -> dict[str, list[Result]]:
    """Scale -> kept runs, in the order of their file names.

    Args:
        paper: the paper.
        folder: folder of the kept runs; None is the paper's ``results``.

    Raises:
        RunFolderError: a file was not written by :func:`keep` or has changed since, or its hash is not that of its
            experiment.
    """
    found: dict[str, list[Result]] = {scale: [] for scale in paper.scales}
    for path in sorted((folder or paper.folder / RESULTS).glob("*.json")):
        if path.name == MISSING:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            entry = json.loads(text)
            _require_unchanged(text, entry[_DIGEST])
            result = Result(
                entry["experiment"],
                path,
                entry["summary"],
                entry["matrix"],
                entry["space"],
                entry["client_epochs"],
                entry.get("rounds", ()),
                entry.get("matrix_task_il", ()),
                {layer: {of["task"]: _attention(of)} for layer, of in entry.get("attention", {}).items()},
                entry.get("columns", {}),
            )
            scale = found[entry["scale"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path}: not a kept run: {type(error).__name__}: {error}") from None
        if result.hash != entry["config_hash"]:
            raise RunFolderError(f"{path}: its experiment has hash {result.hash}, not {entry['config_hash']}")
        scale.append(result)
    return found
