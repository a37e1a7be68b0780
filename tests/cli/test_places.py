"""Folders in which relative paths begin. Those of loggers and profilers are tested in test_trainer_settings.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_cli

SOURCE = "{class_path: Arrays, init_args: {path: mine.npz, shape: null, num_classes: null}}"
STREAM = f"{{class_path: ClassSplit, init_args: {{num_tasks: 2, source: {SOURCE}}}}}"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data that is neither the current folder nor that of CFL_DATA_ROOT."""
    for name in ("data", "current", "environment"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "environment"))
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 4, 4), dtype=np.uint8), np.arange(40) % 4
    part = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(tmp_path / "data" / "mine.npz", **part)
    return tmp_path / "data"


def test_a_source_is_found_under_the_data_root(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``data.root`` is used, also if the source's sizes are read from the file before the data module is built."""
    source = ("--data.stream", STREAM, "--data.partition.per_client", "1")
    assert tiny_cli.fit(Path("run"), *source, "--data.root", str(data)) == 0
    assert tiny_cli.summary(Path("run"))["benchmark"] == "classsplit-mine"
    assert tiny_cli.fit(Path("other"), *source) == 2
    message = capsys.readouterr().err
    assert f"{data.parent}/environment/mine.npz does not exist" in message
    assert "data.root" in message


def test_a_run_folder_stands_for_its_checkpoint(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(Path("run")) == 0
    acc = tiny_cli.summary(Path("run"))["acc"]
    capsys.readouterr()
    for command in ("fit", "validate"):
        assert tiny_cli.run(command, "--ckpt_path", "run") == 0
        assert f"{acc:.3f}" in capsys.readouterr().out
    assert tiny_cli.run("validate", "--ckpt_path", str(data)) == 2
    assert f"looked for {data}/last.ckpt), a run's folder, or last" in capsys.readouterr().err


def test_what_is_missing_is_named_with_the_place_that_was_tried(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    current = data.parent / "current"
    assert tiny_cli.fit(Path("run"), "--ckpt_path", "old/last.ckpt") == 2
    assert f"looked for {current}/old/last.ckpt" in capsys.readouterr().err
    assert tiny_cli.fit(Path("run"), "--config", "mine.yaml") == 2
    assert f"looked in {current} and " in capsys.readouterr().err
