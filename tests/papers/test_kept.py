"""Kept runs, the reproducibility page, and adopted runs from other folders."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.full_disk import FullDisk
from support.paper_tables import every_table, fot, point, resolver, write_run

from cfl.papers.adopting import adopt
from cfl.papers.cells import each_recipe
from cfl.papers.command import main
from cfl.papers.definition import PAPERS, Paper, papers
from cfl.papers.kept import as_text, keep, read_kept
from cfl.papers.reproducibility import page
from cfl.papers.results import read_result, read_results
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.experiment import config_hash
from cfl.running.resolving import Resolver, same_experiment
from cfl.runtime.errors import ConfigError, NotWritten

ROOT = PAPERS.parent.parent
PAPER = fot()["table1"].paper


@pytest.fixture(autouse=True)
def the_projects_own_stay() -> Iterator[None]:
    """Require that no test here writes into the project's own folders of kept runs."""

    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in PAPERS.rglob("results/*")}

    before = state()
    yield
    assert state() == before


def arguments(scale: str = "paper", **axes: str) -> tuple[str, ...]:
    return fot()["table1"].recipe(point(scale, **axes)).arguments


def runs(root: Path) -> None:
    fedavg = root / "fot" / "pmnist" / "shards" / "fedavg"
    write_run(fedavg / "paper-seed0-00000000", arguments(), 0, 80.1234567891)
    write_run(fedavg / "short-seed0-00000000", arguments("short"), 0, 50.0)
    write_run(fedavg / "smoke-seed0-00000000", arguments("smoke"), 0, 10.0)
    write_run(root / "fot" / "pmnist" / "shards" / "fot" / "short-seed1-00000000", arguments("short", method="fot"), 1)
    (root / "missing-data.json").write_text('{"SVHN": "SVHN: files are missing"}')


def test_kept_runs_are_small_and_whole(tmp_path: Path) -> None:
    runs(tmp_path / "runs")
    written = keep(PAPER, tmp_path / "runs", ["paper", "short"], tmp_path / "kept").written
    assert sorted(path.name for path in written) == [
        "missing-data.json",
        "pmnist-shards-fedavg-paper-seed0-00000000.json",
        "pmnist-shards-fedavg-short-seed0-00000000.json",
        "pmnist-shards-fot-short-seed1-00000000.json",
    ]
    assert all(path.stat().st_size < 6000 for path in written)
    kept = read_kept(PAPER, tmp_path / "kept")
    assert [len(kept[scale]) for scale in ("paper", "short", "smoke")] == [1, 2, 0]
    original = read_result(tmp_path / "runs/fot/pmnist/shards/fot/short-seed1-00000000")
    (copied,) = [result for result in kept["short"] if result.seed == 1]
    assert (copied.experiment, copied.matrix, copied.space) == (
        original.experiment,
        original.matrix,
        original.space,
    )
    assert kept["paper"][0].figure("acc") == 80.123457
    assert {"machine", "versions", "seconds", "rounds"} <= set(copied.summary)
    again = keep(PAPER, tmp_path / "runs", ["paper", "short"], tmp_path / "kept")
    assert [path.read_text() for path in again.written] == [path.read_text() for path in written]
    assert again.left_out == []  # the smoke run is not named, because its scale was not asked for


