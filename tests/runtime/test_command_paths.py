"""Paths that are options of a command."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from cfl.__main__ import main
from cfl.papers.command import main as papers
from cfl.runtime.command_paths import given_path, require_file, require_folder
from cfl.runtime.errors import ConfigError

COMMANDS = {
    "compare RUN": (main, ["compare", ""]),
    "compare --out": (main, ["compare", "runs", "--out", ""]),
    "configs NAME": (main, ["configs", ""]),
    "dashboard --dry-run": (main, ["dashboard", "--dry-run", ""]),
    "export --out": (main, ["export", "--ckpt_path", "run", "--out", ""]),
    "predict FILE": (main, ["predict", "--ckpt_path", "run", ""]),
    "predict --out": (main, ["predict", "--ckpt_path", "run", "a.png", "--out", ""]),
    "sweep --out": (main, ["sweep", "--seeds", "1", "--out", ""]),
    "papers --runs": (papers, ["keep", "--runs", ""]),
    "papers RUN": (papers, ["adopt", ""]),
    "papers FILE": (papers, ["sweep", ""]),
    "papers --out": (papers, ["reproducibility", "--out", ""]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_takes_an_empty_path_for_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, words = COMMANDS[name]
    with pytest.raises(SystemExit) as stop:
        program(words)
    assert stop.value.code == 2
    assert f"error: argument {name.split()[1]}: '' cannot work; valid: a path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_text_with_nul_is_no_path() -> None:
    with pytest.raises(ArgumentTypeError, match="cannot work"):
        given_path("a\0b")


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--out = '.*pipe' cannot work; valid: a file; this is a pipe"):
        require_file("--out", tmp_path / "pipe")
    with pytest.raises(ConfigError, match="valid: a file; this is a folder"):
        require_file("--out", tmp_path)
    assert (tmp_path / "pipe").is_fifo()
    require_file("--out", Path(os.devnull))


@pytest.mark.parametrize("name", ["file/x", "x" * 255, "x" * 300, "/proc/x"])
def test_a_file_that_cannot_be_written_is_refused_before_it_is_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out = '.*' cannot work; valid: a file that can be written"):
        require_file("--out", tmp_path / name)
    with pytest.raises(ConfigError, match=r"--out = '.*' cannot work; valid: a folder that can be written"):
        require_folder("--out", tmp_path / ("file" if name == "x" * 255 else name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_folders_are_made_and_nothing_else(tmp_path: Path) -> None:
    require_file("--out", tmp_path / "a" / "b" / "c.csv")
    require_folder("--out", tmp_path / "a" / "d")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/b", "a/d"]
