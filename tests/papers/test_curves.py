"""Learning curves of finished runs: rounds to an accuracy in tables, pictures over rounds, and curves of kept runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paper_tables import fot, point, resolver, write_run

from cfl.papers import pictures
from cfl.papers.cells import Experiments
from cfl.papers.definition import Table, read_table
from cfl.papers.expressions import Undefined
from cfl.papers.kept import as_text, keep, read_kept
from cfl.papers.pictures import table_picture
from cfl.papers.report import write_report
from cfl.papers.results import Results, read_result, read_results
from cfl.running.missing_data import MissingData
from cfl.runtime.errors import ConfigError

PAPER = fot()["table1"].paper
EVALUATED = "--schedule.evaluate_every=1"
TARGETS = "--targets.accuracies=[85, 90]"
ONE = {"axes": {"benchmark": ["pmnist"], "partition": ["shards"], "method": ["fedavg", "fot"]}}
"""The axes of a table: two methods on one benchmark with one partition."""


def arguments(*further: str, **axes: str) -> tuple[str, ...]:
    return (*fot()["table1"].recipe(point(**axes)).arguments, *further)


def write_curve(folder: Path, curve: Sequence[float | None], *further: str, seed: int = 0, **axes: str) -> Path:
    """A finished run with this ACC after each round."""
    write_run(folder, arguments(*further, **axes), seed, rounds=len(curve))
    rows = [[r, 3, "" if acc is None else acc] for r, acc in enumerate(curve)]
    with (folder / "rounds.csv").open("w") as file:
        csv.writer(file, lineterminator="\n").writerows([["round", "clients", "acc"], *rows])
    return folder


def table(folder: Path, **entries: Any) -> Table:
    path = folder / "curves.yaml"
    rules = [{"set": {"schedule.evaluate_every": 1}}]
    entry = {"title": "curves", **ONE, "rules": rules, "lines": "method", "figures": {"ACC": "curve"}, **entries}
    path.write_text(yaml.safe_dump({key: value for key, value in entry.items() if value is not None}))
    return read_table(PAPER, path)


# Figures of a run.


def test_rounds_to_an_accuracy_and_the_curve(tmp_path: Path) -> None:
    run = read_result(write_curve(tmp_path / "run", [None, 70.0, None, 90.0, 88.0, 95.25], EVALUATED))
    for asked, rounds in (('"70"', 2), ('"85"', 4), ("90", 4), ('"90.5"', 6), ("95.25", 6)):
        assert run.figure(f"rounds_to({asked})") == rounds
    assert run.figure('rounds_to("95") - rounds_to("70")') == 4
    assert run.figure("curve") == [None, 70.0, None, 90.0, 88.0, 95.25]
    assert run.figure("rounds") == 6  # still the number of rounds in the summary


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ('rounds_to("95.5")', "never within 3 rounds"),
        ('rounds_to("most")', "'most' is no accuracy in percent"),
    ],
)
def test_a_number_of_rounds_that_there_is_not(expression: str, why: str, tmp_path: Path) -> None:
    run = read_result(write_curve(tmp_path / "run", [10.0, 50.0, 95.0], EVALUATED))
    with pytest.raises(Undefined, match=why):
        run.figure(expression)


def test_task_ends_alone_are_no_curve(tmp_path: Path) -> None:
    """A run that is evaluated at task ends only has no curve and no rounds to an accuracy.

    Otherwise the last round of a task would be taken for the first that reaches an accuracy.
    """
    run = read_result(write_curve(tmp_path / "run", [None, None, 95.0]))
    assert list(run.rounds) == []
    with pytest.raises(Undefined, match="evaluated at task ends only"):
        run.figure('rounds_to("90")')
    with pytest.raises(Undefined, match="no curve"):
        run.figure("curve")


# Cells.


def experiments(root: Path) -> Experiments:
    return Experiments(resolver(), read_results(root), MissingData(root / "missing-data.json"))


def test_a_cell_has_the_rounds_or_says_why_not(tmp_path: Path) -> None:
    write_curve(tmp_path / "a", [80.0, 90.0, 91.0], EVALUATED)
    write_curve(tmp_path / "b", [80.0, 85.0, 86.0, 89.0, 92.0], EVALUATED, seed=1)
    write_curve(tmp_path / "c", [80.0, 85.0, 86.0], EVALUATED, method="fot")
    figures = {"to 90 %": {"value": 'rounds_to("90")', "decimals": 0}}
    first, second = experiments(tmp_path).cells(table(tmp_path, lines=None, figures=figures), "paper")
    assert first.seeds == {0: 2, 1: 5}
    assert first.ours is not None
    assert first.ours.mean == 3.5
    assert second.status == "no value (never within 3 rounds)"


def test_a_run_that_may_stop_fills_only_cells_that_ask_for_it(tmp_path: Path) -> None:
    stopping = read_result(write_curve(tmp_path / "a", [90.0], EVALUATED, TARGETS))
    whole = read_result(write_curve(tmp_path / "b", [90.0, 91.0], EVALUATED))
    results = Results([stopping, whole])
    assert results.of(resolver().experiment(arguments(EVALUATED, TARGETS))) == {0: stopping}
    assert results.of(resolver().experiment(arguments(EVALUATED))) == {0: whole}
    watched = arguments(EVALUATED, TARGETS, "--targets.stop=false")  # targets that do not end the run
    assert results.of(resolver().experiment(watched)) == {0: whole}


# Curves over rounds.


def test_a_report_over_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve is the mean over seeds, up to the end of the shortest run. Rounds that are not evaluated are left out."""
    write_curve(tmp_path / "a", [10.0, None, 30.0, 40.0], EVALUATED)
    write_curve(tmp_path / "b", [14.0, None, 36.0], EVALUATED, seed=1)
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure) or path.touch() or path)
    report = write_report(experiments(tmp_path), table(tmp_path, over="rounds"), "paper", {}, tmp_path)
    assert "| ACC | - | curve | 2 | - | run |" in report.text
    with report.files[1].open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedavg"]
    assert [(row["after"], float(row["ours"]), row["seeds"]) for row in rows] == [("1", 12.0, "2"), ("3", 33.0, "2")]
    (line,) = drawn[0].axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 3], [12.0, 33.0])
    assert drawn[0].axes[0].get_xlabel() == "communication rounds"


