"""The command line of ``cfl.papers``: a table is run from start to report, and wrong input is refused."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from support.paper_tables import every_table, fot, point, tables_of, write_run

from cfl.papers.command import chosen_values, main
from cfl.papers.definition import PAPERS
from cfl.runtime import signals
from cfl.runtime.errors import ConfigError

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
    assert row in said
    assert "| CIFAR-100 |" not in said
    # Again: both are known.
    assert main(["run", "fot-table1", *ONE, "--seeds", "2", *runs]) == 0
    assert "0 runs to make, 2 finished" in capsys.readouterr().out
    assert main(["run", "fot-table1", *ONE, "--seeds", "3", "--dry-run", *runs]) == 0
    said = capsys.readouterr().out
    assert "1 run to make, 2 finished" in said
    (command,) = [line for line in said.splitlines() if line.startswith("cfl fit --config=configs/benchmarks/five-")]
    assert " --seed_everything=2 --run.dir=" in command
    assert command.endswith(" --ckpt_path=last")  # the printed command continues an interrupted run, as `run` does
    assert main(["run", "fot-table1", *ONE, "--seeds", "1-3", "--dry-run", *runs]) == 0
    said = capsys.readouterr().out
    assert "2 runs to make, 1 finished" in said
    assert [f" --seed_everything={seed} " in said for seed in range(4)] == [False, False, True, True]
    assert main(["report", "fot-table1", *ONE, *runs]) == 0
    assert row in capsys.readouterr().out
    assert main(["keep", "--scale", "short", *runs]) == 0  # there are only smoke runs, so that nothing is kept


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs for several tables, which share many."""
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.parametrize("name", sorted(every_table()))
def test_every_cell_of_a_table_runs_at_scale_smoke(
    name: str, smoke_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", name, "--scale", "smoke", "--seeds", "1", "--runs", str(smoke_runs)]) == 0
    assert "failed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fot-table9"], "table = 'fot-table9' cannot work; valid: one of "),
        (["run", "fot-table1", "--bench", "mnist"], "--bench = 'mnist' cannot work; valid: for fot-table1"),
        (["run", "fot-table1", "--methods", "fot,x"], "--methods = 'x' cannot work"),
        (["run", "fot-table1", "--scale", "huge"], "--scale = 'huge' cannot work; valid: one of paper, short, smoke"),
        (
            ["run", "fot-table1", "--seeds", "0"],
            "--seeds = '0' cannot work; valid: how many, an integer from 1 to 1000",
        ),
        (["run", "fot-table1", "--bench", ""], "--bench = '' cannot work; valid: for fot-table1"),
        (["run", "fot-table1", "--seeds", "2-1"], "--seeds = '2-1' cannot work"),
        (["run", "fot-table1", "--seeds", "1-"], "e.g. 3-4"),
        (["run", "fot-table1", "--seeds", "two"], "--seeds = 'two' cannot work"),
        (["run", "fot-table1", "--jobs", "0"], "--jobs = 0 cannot work"),
        (["run", "fot-table12", "--only", "threshold"], "--only = 'threshold' cannot work"),
        (["run", "fot-table12", "--only", "threshold=0.5"], "--only threshold = '0.5' cannot work"),
        (["run", "fot-table12", "--methods", "fot"], "fot-table12 has no axis method (it is fot); its axes are: t"),
        (["run", "fedagem-table7", "--bench", "rmnist"], "no axis benchmark (it is tiny-imagenet); its axes are: v"),
        (["run", "fedagem-table1", "--bench", "rmnist", "--methods", "icarl", "--dry-run"], "no figure for benchmark"),
        (["run", "fedagem-table1", "--bench", "rmnist", "--methods", "icarl"], "method icarl"),
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


def test_a_file_in_place_of_the_folder_of_runs_is_refused_before_runs_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["run", "fot-table1", *ONE, "--seeds", "1", "--runs", str(tmp_path / "file")]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == f"error: --runs = '{tmp_path / 'file'}' cannot work; valid: a folder that can be written (file exists)\n"
    )
    assert "failed" not in said.out


def test_the_list_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in every_table())
    for name, table in tables_of("fedweit").items():  # titles begin in the column after the longest name
        (line,) = [line for line in said.splitlines() if line.startswith(f"  fedweit-{name} ")]
        assert line.index(table.title) == len("  fedweit-figure6-middle ")


