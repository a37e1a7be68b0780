"""Accuracy matrices in CSV files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.made_up import matrix

from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.matrix_file import read_matrix_csv, write_matrix_csv

NAN = math.nan


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_a_matrix_survives_the_file_to_the_last_bit(tmp_path: Path, tasks: int) -> None:
    a, b = matrix(tasks, 1), matrix(tasks, 2)[0]
    a[0, 0] = 100.0 / 3.0
    if tasks > 1:
        a[1, 0], a[0, 1], b[1] = 5e-324, NAN, NAN
    path = tmp_path / "accuracy_matrix.csv"
    for initial in (b, None, torch.full((tasks,), NAN, dtype=torch.float64)):
        write_matrix_csv(path, a, initial)
        read, read_initial = read_matrix_csv(path)
        torch.testing.assert_close(read, a, rtol=0, atol=0, equal_nan=True)
        if initial is None:
            assert read_initial is None
        else:
            assert read_initial is not None
            torch.testing.assert_close(read_initial, initial, rtol=0, atol=0, equal_nan=True)


def test_the_file_looks_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_matrix_csv(path, torch.tensor([[90.0, 10.5], [NAN, NAN]]), torch.tensor([10.0, NAN]))
    assert path.read_bytes() == b"after_task,task_0,task_1\ninit,10.0,\n0,90.0,10.5\n1,,\n"


def test_rows_may_be_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("after_task,task_0,task_1,task_2\r\n2,7,8,9\r\n\r\n0,1,,3\r\n1,,,\r\ninit,4,5,6\r\n")
    a, b = read_matrix_csv(path)
    expected = torch.tensor([[1, NAN, 3], [NAN, NAN, NAN], [7, 8, 9]], dtype=torch.float64)
    torch.testing.assert_close(a, expected, rtol=0, atol=0, equal_nan=True)
    assert b is not None
    assert b.tolist() == [4, 5, 6]


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 5])
def test_a_matrix_file_that_ends_before_its_end_is_named(lines: int, tmp_path: Path) -> None:
    """A file that is cut off at any byte is refused with the line where it ends."""
    path = tmp_path / "m.csv"
    write_matrix_csv(path, matrix(4), matrix(4)[0])
    whole = path.read_text()
    ends = [k + 1 for k, character in enumerate(whole) if character == "\n"]
    for end in range(ends[lines - 1] + 1, ends[lines]):
        path.write_text(whole[:end])
        with pytest.raises(RunFolderError, match=rf"m\.csv, line {lines + 1}: (cut off|\d values instead of 5|row)"):
            read_matrix_csv(path)
    path.write_text(whole[: ends[lines - 1]])
    with pytest.raises(
        RunFolderError, match=rf"m\.csv, line {lines}: ends without row {max(0, lines - 2)}, of 4 tasks"
    ):
        read_matrix_csv(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": empty"),
        ("after_task\n", "the first line must be"),
        ("after_task,task_1,task_0\n", "the first line must be"),
        ("after_task,task_0\n1,5\n", "line 2: row '1' cannot be; valid: init, 0 .. 0"),
        ("after_task,task_0\n0,5", "line 2: cut off, no line break ends it"),
        ("after_task,task_0,task_1\n0,5,5\n", "line 2: ends without row 1, of 2 tasks"),
        ("after_task,task_0\n0,5\n\n0,6\n", "line 4: row '0' appears twice"),
        ("after_task,task_0,task_1\n0,5\n", "line 2: 2 values instead of 3"),
        ("after_task,task_0\n0,5,6\n", "line 2: 3 values instead of 2"),
        ("after_task,task_0\n0,good\n", "line 2: 'good' is neither"),
        ("after_task,task_0\n0,inf\n", "line 2: 'inf' is neither"),
        ("after_task,task_0\n0,nan\n", "line 2: 'nan' is neither"),
        ("after_task,task_0\n0,\xff\n", "not a CSV file"),
    ],
)
def test_a_broken_matrix_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "accuracy_matrix.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunFolderError) as error:
        read_matrix_csv(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_matrix_is_not_written(tmp_path: Path) -> None:
    for a, b in [(torch.zeros(2, 3), None), (torch.zeros(2, 2), torch.zeros(3)), (torch.zeros(0, 0), None)]:
        with pytest.raises(ValueError, match="are needed"):
            write_matrix_csv(tmp_path / "m.csv", a, b)
    with pytest.raises(ValueError, match="infinite"):
        write_matrix_csv(tmp_path / "m.csv", torch.full((1, 1), math.inf))
    assert not (tmp_path / "m.csv").exists()
