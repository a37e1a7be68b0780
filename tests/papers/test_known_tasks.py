"""Figures of the Task-IL matrix: accuracies of class-incremental runs with the task known at test time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paper_tables import fot, point, write_run

from cfl.papers.expressions import Undefined
from cfl.papers.kept import keep, read_kept
from cfl.papers.results import Result, read_result
from cfl.reporting.matrix_file import write_matrix_csv

PAPER = fot()["table1"].paper
MATRIX = [[90.0, 10.0, 20.0], [70.0, 80.0, 30.0], [95.0, 60.0, 50.0]]


def result() -> Result:
    return Result({"seed_everything": 0}, Path("run"), {}, [[1.0, 0.0], [0.0, 1.0]], matrix_task_il=MATRIX)


def test_averages_forgetting_and_curves_are_those_of_the_other_matrix() -> None:
    of = result()
    assert of.figure("averages_task_il") == [90.0, 75.0, pytest.approx(205 / 3)]
    # The best accuracy up to and including the last, minus the last, averaged over earlier tasks.
    assert of.figure("forgettings_task_il") == [None, 20.0, pytest.approx((0 + 20) / 2)]
    assert of.figure("curves_task_il[0]") == [90.0, 70.0, 95.0]
    assert of.figure("curves_task_il[1]") == [None, 80.0, 60.0]
    assert of.figure("averages") == [1.0, 0.5]


def test_other_runs_have_none() -> None:
    of = replace(result(), matrix_task_il=())
    for name in ("averages_task_il", "forgettings_task_il", "curves_task_il[0]"):
        with pytest.raises(Undefined):
            of.figure(name)
    assert of.figure("forgettings") == [None, 1.0]
    with pytest.raises(Undefined):
        replace(of, matrix=[[1.0, 0.0], [None, 1.0]]).figure("forgettings")


def test_it_is_read_from_the_run_folder_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "fot" / "pmnist" / "shards" / "fedavg" / "paper-seed0-00000000"
    write_run(folder, fot()["table1"].recipe(point("paper")).arguments, 0)
    write_matrix_csv(folder / "accuracy_matrix_task_il.csv", torch.tensor(MATRIX), torch.zeros(3))
    assert read_result(folder).matrix_task_il == MATRIX
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    (kept,) = read_kept(PAPER, tmp_path / "kept")["paper"]
    assert kept.figure("curves_task_il[1]") == [None, 80.0, 60.0]
