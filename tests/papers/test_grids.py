"""Grids of attention between clients: read from a run's table, reported, drawn and kept."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.paper_tables import resolver, tables_of, write_run

from cfl.papers.cells import Experiments
from cfl.papers.expressions import Undefined
from cfl.papers.grids import Grid, attention_grid, mean_grid
from cfl.papers.kept import MOST_ATTENTION, keep, read_kept
from cfl.papers.report import write_report
from cfl.papers.results import Results, read_result, read_results
from cfl.reporting.attention import Attention, read_attention
from cfl.running.missing_data import MissingData

TABLE = tables_of("confedmade")["figure4"]
FULL = {**TABLE.fixed, "overlap": "full", "scale": "short"}
HEAD = ("task", "client", "layer", "sources", "source_tasks", "attention")
ROWS = (
    (0, 0, "output", "", "", ""),
    (1, 1, "output", "0 2", "0 0", "-0.5 0.25"),
    (1, 0, "output", "1 2", "0 0", "0.75 0.1"),
    (1, 0, "layers.0", "1 2", "0 0", "0.3 0.2"),
)


def write_rows(path: Path, rows: Sequence[Sequence[object]] = ROWS, head: Sequence[str] = HEAD) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def run(folder: Path, seed: int = 0, rows: Sequence[Sequence[object]] = ROWS) -> Path:
    write_run(folder, TABLE.recipe(FULL).arguments, seed)
    write_rows(folder / "confedmade.csv", rows)
    return folder


def as_rows(rows: Sequence[Sequence[object]] = ROWS) -> list[Mapping[str, object]]:
    return [dict(zip(HEAD, row, strict=True)) for row in rows]


def test_attention_is_read_by_layer_and_task() -> None:
    found = read_attention(as_rows())
    assert set(found) == {"output", "layers.0"}
    assert found["output"] == {1: Attention([0, 1], [(0, 0), (1, 0), (2, 0)], [[None, 0.75, 0.1], [-0.5, None, 0.25]])}
    assert found["layers.0"][1].borrowers == [0]


def test_knowledge_of_several_tasks_of_one_client_is_told_apart() -> None:
    found = read_attention(as_rows([(2, 0, "output", "1 2 1 2", "0 0 1 1", "1 2 3 4")]))
    assert found["output"][2] == Attention([0], [(1, 0), (2, 0), (1, 1), (2, 1)], [[1.0, 2.0, 3.0, 4.0]])
    names = attention_grid(found["output"][2], 2, None).columns
    assert names == ("client 1, task 0", "client 2, task 0", "client 1, task 1", "client 2, task 1")


def test_tables_of_other_methods_have_none() -> None:
    assert read_attention([{"task": 0, "layer": "fc1", "used_space": 3.0}]) == {}


def test_a_run_has_a_grid_with_the_tasks_that_clients_learned(tmp_path: Path) -> None:
    result = read_result(run(tmp_path / "run"))
    grid = result.figure('attention("output")')
    assert grid.rows == ("client 0 (0, 1)", "client 1 (2, 3)")
    assert grid.columns == ("client 0 (0)", "client 1 (2)", "client 2 (3)")
    assert grid.entries()[0] == (("client 0 (0, 1)", "client 1 (2)"), 0.75)
    later = read_result(run(tmp_path / "later", rows=[*ROWS, (2, 0, "output", "1", "1", "0.5")]))
    assert later.figure('attention("output")').values == [[0.5]]  # of the last task
    with pytest.raises(Undefined, match=r"attention is kept of layers.0, output, not of 'other'"):
        result.figure('attention("other")')
    with pytest.raises(Undefined, match="is no number"):
        result.figure('attention("output") + 1')


def test_seeds_are_averaged_where_they_have_values() -> None:
    one = Grid(("a", "b"), ("x", "y"), [[1.0, None], [2.0, 3.0]])
    other = Grid(("b", "c"), ("y", "x"), [[5.0, 6.0], [None, 7.0]])
    mean = mean_grid([one, other])
    assert (mean.rows, mean.columns) == (("a", "b", "c"), ("x", "y"))
    assert mean.values == [[1.0, None], [4.0, 4.0], [7.0, None]]


def test_the_report_has_a_picture_and_every_entry(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run(runs / "a", 0)
    run(runs / "b", 1, [(1, 1, "output", "0 2", "0 0", "0.5 0.75"), *ROWS[2:]])
    experiments = Experiments(resolver(), read_results(runs), MissingData(runs / "missing.json"))
    report = write_report(experiments, TABLE, "short", {}, tmp_path / "out")
    text, table, picture = report.files
    assert picture.suffix == ".png"
    assert picture.stat().st_size > 10_000
    lines = [line for line in text.read_text().splitlines() if line.startswith("| full | output")]
    assert [line.split("|")[4].strip() for line in lines] == ["heatmap"]
    with table.open() as file:
        found = {r["after"]: r for r in csv.DictReader(file) if r["overlap"] == "full" and r["figure"] == "output"}
    entry = found["client 1 (2, 3) / client 0 (0)"]
    assert (float(entry["ours"]), float(entry["ours_std"]), entry["seeds"]) == (0.0, pytest.approx(0.5**0.5), "2")
    assert len(found) == 4


def test_it_is_kept_with_the_run(tmp_path: Path) -> None:
    paper, runs = TABLE.paper, tmp_path / "runs"
    folder = run(runs / paper.name / "mnist" / "confedmade" / "short-seed0-12345678")
    keep(paper, runs, ["short"], tmp_path / "kept")
    (kept,) = read_kept(paper, tmp_path / "kept")["short"]
    assert kept.figure('attention("output")') == read_result(folder).figure('attention("output")')
    assert Results([kept]).of(read_result(folder).experiment)


def test_of_very_many_clients_it_is_not_kept(tmp_path: Path) -> None:
    clients = int(MOST_ATTENTION**0.5) + 2
    sources = " ".join(str(c) for c in range(1, clients))
    rows = [(1, c, "output", sources, " ".join("0" * (clients - 1)), sources) for c in range(clients)]
    paper, runs = TABLE.paper, tmp_path / "runs"
    run(runs / paper.name / "mnist" / "confedmade" / "short-seed0-12345678", rows=rows)
    keep(paper, runs, ["short"], tmp_path / "kept")
    (kept,) = read_kept(paper, tmp_path / "kept")["short"]
    with pytest.raises(Undefined, match="attention is kept of no layer"):
        kept.figure('attention("output")')