def test_what_is_not_kept_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(tmp_path / "runs")
    fedavg = tmp_path / "runs" / "fot" / "pmnist" / "shards" / "fedavg"
    (fedavg / "paper-seed0-00000000" / "config.yaml").unlink()
    write_run(fedavg / "mine", arguments(), 3)
    write_run(fedavg / "huge-seed0-00000000", arguments(), 3)
    kept = keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    assert [path.name for path in kept.written] == ["missing-data.json"]
    assert [line.partition(":")[0] for line in kept.left_out[:2]] == [
        str(fedavg / n) for n in ("huge-seed0-00000000", "mine")
    ]
    assert str(fedavg / "paper-seed0-00000000") in kept.left_out[2]
    monkeypatch.setattr("cfl.papers.command.keep", lambda *_: kept)
    assert main(["keep", "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().err
    assert all(f"left out: {line}\n" in said for line in kept.left_out)


def test_data_that_are_there_by_now_are_not_kept_as_missing(tmp_path: Path) -> None:
    runs(tmp_path / "runs")
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    kept = tmp_path / "kept" / "missing-data.json"
    assert json.loads(kept.read_text()) == {"SVHN": "SVHN: files are missing"}
    # FOT's tables read neither USPS nor YahooAnswers.
    (tmp_path / "runs" / "missing-data.json").write_text('{"CIFAR10": "no", "USPS": "no", "YahooAnswers": "no"}')
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    assert json.loads(kept.read_text()) == {"CIFAR10": "no"}
    (tmp_path / "runs" / "missing-data.json").unlink()  # without a list, the kept one stays
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    assert kept.exists()
    kept.write_text('{"CIFAR10": "no", "MNIST": "no"}')  # a finished run that is kept has read MNIST
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    assert json.loads(kept.read_text()) == {"CIFAR10": "no"}
    (tmp_path / "runs" / "missing-data.json").write_text("{}")
    assert kept not in keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept").written
    assert not kept.exists()


def test_a_run_without_the_value_is_shown_before_one_at_a_reduced_scale(tmp_path: Path) -> None:
    shards = tmp_path / "runs" / "fot" / "pmnist" / "shards" / "fot"
    write_run(shards / "paper-seed0-00000000", arguments(method="fot"), 0, used_space=None)
    write_run(shards / "short-seed0-00000000", arguments("short", method="fot"), 0, used_space=50.0)
    keep(PAPER, tmp_path / "runs", ["paper", "short"], tmp_path / "kept")
    text = page([PAPER], resolver(), {"fot": tmp_path / "kept"})
    assert "used space [1] | 61.36 | - | 0 of 1 | - | no value (used_space: the run has no used_space) |" in text


def test_a_run_that_does_not_record_a_value_leaves_its_cell_to_other_scales(tmp_path: Path) -> None:
    """A run whose summary lacks an entry leaves its cell to runs at other scales, unlike a run that records null.

    If there are no others, the cell says how to get the value.
    """
    old = "no value (used_space: the run does not record used_space; remove its folder and run it again)"
    shards = tmp_path / "runs" / "fot" / "pmnist" / "shards" / "fot"
    write_run(shards / "paper-seed0-00000000", arguments(method="fot"), 0)

    def row() -> str:
        keep(PAPER, tmp_path / "runs", ["paper", "short"], tmp_path / "kept")
        text = page([PAPER], resolver(), {"fot": tmp_path / "kept"})
        return next(
            line for line in text.splitlines() if line.startswith("| Permuted MNIST | non-IID | used space [1]")
        )

    assert f"| - | 0 of 1 | - | {old} |" in row()
    short = write_run(shards / "short-seed0-00000000", arguments("short", method="fot"), 0)
    assert f"| - | 0 of 1 | - | {old} |" in row()
    summary = json.loads((short / "summary.json").read_text())
    (short / "summary.json").write_text(json.dumps({**summary, "used_space": 50.0}))
    assert "| 50.00 | 1 | - | short: not compared |" in row()


def test_a_changed_kept_file_is_refused(tmp_path: Path) -> None:
    runs(tmp_path / "runs")
    path = keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept").written[0]
    whole = path.read_text()
    for before, after in (
        ('"batch_size": ', '"batch_size": 1'),
        ('"acc": ', '"acc": 1'),
        ('"sha256": "', '"sha256": "0'),
    ):
        assert before in whole
        path.write_text(whole.replace(before, after, 1))
        with pytest.raises(RunFolderError, match="another SHA-256"):
            read_kept(PAPER, tmp_path / "kept")
    path.write_text("{}")
    with pytest.raises(RunFolderError, match="not a kept run"):
        read_kept(PAPER, tmp_path / "kept")
    with pytest.raises(ConfigError, match="paper,short,smoke"):
        keep(PAPER, tmp_path, ["tiny"], tmp_path / "kept")


def test_the_page_is_made_of_kept_runs_alone(tmp_path: Path) -> None:
    runs(tmp_path / "runs")
    keep(PAPER, tmp_path / "runs", ["paper", "short"], tmp_path / "kept")
    text = page([PAPER], resolver(), {"fot": tmp_path / "kept"})
    assert "| Permuted MNIST | non-IID | FL | ACC | 80.06 ± 0.43 | 80.12 | 1 | +0.06 | matched |" in text
    assert re.search(
        r"non-IID \| FOT \| ACC \[\d+] \| 85.21 ± 0.13 \| 80.00 \| 1 \| - \| short: by order only \|", text
    )
    assert "| Permuted MNIST | IID | FL | ACC | 85.68 ± 0.57 | - | - | - | not run |" in text
    # FL has a row for its run of the published protocol, and a second row at scale short, where orders compare it.
    rows = [line for line in text.splitlines() if line.startswith("| Permuted MNIST | non-IID | FL | ACC |")]
    # The third row is that of Table 10, of which nothing was run.
    assert [line.split(" | ")[-1] for line in rows] == ["matched |", "short: by order only |", "not run |"]
    assert "| fot-table1 | 128 |" in text  # cells, not rows
    assert "| Permuted MNIST | non-IID | ACC | FL, FOT | differ | - | yes | yes | +30.00 | +5.15 |" in text
    assert "| 5-Datasets | non-IID | used space [1] | 45.64 | - | - | - | cannot run here (needs SVHN) |" in text
    assert text == page([PAPER], Resolver(), {"fot": tmp_path / "kept"})


def test_the_page_says_which_code_made_a_run_where_that_is_known(tmp_path: Path) -> None:
    fedavg = tmp_path / "runs" / "fot" / "pmnist" / "shards" / "fedavg"
    versions = {"cfl": "0.1", "torch": "2.0"}
    write_run(fedavg / "paper-seed0-00000000", arguments(), 0, versions=versions)
    known = write_run(fedavg / "paper-seed1-00000000", arguments(), 1, versions={**versions, "source": "0123456789ab"})
    keep(PAPER, tmp_path / "runs", ["paper"], tmp_path / "kept")
    text = page([PAPER], resolver(), {"fot": tmp_path / "kept"})
    (older, newer) = [line for line in text.splitlines() if "| 0.1, 2.0" in line]
    assert "| 0.1, 2.0 |" in older
    assert "| 0.1, 2.0, `0123456789ab` |" in newer
    assert read_result(known).hash == resolver_hash(1)  # the code is no part of the experiment


def resolver_hash(seed: int) -> str:
    return config_hash(resolver().experiment(arguments(), seed))


def test_the_projects_page_has_every_table_and_the_counts_of_the_written_one() -> None:
    """The generated page has every table, and docs/reproducibility.md has the counts of the kept runs."""
    text = page(papers(), resolver())
    for table in every_table().values():
        assert f"### {table.full_name}: {table.title}" in text
    counted = text.partition("## Counts\n")[2].partition("\n## ")[0].strip()
    assert len(counted.splitlines()) == len(papers()) + 2
    assert counted in (ROOT / "docs" / "reproducibility.md").read_text()  # else copy them from the generated page


@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper.name)
def test_every_kept_run_is_a_tables_or_is_named_as_a_sweeps(paper: Paper) -> None:
    """Every kept run belongs to a cell of a table, or its name begins with "sweeps-": a candidate of a sweep."""
    for scale, results in read_kept(paper).items():
        left = {r.folder.name: r for r in results if not r.folder.name.startswith("sweeps-")}
        tables = paper.tables() if left else []
        for one in {recipe.arguments for table in tables for _, recipe in each_recipe(table, scale)}:
            wanted = resolver().experiment(one)
            left = {name: result for name, result in left.items() if not same_experiment(wanted, result.experiment)}
        assert not left


def test_adopted_runs_are_found_afterwards(tmp_path: Path) -> None:
    """An adopted run is copied without its checkpoint, to where the table's own run would be, and found there."""
    elsewhere = write_run(tmp_path / "elsewhere" / "my-run", arguments(method="fot"), 4, 85.0)
    (elsewhere / "last.ckpt").write_text("large")
    target = adopt(elsewhere, [PAPER], tmp_path / "runs", resolver())
    assert target.parent == tmp_path / "runs/fot/pmnist/shards/fot"
    assert target.name.startswith("paper-seed4-")
    assert not (target / "last.ckpt").exists()
    assert read_results(tmp_path / "runs").of(resolver().experiment(arguments(method="fot")))[4].figure("acc") == 85.0
    assert adopt(target, [PAPER], tmp_path / "runs", resolver()) == target  # itself


def test_nothing_is_adopted_into_a_folder_where_a_run_is_being_made(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", arguments(method="fot"), 4, 85.0)
    target = adopt(elsewhere, [PAPER], tmp_path / "runs", resolver())
    (target / "summary.json").write_text("made by now")
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="another process is at work"):
            adopt(elsewhere, [PAPER], tmp_path / "runs", resolver())
    assert (target / "summary.json").read_text() == "made by now"
    assert adopt(elsewhere, [PAPER], tmp_path / "runs", resolver()) == target


def test_a_copy_that_was_cut_off_is_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is cut off at any file is not read as a run. Adopting again completes it, also over an older copy."""
    elsewhere = write_run(tmp_path / "elsewhere", arguments(method="fot"), 4, 85.0)
    (elsewhere / "clients").mkdir()
    (elsewhere / "clients" / "accuracy_000.csv").write_text("after_task\n")
    files = sum(path.is_file() for path in elsewhere.rglob("*"))
    copy = shutil.copyfile
    for allowed in range(files):
        left = iter(range(allowed))

        def cut_off(source: Path, target: Path, *, follow_symlinks: bool = True, left: Iterator[int] = left) -> Path:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return copy(source, target, follow_symlinks=follow_symlinks)

        monkeypatch.setattr(shutil, "copyfile", cut_off)
        with FullDisk(of="summary.json"), pytest.raises((KeyboardInterrupt, NotWritten)):
            adopt(elsewhere, [PAPER], tmp_path / "runs", resolver())
        results = read_results(tmp_path / "runs")
        assert (results.all, results.left_out) == ([], [])
        monkeypatch.setattr(shutil, "copyfile", copy)
        target = adopt(elsewhere, [PAPER], tmp_path / "runs", resolver())
        assert {path.name for path in target.rglob("*")} - {".lock"} == {path.name for path in elsewhere.rglob("*")}
        assert len(read_results(tmp_path / "runs").all) == 1


def test_runs_of_no_table_are_not_adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stranger = write_run(tmp_path / "a", [*arguments(), "--schedule.batch_size=63"])
    with pytest.raises(RunFolderError, match="fills no table"):
        adopt(stranger, [PAPER], tmp_path / "runs", resolver())
    assert main(["adopt", str(tmp_path / "none"), "--runs", str(tmp_path / "runs")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_text_of_a_kept_run_is_json_line_by_line(tmp_path: Path) -> None:
    result = read_result(write_run(tmp_path / "a", arguments()))
    text = as_text(result, "paper")
    assert json.loads(text)["config_hash"] == result.hash
    assert len(text.splitlines()) == 10
