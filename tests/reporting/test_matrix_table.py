"""The accuracy matrix in the terminal."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.made_up import matrix

from cfl.metrics.measure import measure_named
from cfl.metrics.transfer import average_accuracy
from cfl.reporting.figures import cell_colours
from cfl.reporting.matrix_table import matrix_table
from cfl.reporting.text_table import TABLE_WIDTH, print_table

NAN = math.nan


def printed(table: Any) -> list[str]:
    with redirect_stdout(io.StringIO()) as file:
        print_table(table)
    return file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


def test_the_matrix_table_shows_every_accuracy_and_the_average() -> None:
    a = matrix(4)
    a[3] = NAN
    a[0, 2] = NAN
    lines = printed(matrix_table(a))
    rows = [cells(line) for line in lines if line[0] == "│"]
    for t, row in enumerate(rows):
        average = "" if t == 3 else f"{average_accuracy(a, after=t).item():.2f}"
        assert row == [str(t), *("" if math.isnan(x) else f"{x:.1f}" for x in a[t].tolist()), average]
    assert len(rows) == 4


def test_the_matrix_table_of_many_tasks_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    a = matrix(20)
    rows = [cells(line) for line in printed(matrix_table(a)) if line[0] == "│"]
    assert [row[1:-1] for row in rows] == [[f"{x:.0f}" for x in row.tolist()] for row in a]


def test_of_very_many_tasks_some_are_shown() -> None:
    a = matrix(100)
    lines = printed(matrix_table(a))
    assert lines[0].strip() == "accuracy (%) on 20 of 100 tasks"
    assert max(map(len, lines)) <= TABLE_WIDTH
    rows = [cells(line) for line in lines if line[0] == "│"]
    shown = [int(row[0]) for row in rows]
    assert (len(shown), shown[0], shown[-1]) == (20, 0, 99)
    assert {5, 6} >= {*np.diff(shown).tolist()}
    assert [row[1:-1] for row in rows] == [[f"{a[t, i].item():.0f}" for i in shown] for t in shown]
    assert [row[-1] for row in rows] == [f"{a[t, : t + 1].mean().item():.2f}" for t in shown]


@pytest.mark.parametrize(("tasks", "decimals"), [(3, 3), (11, 2)])
def test_small_errors_of_a_regression_are_told_apart(tasks: int, decimals: int) -> None:
    errors = matrix(tasks) / 100
    rows = [cells(line) for line in printed(matrix_table(errors, measure_named("rmse"))) if line[0] == "│"]
    assert [row[1:-1] for row in rows] == [[f"{x:.{decimals}f}" for x in row.tolist()] for row in errors]
    assert [row[-1] for row in rows] == [f"{average_accuracy(errors, after=t).item():.4f}" for t in range(tasks)]


def test_the_matrix_table_is_coloured_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=80)
    console.print(matrix_table(torch.tensor([[90.0, 10.0], [20.0, 80.0]])))
    for value, seen in [(90.0, True), (10.0, False), (20.0, True), (80.0, True)]:
        background, ink = (tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5)) for colour in cell_colours(value, seen))
        escape = "\x1b[38;2;{};{};{};48;2;{};{};{}m{:.1f}".format(*ink, *background, value)
        assert escape in file.getvalue()


def test_what_is_no_matrix_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 3\]"):
        matrix_table(torch.zeros(2, 3, 3))
