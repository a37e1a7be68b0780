"""On a full or failing disk a run ends with one sentence, and the same command continues it once there is room."""

from __future__ import annotations

import errno
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from support import tiny_cli
from support.full_disk import FullDisk

OPTIONS = (
    *("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']", "--schedule.evaluate_every", "2"),
    *("--federated.client_state_memory_mb", "0", "--engine.kind", "vmap", "--schedule.cohort_width", "2"),
)
"""Options of a run that writes files of all kinds: the state of clients is in files, too."""


def command(folder: Path) -> tuple[str, ...]:
    return ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *OPTIONS, "--ckpt_path", "last")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert tiny_cli.run(*command(folder)) == 0
    return tiny_cli.results(folder)


def stopped(folder: Path, disk: FullDisk, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a run whose disk is full at one file, or "" if the run ends before that file."""
    capsys.readouterr()
    with disk:
        status = tiny_cli.run(*command(folder))
    said = capsys.readouterr().err
    if disk.begun <= disk.files:
        assert status == 0
        return ""
    assert status == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not list(folder.rglob(".cfl-*"))
    assert (f"continue with: cfl fit --ckpt_path {folder}/last.ckpt\n" in said) == (folder / "last.ckpt").exists()
    return said


def test_full_at_any_file_and_resumed_equals_uninterrupted(
    tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for files in count():
        said = stopped(tmp_path / str(files), FullDisk(files), capsys)
        if not said:
            break
        assert "cannot be written: no space is left on the disk at /" in said
        assert tiny_cli.run(*command(tmp_path / str(files))) == 0
        tiny_cli.assert_same(tiny_cli.results(tmp_path / str(files)), whole)
    assert files > 20


@pytest.mark.parametrize(
    ("files", "of", "error"),
    [
        (0, "config.yaml", errno.EROFS),
        (0, "last.ckpt", errno.ENOSPC),
        (1, "last.ckpt", errno.EIO),
        (2, "rounds.csv", errno.EDQUOT),
        (0, "summary.json", errno.ENOSPC),
    ],
)
def test_the_file_is_named_and_the_run_goes_on(
    files: int, of: str, error: int, tmp_path: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = stopped(tmp_path, FullDisk(files, of, error), capsys)
    assert said.startswith(f"error: {tmp_path / of} cannot be written: ")
    assert (" needed)" in said) is (error in (errno.ENOSPC, errno.EDQUOT))
    assert tiny_cli.run(*command(tmp_path)) == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path), whole)


def test_a_picture_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FullDisk(of=".png"):
        assert tiny_cli.fit(tmp_path, pictures=True) == 0
    warned = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert [text.partition(" cannot")[0] for text in warned] == [
        str(tmp_path / "partition.png"),
        str(tmp_path / "accuracy_matrix.png"),
    ]
    assert tiny_cli.summary(tmp_path)["rounds"] == 6


def test_a_loggers_file_is_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Lightning logger's failed write ends the run with one sentence, and the run can be continued."""
    options = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".", "--ckpt_path", "last")
    with monkeypatch.context() as full:
        full.setattr(_ExperimentWriter, "NAME_METRICS_FILE", "/dev/full")
        assert tiny_cli.fit(tmp_path, *options) == 2
    said = capsys.readouterr().err
    assert f"error: a file in {tmp_path} cannot be written: no space is left on the disk at /" in said
    assert "Traceback" not in said
    assert tiny_cli.fit(tmp_path, *options) == 0
    assert tiny_cli.fit(tmp_path / "whole") == 0
    ours, theirs = (tiny_cli.results(folder) for folder in (tmp_path, tmp_path / "whole"))
    tiny_cli.assert_same(ours["weights"], theirs["weights"])


def test_half_a_line_of_a_killed_process_is_no_round(tmp_path: Path, whole: dict[str, Any]) -> None:
    """A row that was cut off is removed: the "1" of a row for round 10 would read as a second row of round 1."""
    with tiny_cli.die_at("training", 3, 15):
        assert tiny_cli.run(*command(tmp_path)) == 143
    with (tmp_path / "rounds.csv").open("a") as file:
        file.write("1")
    assert tiny_cli.run(*command(tmp_path)) == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path), whole)


@pytest.mark.parametrize("argument", ["--version", "configs"])
def test_standard_output_is_named_too(argument: str) -> None:
    """A command whose standard output is a file on a full disk ends with status 2 and one sentence."""
    command = [sys.executable, "-m", "cfl", argument]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output cannot be written: no space is left on the disk at /dev (")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_ended_is_named() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cfl", "configs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "error: standard output cannot be written: broken pipe\n"