def test_long_curves_keep_every_point_and_few_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_curve(tmp_path / "a", [float(r % 100) for r in range(200)], EVALUATED)
    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure) or path.touch() or path)
    asked = table(tmp_path, over="rounds")
    assert table_picture(asked, experiments(tmp_path).cells(asked, "paper"), tmp_path / "p.png")
    (line,) = drawn[0].axes[0].lines
    assert len(line.get_xdata()) == 200
    assert 200 / line.get_markevery() <= 40


def test_curves_run_over_tasks_unless_said_otherwise(tmp_path: Path) -> None:
    assert table(tmp_path).over == "tasks"
    assert {name: found.over for name, found in fot().items() if found.over != "tasks"} == {}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"over": "epochs"}, "over = 'epochs' cannot work; valid: one of tasks, rounds"),
        (
            {"dotted": {"method": "fot"}},
            "dotted = 'method: fot' cannot work; valid: an axis other than that of the lines",
        ),
        ({"dotted": {"seed": "0"}}, "dotted = 'seed: 0' cannot work"),
        ({"dotted": {"method": "fot"}, "lines": None}, "dotted = .* cannot work; valid: .* where there are lines"),
        ({"labels": {"method": {"fott": "FOT"}}}, "labels = 'method: fott' cannot work; valid: an axis of the table"),
        ({"over": "rounds", "lines": None}, "over = 'rounds' cannot work; valid: unset where there are no lines"),
    ],
)
def test_what_curves_cannot_be(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        table(tmp_path, **entries)


# Kept runs.


def test_a_kept_run_has_its_curve(tmp_path: Path) -> None:
    curve = [None, 100 / 3, 89.9999999999]
    write_curve(tmp_path / "runs" / "fot" / "x" / "short-seed0-00000000", curve, EVALUATED)
    (path,) = keep(PAPER, tmp_path / "runs", ["short"], tmp_path / "kept").written
    assert json.loads(path.read_text())["rounds"] == [None, 33.333333, 90.0]
    (kept,) = read_kept(PAPER, tmp_path / "kept")["short"]
    original = read_result(tmp_path / "runs" / "fot" / "x" / "short-seed0-00000000")
    for target in ("33", "33.4", "90"):
        assert kept.figure(f'rounds_to("{target}")') == original.figure(f'rounds_to("{target}")')
    assert as_text(kept, "short") == path.read_text()


def test_a_kept_run_without_a_curve_is_as_ever(tmp_path: Path) -> None:
    write_curve(tmp_path / "runs" / "fot" / "x" / "short-seed0-00000000", [None, 50.0])
    (path,) = keep(PAPER, tmp_path / "runs", ["short"], tmp_path / "kept").written
    expected = ["sha256", "scale", "config_hash", "experiment", "summary", "matrix", "space", "client_epochs"]
    assert list(json.loads(path.read_text())) == expected
    assert list(read_kept(PAPER, tmp_path / "kept")["short"][0].rounds) == []
