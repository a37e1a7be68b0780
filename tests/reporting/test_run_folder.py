"""Reading run folders: figures, matrices and curves are read as written, damaged files are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made_up import make_density_run, matrix

from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.matrix_file import write_matrix_csv
from cfl.reporting.rounds_file import read_rounds, rounds_to
from cfl.reporting.run_folder import read_run
from cfl.reporting.summary_file import SUMMARY_KEYS

NAN = math.nan
SUMMARY: dict[str, Any] = {
    "method": "fot",
    "benchmark": "digits",
    "partition": "shards",
    "scenario": "domain",
    "seed": 0,
    "acc": 81.25,
    "fgt": -0.001,
    "fgt_max": 2.5,
    "bwt": 0.001,
    "fwt": None,
    "uplink_bytes": 1_234_567_890,
    "downlink_bytes": 4_000,
    "seconds": 12.34,
    "rounds": 50,
    "tasks": 3,
    "clients": 10,
    "config_hash": "a1b2",
}


def run_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    summary = SUMMARY | changes
    (folder / "summary.json").write_text(json.dumps(summary))
    write_matrix_csv(folder / "accuracy_matrix.csv", matrix(summary["tasks"], seed=summary["seed"]))
    return folder


def test_a_run_is_read_as_written(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "a", used_space=53.97, something_else=[1, 2]))
    assert {key: getattr(run, key) for key in SUMMARY} == SUMMARY
    assert run.used_space == 53.97
    assert torch.equal(run.matrix, matrix(3))
    assert run.initial is None
    assert run.others == {"something_else": [1, 2]}
    assert read_run(run_folder(tmp_path / "b")).used_space is None
    assert read_run(run_folder(tmp_path / "c", used_space=None)).used_space is None


def without(key: str) -> str:
    return json.dumps({k: v for k, v in SUMMARY.items() if k != key})


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        ("{}", f"missing {', '.join(SUMMARY_KEYS)}"),
        (json.dumps(SUMMARY | {"acc": NAN}), "NaN is not a JSON value, use null"),
        (json.dumps(SUMMARY).replace("81.25", "1e999"), "not valid JSON: 1e999 is too large"),
        (json.dumps(SUMMARY | {"acc": "81"}), 'acc = "81" cannot be; valid: a number or null'),
        (json.dumps(SUMMARY | {"acc": True}), "acc = true cannot be"),
        (json.dumps(SUMMARY | {"method": None}), "method = null cannot be; valid: text"),
        (json.dumps(SUMMARY | {"uplink_bytes": 1.5}), "uplink_bytes = 1.5 cannot be; valid: an integer from 0"),
        (json.dumps(SUMMARY | {"uplink_bytes": -1}), "uplink_bytes = -1 cannot be; valid: an integer from 0"),
        (json.dumps(SUMMARY).replace("81.25", "1e150"), "not valid JSON: 1e150 is too large"),
        (json.dumps(SUMMARY | {"method": "\ud800"}), "not valid JSON: 'utf-8' codec can't encode"),
        (json.dumps(SUMMARY | {"seed": 10**400}), "not valid JSON: 10000000000000000000... has 401 digits"),
        (json.dumps(SUMMARY | {"other": 10**400}), "not valid JSON: 10000000000000000000... has 401 digits"),
        (json.dumps(SUMMARY)[:-1] + ', "acc": 99.0}', "not valid JSON: acc is there twice"),
        ("[" * 200_000, "not valid JSON"),
        ("", "not valid JSON"),
        (json.dumps(SUMMARY | {"seconds": None}), "seconds = null cannot be; valid: a number"),
        (json.dumps(SUMMARY | {"used_space": "all"}), 'used_space = "all" cannot be; valid: a number or null'),
        (
            json.dumps(SUMMARY | {"rounds_to_accuracy": {"85": 1.5}}),
            'rounds_to_accuracy = {"85": 1.5} cannot be',
        ),
        (json.dumps(SUMMARY | {"rounds_to_accuracy": {"high": 1}}), 'rounds_to_accuracy = {"high": 1} cannot be'),
        (json.dumps(SUMMARY | {"rounds_to_accuracy": [85]}), "rounds_to_accuracy = [85] cannot be"),
        (json.dumps(SUMMARY | {"stopped_early": 1}), "stopped_early = 1 cannot be; valid: true or false"),
        (json.dumps(SUMMARY | {"acc": 180.5}), "an accuracy of 180.5 % cannot be; valid: 0 to 100"),
        (json.dumps(SUMMARY | {"acc": -1.0}), "an accuracy of -1 % cannot be"),
        *((without(key), f"missing {key}") for key in SUMMARY_KEYS),
    ],
)
def test_a_broken_summary_is_named_with_what_is_wrong(tmp_path: Path, summary: str, message: str) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "summary.json").write_text(summary)
    with pytest.raises(RunFolderError) as error:
        read_run(folder)
    assert str(error.value).startswith(str(folder / "summary.json"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def rounds_csv(folder: Path, curve: list[float | None], tasks: int = 1) -> Path:
    rows = [f"{r},{r % tasks},{'' if acc is None else repr(acc)}" for r, acc in enumerate(curve)]
    (folder / "rounds.csv").write_text("\n".join(["round,task,acc", *rows]) + "\n")
    return folder / "rounds.csv"


def test_a_curve_is_read_with_its_gaps(tmp_path: Path) -> None:
    curve = [None, 100 / 3, None, None, 99.999999999, None]
    assert read_rounds(rounds_csv(tmp_path, curve))["acc"] == curve
    assert "acc" not in read_rounds(tmp_path / "nowhere.csv")
    (tmp_path / "rounds.csv").write_text("round,clients\n0,3\n1,3\n")
    assert "acc" not in read_rounds(tmp_path / "rounds.csv")
    (tmp_path / "rounds.csv").write_text("round,acc\n2,1.0\n3,2.0\n")  # a run resumed without its earlier rows
    assert read_rounds(tmp_path / "rounds.csv")["acc"] == [None, None, 1.0, 2.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1.0\n1,good\n", "line 3: 'good' is neither a finite number nor empty"),
        ("0,inf\n", "line 2: 'inf' is neither"),
        ("first,1.0\n", "line 2: 'first' is no round"),
        (",1.0\n", "line 2: '' is no round"),
        ("0,1.0\n1,2.0,3\n", "line 3: 3 values instead of 2"),
        ("0,1.0\n2,1.0\n", "line 3: round 2 where round 1 should be"),
        ("0,1.0\n0,1.0\n", "line 3: round 0 where round 1 should be"),
        ("0,1.0\n1,2", "line 3: cut off, no line break ends it"),
        ("0,1.0\n1,900\n", ": an accuracy of 900 % cannot be"),
        (f"{10**12},1.0\n", "line 2: round 1000000000000 where round 0 should be"),
        (f"{'1' * 5000},1.0\n", "line 2: '1111"),
        ("0,1.0\n", ": 1 rounds, but summary.json says rounds = 2"),
        ("0,1.0\n1,1.0\n2,1.0\n", ": 3 rounds, but summary.json says rounds = 2"),
    ],
)
def test_a_broken_table_of_rounds_is_named_with_its_line(tmp_path: Path, rows: str, message: str) -> None:
    path = run_folder(tmp_path / "run", rounds=2) / "rounds.csv"
    path.write_text("round,acc\n" + rows)
    with pytest.raises(RunFolderError) as error:
        read_run(path.parent)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_table_of_something_else_is_no_table_of_rounds(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run") / "rounds.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(RunFolderError, match=r"rounds\.csv: there is no column round"):
        read_run(path.parent)


def test_a_mean_of_hundreds_may_be_above_by_rounding(tmp_path: Path) -> None:
    acc = math.nextafter(100.0, 101.0)
    assert read_run(run_folder(tmp_path / "run", acc=acc)).acc == acc


def test_an_accuracy_that_cannot_be_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    changed = matrix(3).nan_to_num(nan=0.0)
    changed[2, 1] = 900.0
    write_matrix_csv(folder / "accuracy_matrix.csv", changed)
    with pytest.raises(RunFolderError, match=r"accuracy_matrix\.csv: an accuracy of 900 % cannot be; valid: 0 to 100"):
        read_run(folder)


def test_rounds_to_an_accuracy() -> None:
    curve = [None, 70.0, None, 90.0, 85.0, None, 95.5]
    assert [rounds_to(curve, a) for a in (1, 70, 70.5, 85, 90, 90.5, 95.5, 95.6)] == [2, 2, 4, 4, 4, 7, 7, None]
    assert rounds_to([], 1) is None
    # A mean below 90 by a rounding error counts as 90. One below by an answer in ten million does not.
    assert rounds_to([90 - 1e-12], 90) == 1
    assert rounds_to([90 - 1e-5], 90) is None


def test_missing_and_contradicting_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"nowhere: no such folder"):
        read_run(tmp_path / "nowhere")
    folder = run_folder(tmp_path / "run")
    write_matrix_csv(folder / "accuracy_matrix.csv", matrix(2))
    with pytest.raises(RunFolderError, match=r"accuracy_matrix\.csv: 2 tasks, but summary\.json says tasks = 3"):
        read_run(folder)
    (folder / "accuracy_matrix.csv").unlink()
    with pytest.raises(RunFolderError, match=r"accuracy_matrix\.csv: no such file"):
        read_run(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(RunFolderError, match=r"summary\.json: no such file"):
        read_run(folder)


def test_a_density_has_a_curve_of_likelihoods(tmp_path: Path) -> None:
    folder = make_density_run(tmp_path / "run", evaluate_every=1)
    run, table = read_run(folder), read_rounds(folder / "rounds.csv")
    assert (len(run.curve), run.curve) == (12, table["nll"])
    assert run.curve[-1] == pytest.approx(run.matrix[-1].mean().item())
    assert set(run.progress) == {"uplink_bytes", "seconds"}
    assert run.rounds_to("0.5") is None
    assert read_run(make_density_run(tmp_path / "ends")).curve == []


def test_bytes_and_seconds_are_read_beside_the_curve(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", rounds=3, rounds_to_accuracy={"90": None})
    (folder / "rounds.csv").write_text("round,seconds,acc,uplink_bytes\n0,0.5,,100\n1,,,\n2,1.5,40.0,\n")
    assert read_rounds(folder / "rounds.csv") == {
        "acc": [None, None, 40.0],
        "uplink_bytes": [100.0, None, None],
        "seconds": [0.5, None, 1.5],
    }
    run = read_run(folder)
    assert run.curve == [None, None, 40.0]
    assert run.progress == {"uplink_bytes": [100.0, None, None], "seconds": [0.5, None, 1.5]}
    (folder / "rounds.csv").write_text("acc\n1.0\n")
    with pytest.raises(RunFolderError, match="there is no column round"):
        read_run(folder)
