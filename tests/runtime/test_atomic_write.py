"""Files that others may be reading: written in one step, or left as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cfl.papers.command import main
from cfl.reporting.compare.command import write_report
from cfl.reporting.compare.writing import write_differences_csv, write_means_csv, write_runs_csv
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.runtime.atomic_write import write_whole

Writer = Callable[[Path], object]
WRITERS: dict[str, Writer] = {
    "text": lambda path: write_whole(path, "all of it"),
    "matrix": lambda path: write_matrix_csv(path, torch.eye(2)),
    "runs": lambda path: write_runs_csv(path, []),
    "means": lambda path: write_means_csv(path, []),
    "differences": lambda path: write_differences_csv(path, []),
    "comparison.md": lambda path: write_report(path.parent, []),
    "report.html": lambda path: write_report(path.parent, []),
}


def tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a disk is full after three letters."""

    def torn(self: Path, text: str, **_: object) -> int:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", torn)


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing beside it."""
    path = tmp_path / name
    WRITERS[name](path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert before[path]
    tear(monkeypatch)
    with pytest.raises(OSError, match="disk full"):
        WRITERS[name](path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_page_of_all_tables_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.md"
    path.write_text("before")
    monkeypatch.setattr("cfl.papers.command.page", lambda *_: "afterwards")
    assert main(["reproducibility", "--out", str(path)]) == 0
    assert path.read_text() == "afterwards"
    tear(monkeypatch)
    monkeypatch.setattr("cfl.papers.command.page", lambda *_: "another")
    assert main(["reproducibility", "--out", str(path)]) == 2
    assert path.read_text() == "afterwards"
