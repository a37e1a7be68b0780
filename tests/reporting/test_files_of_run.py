"""Overwriting a run removes the files of the earlier run in the folder, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cfl.reporting.files_of_run import files_of_earlier_run


def folder_with(tmp_path: Path, loggers: Any, *files: str) -> Path:
    """Make a run folder whose configuration names loggers, and files, whose paths are relative to it."""
    folder = tmp_path / "runs" / "one"
    for file in ("rounds.csv", *files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    return folder


def logger(kind: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": {"save_dir": "logs", **options}}


def removed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in files_of_earlier_run(folder)} - {"rounds.csv"}


VERSIONS = [f"logs/lightning_logs/version_{number}" for number in range(3)]
BOARD = "events.out.tfevents.1.host.1.0"


def test_what_loggers_of_the_run_wrote_is_removed_and_what_is_like_it_is_not(tmp_path: Path) -> None:
    tables = [f"{version}/metrics.csv" for version in VERSIONS]
    others = [f"mine/lightning_logs/version_0/{name}" for name in ("metrics.csv", BOARD)]
    others += [f"{VERSIONS[0]}/best.ckpt", f"{VERSIONS[0]}/{BOARD}", "logs/metrics.csv"]
    folder = folder_with(tmp_path, logger("CSVLogger"), *tables, *others)
    assert removed(folder) == set(tables)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, VERSIONS[0]),
        ({"version": 2}, VERSIONS[2]),
        ({"version": "board", "name": ""}, "logs/board"),
        ({"version": "board", "name": None}, "logs/board"),
        ({"save_dir": ".", "name": "x"}, "x/version_0"),
        ({"sub_dir": "a/b"}, f"{VERSIONS[0]}/a/b"),
    ],
    ids=str,
)
def test_a_logger_is_found_where_it_writes(options: dict[str, Any], place: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [logger("TensorBoardLogger", **options), "text"], f"{place}/{BOARD}")
    assert removed(folder) == {f"{place}/{BOARD}"}


@pytest.mark.parametrize(
    "options",
    [{"name": "../../../other"}, {"version": "../../../../other"}, {"save_dir": "../../other"}, {"name": "/other"}],
    ids=str,
)
def test_a_configuration_names_no_file_outside_the_folder(options: dict[str, Any], tmp_path: Path) -> None:
    elsewhere = [f"../../other/{BOARD}", f"../../other/version_0/{BOARD}"]
    folder = folder_with(tmp_path, logger("TensorBoardLogger", **options), *elsewhere)
    assert removed(folder) == set()


@pytest.mark.parametrize(
    "text", ["a: [", "text", "trainer: 3", "trainer: {logger: {class_path: 3, init_args: 3}}\nrun: 3"]
)
def test_a_configuration_that_cannot_be_read_names_nothing(text: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None, f"{VERSIONS[0]}/metrics.csv")
    (folder / "config.yaml").write_text(text)
    assert removed(folder) == set()


def test_a_folder_without_a_run_has_nothing_to_remove(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, logger("CSVLogger"), f"{VERSIONS[0]}/metrics.csv")
    (folder / "rounds.csv").unlink()
    assert files_of_earlier_run(folder) == []
