"""A disk that is full, or fails: one sentence, nothing lost, and the same command goes on once there is room."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli
from support.full_disk import FullDisk

OPTIONS = (
    *("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']", "--schedule.evaluate_every", "2"),
    *("--federated.client_state_memory_mb", "0", "--engine.kind", "vmap", "--schedule.cohort_width", "2"),
)
"""A run that writes files of all kinds: what clients keep is in files, too."""


def command(folder: Path) -> tuple[str, ...]:
    return ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *OPTIONS, "--ckpt_path", "last")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tiny_cli.run(*command(folder)) == 0
    return tiny_cli.results(folder)


def stopped(folder: Path, files: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What a run says whose disk is full at one file; nothing if it comes to its end before."""
    capsys.readouterr()
    with FullDisk(files) as disk:
        status = tiny_cli.run(*command(folder))
    said = capsys.readouterr().err
    if disk.begun <= files:
        assert status == 0
        return ""
    assert status == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not list(folder.rglob(".cfl-*"))
    return said


def test_full_at_any_file_and_resumed_equals_uninterrupted(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for files in count():
        folder = tmp_path / str(files)
        said = stopped(folder, files, capsys)
        if not said:
            break
        assert "cannot be written: no space is left on the disk at /" in said
        goes_on = f"continue with: cfl fit --ckpt_path {folder}/last.ckpt\n" in said
        assert goes_on == (folder / "last.ckpt").exists()
        assert tiny_cli.run(*command(folder)) == 0
        tiny_cli.assert_same(tiny_cli.results(folder), whole)
    assert files > 20
