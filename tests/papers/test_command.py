"""The command line, end to end: a table is run for real, then nothing is left to run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fabricated import every_table

from cfl.papers.command import main
from cfl.papers.definition import PAPERS

ROOT = PAPERS.parent.parent
ONE = ["--methods", "fedavg", "--partition", "shards", "--bench", "five-datasets", "--scale", "smoke"]


def test_a_smoke_table_from_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", str(tmp_path)]
    assert main(["run", "fot-table1", *ONE, "--seeds", "2", "--jobs", "2", *runs]) == 0
    said = capsys.readouterr().out
    assert "2 runs to make, 0 finished" in said
    assert "finished five-datasets shards fedavg smoke seed 1" in said
    text = (tmp_path / "fot/reports/table1-smoke.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| 5-Datasets | non-IID | FL | ACC |")]
    assert row.endswith("| 2 | - | smoke: by order only |")
    # Again: both are known.
    assert main(["run", "fot-table1", *ONE, "--seeds", "2", *runs]) == 0
    assert "0 runs to make, 2 finished" in capsys.readouterr().out
    assert main(["run", "fot-table1", *ONE, "--seeds", "3", "--dry-run", *runs]) == 0
    said = capsys.readouterr().out
    assert "1 run to make, 2 finished" in said
    assert "cfl fit --config=configs/benchmarks/five-datasets.yaml" in said
    assert main(["report", "fot-table1", *ONE, *runs]) == 0
    assert row in capsys.readouterr().out
    assert main(["keep", "--scale", "short", *runs]) == 0  # smoke runs are none of these


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fot-table9"], "table = 'fot-table9' cannot work; valid: one of "),
        (["run", "fot-table1", "--bench", "mnist"], "--bench = 'mnist' cannot work; valid: for fot-table1"),
        (["run", "fot-table1", "--methods", "fot,x"], "--methods = 'x' cannot work"),
        (["run", "fot-table1", "--scale", "huge"], "--scale = 'huge' cannot work; valid: one of paper, short, smoke"),
        (["run", "fot-table1", "--seeds", "0"], "--seeds = 0 cannot work; valid: an integer of at least 1"),
        (["run", "fot-table1", "--jobs", "0"], "--jobs = 0 cannot work"),
        (["run", "fot-table12", "--only", "threshold"], "--only = 'threshold' cannot work"),
        (["run", "fot-table12", "--only", "threshold=0.5"], "--only threshold = '0.5' cannot work"),
        (["run", "fot-table12", "--methods", "fot"], "valid: for fot-table12: threshold"),
        (["run", "fot-table1", "--partition", "iid,x"], "--partition = 'x'"),
        (["report", "fot-table1"], "runs' cannot work; valid: a folder in which runs lie"),
        (["keep"], "runs' cannot work; valid: a folder in which runs lie"),
        (["sweep", "none.yaml"], "sweep = 'none.yaml' cannot work"),
    ],
)
def test_bad_input_is_named_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_the_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in every_table())


def make(*arguments: str) -> str:
    given = ["make", "-n", "-C", str(ROOT), "VENV=/nowhere", "-o", "/nowhere/.installed", *arguments]
    found = subprocess.run(given, capture_output=True, text=True, check=True)
    return " ".join(found.stdout.replace("\\\n", " ").split())


def test_make_hands_its_variables_on() -> None:
    everything = make("fot-table1")
    assert "cfl.papers run fot-table1 --scale paper --jobs 1 --runs runs/tables" in everything
    assert not {"--seeds", "--bench", "--methods", "--partition"} & set(everything.split())
    some = make("fot-figure4", "BENCH=pmnist", "METHODS=fot,er", "PARTITION=iid", "SCALE=short", "SEEDS=1", "JOBS=2")
    assert "run fot-figure4 --scale short --jobs 2 --runs runs/tables --seeds 1" in some
    assert "--bench pmnist --methods fot,er --partition iid" in some


@pytest.mark.parametrize("name", list(every_table()))
def test_every_table_has_a_target(name: str) -> None:
    assert f"run {name} " in make(name)


def test_a_report_of_no_seeds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "fot-table3", "--runs", str(tmp_path), "--seeds", "0"]) == 2
    assert "--seeds = 0" in capsys.readouterr().err


def test_a_damaged_list_of_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "missing-data.json").write_text("")
    assert main(["report", "fot-table3", "--runs", str(tmp_path)]) == 2
    assert str(tmp_path / "missing-data.json") in capsys.readouterr().err


def test_an_interrupted_command_ends_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("cfl.papers.command.papers", interrupted)
    assert main(["list"]) == 130
