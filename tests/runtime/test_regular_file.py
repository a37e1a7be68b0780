"""Files of others' folders are opened without following links or waiting for pipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cfl.callbacks.rounds_table import RoundsTable
from cfl.reporting import folder_lock
from cfl.runtime.atomic_write import append
from cfl.runtime.errors import DamagedFile, NotWritten
from cfl.runtime.regular_file import open_regular


def linked(path: Path) -> None:
    path.symlink_to("mine.txt")


@pytest.mark.parametrize("spoil", [linked, os.mkfifo, Path.mkdir])
def test_only_regular_files_are_opened(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    mine, path = tmp_path / "mine.txt", tmp_path / ".fit-lock"
    mine.write_text("precious")
    spoil(path)
    for flags in (os.O_WRONLY, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match=r"regular|directory"):
            open_regular(path, flags)
    with pytest.raises(OSError, match=r"regular|directory"):
        folder_lock.take(tmp_path)
    with pytest.raises(NotWritten):
        append(path, "row")
    assert mine.read_text() == "precious"


def test_a_dangling_link_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    path.symlink_to("mine.txt")
    with pytest.raises(NotWritten, match="it is a link, a pipe or another file than a regular one"):
        append(path, "row")
    assert not (tmp_path / "mine.txt").exists()


def test_an_existing_file_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before ")
    os.close(open_regular(path, os.O_WRONLY))
    append(path, "and after")
    assert path.read_text() == "before and after"


def test_a_pipe_for_the_rows_of_finished_rounds_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rounds.csv")
    with pytest.raises(DamagedFile, match=r"rounds\.csv is no file; remove it"):
        RoundsTable(tmp_path / "rounds.csv").begin(2, tmp_path / "rounds.csv")
