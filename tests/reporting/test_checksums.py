"""Checksums of a run's files."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli

from cfl.reporting.checksums import check_unchanged, write_checksums
from cfl.reporting.csv_file import RunFolderError

SUMS = "SHA256SUMS"


def files(folder: Path) -> Path:
    (folder / "clients").mkdir(parents=True)
    for name in ("a.csv", "clients/0.csv", "clients/1.csv"):
        (folder / name).write_text(name)
    return folder


def test_sha256sum_reads_them(tmp_path: Path) -> None:
    folder = files(tmp_path / "run")
    write_checksums(folder, ["clients/1.csv", "a.csv"], {"b.json": "later"})
    (folder / "b.json").write_text("later")
    said = subprocess.run(["sha256sum", "--check", SUMS], cwd=folder, capture_output=True, text=True, check=True)
    assert said.stdout == "a.csv: OK\nb.json: OK\nclients/1.csv: OK\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "clients/1.csv").write_text("other"), "clients/1.csv: changed since the run ended"),
        (lambda folder: (folder / "clients/1.csv").write_text(""), "clients/1.csv: changed since the run ended"),
        (lambda folder: (folder / "clients/1.csv").unlink(), "clients/1.csv: no such file"),
        (
            lambda folder: [(folder / "clients/1.csv").unlink(), os.mkfifo(folder / "clients/1.csv")],
            "clients/1.csv: not a file",
        ),
        (
            lambda folder: (folder / SUMS).write_text("hello\n"),
            "SHA256SUMS, line 1: no SHA-256 with",
        ),
        (lambda folder: (folder / SUMS).write_bytes(b"\xff"), "SHA256SUMS: no text"),
        (lambda folder: [(folder / SUMS).unlink(), (folder / SUMS).mkdir()], "SHA256SUMS: not a file"),
    ],
)
def test_changes_are_named(change: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    folder = files(tmp_path / "run")
    check_unchanged(folder, "clients")  # a run from before checksums were written
    write_checksums(folder, ["a.csv", "clients/0.csv", "clients/1.csv"], {})
    for name in ("a.csv", "clients", "clients/1.csv", "unknown.csv"):
        check_unchanged(folder, name)
    change(folder)
    for name in ("clients", "clients/1.csv"):
        with pytest.raises(RunFolderError) as caught:
            check_unchanged(folder, name)
        assert f"{folder}/{said}" in str(caught.value)
    if not said.startswith(SUMS):
        check_unchanged(folder, "a.csv")


def test_a_finished_run_has_those_of_its_tables(tmp_path: Path) -> None:
    """A finished run has checksums of all its tables. Resuming and scoring change none, overwriting writes new ones."""
    folder = tmp_path / "run"
    assert tiny_cli.fit(folder, *tiny_cli.VARIANTS["personal"]) == 0
    lines = (folder / SUMS).read_text().splitlines()
    expected = {
        str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.suffix in (".csv", ".json", ".yaml")
    }
    assert {line.split("  ")[1] for line in lines} == expected
    assert "clients/accuracy_matrix_003.csv" in expected
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt"), "--progress.enabled=false") == 0
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt")) == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert tiny_cli.fit(folder, "--run.overwrite=true") == 0
    for line in (folder / SUMS).read_text().splitlines():
        check_unchanged(folder, line.split("  ")[1])
    assert "clients" not in (folder / SUMS).read_text()