def make_said(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = ["make", "-n", "-s", "-C", str(ROOT), "VENV=/nowhere", "-o", "/nowhere/bin/.installed", *arguments]
    return subprocess.run(given, capture_output=True, text=True)


def make(*arguments: str) -> list[str]:
    """The words of the command that a target runs."""
    found = make_said(*arguments)
    assert found.returncode == 0, found.stderr
    return [word for word in shlex.split(found.stdout) if word.strip()]


def options(words: list[str]) -> dict[str, str]:
    """Return option -> the word after it."""
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_make_hands_its_variables_on() -> None:
    everything = make("fot-table1")
    assert everything[1:5] == ["-m", "cfl.papers", "run", "fot-table1"]
    assert options(everything) == {"--scale": "paper", "--jobs": "1", "--runs": "runs/tables"}
    some = make("fot-figure4", "BENCH=pmnist", "METHODS=fot,er", "PARTITION=iid", "SCALE=short", "SEEDS=1", "JOBS=2")
    assert options(some) == {
        "--scale": "short",
        "--jobs": "2",
        "--runs": "runs/tables",
        "--seeds": "1",
        "--bench": "pmnist",
        "--methods": "fot,er",
        "--partition": "iid",
    }


def test_make_hands_values_with_blanks_and_quotes_on_as_one() -> None:
    given = {"METHODS": "fot, fedavg", "ONLY": "threshold=0.87, 0.90", "TABLE_RUNS": 'it\'s $$HOME; "here"'}
    found = options(make("fot-table12", *(f"{name}={value}" for name, value in given.items())))
    assert found["--methods"] == given["METHODS"]
    assert found["--only"] == given["ONLY"]
    assert found["--runs"] == given["TABLE_RUNS"].replace("$$", "$")


@pytest.mark.parametrize(("value", "dry"), [("1", True), ("yes", True), ("0", False), ("no", False), ("", False)])
def test_a_dry_run_is_one_where_it_was_asked_for(value: str, dry: bool) -> None:
    assert ("--dry-run" in make("fot-table1", f"DRY_RUN={value}")) is dry


def test_make_refuses_variables_that_a_table_has_not() -> None:
    """A misspelt variable of make, or one of another target, is refused before anything is installed."""
    found = make_said("fot-table1", "METHOD=fot", "SEED=1", "DRYRUN=1", "SCALE=short")
    assert found.returncode == 2
    assert "no variable of fot-table1: DRYRUN METHOD SEED; valid: BENCH METHODS PARTITION ONLY SCALE" in found.stderr
    assert not found.stdout
    assert make_said("demo", "SEED=1").returncode == 0


def test_blanks_around_values_are_nobodys() -> None:
    asked = argparse.Namespace(bench=None, methods="fot, fedavg ", partition=None, only=[" threshold = 0.87, 0.90"])
    assert chosen_values(asked) == {"method": ["fot", "fedavg"], "threshold": ["0.87", "0.90"]}


@pytest.mark.parametrize(
    ("bench", "only"), [(None, ["threshold=0.87", "threshold=0.90"]), ("pmnist", ["benchmark=cifar100"])]
)
def test_an_axis_has_one_set_of_values(bench: str | None, only: list[str]) -> None:
    asked = argparse.Namespace(bench=bench, methods=None, partition=None, only=only)
    with pytest.raises(ConfigError, match=f"--only = '{only[-1]}' cannot work; valid: each axis once: .* already"):
        chosen_values(asked)


@pytest.mark.parametrize("name", list(every_table()))
def test_every_table_has_a_target(name: str) -> None:
    assert make(name)[3:5] == ["run", name]


def test_a_report_of_no_seeds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "fot-table3", "--runs", str(tmp_path), "--seeds", "0"]) == 2
    assert "--seeds = '0'" in capsys.readouterr().err


def test_a_run_that_diverged_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names the folder of a run that diverged, says how to run it again, and starts nothing."""
    arguments = fot()["table1"].recipe(point("smoke", benchmark="five-datasets")).arguments
    folder = write_run(tmp_path / "a", arguments)
    (folder / "summary.json").unlink()
    (folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
    assert main(["run", "fot-table1", *ONE, "--seeds", "1", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"diverged; remove {folder} to run again: five-datasets shards fedavg smoke seed 0\n" in said
    assert "0 runs to make, 0 finished, 1 diverged" in said


def test_a_damaged_list_of_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "missing-data.json").write_text("")
    assert main(["report", "fot-table3", "--runs", str(tmp_path)]) == 2
    assert str(tmp_path / "missing-data.json") in capsys.readouterr().err


def test_an_interrupted_command_ends_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def program() -> int:
        signals.hold()
        return main(["list"])

    monkeypatch.setattr("cfl.papers.command.papers", interrupted)
    assert signals.ended_by_signals(program) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"
