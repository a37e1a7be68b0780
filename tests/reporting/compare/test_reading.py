"""Finding and reading run folders: broken, missing and unfinished parts are named, and the rest is read."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_cli
from support.made_up import make_run

from cfl.metrics.measure import MEASURES, Measure
from cfl.reporting.checksums import write_checksums
from cfl.reporting.compare import partition_file, reading
from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.partition_file import read_partition
from cfl.reporting.compare.reading import find_runs, read, read_all, read_space
from cfl.reporting.compare.rows import figure_of
from cfl.reporting.compare.tables import figures_of
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.matrix_file import read_matrix_csv, write_matrix_csv
from cfl.reporting.run_folder import Run
from cfl.runtime.run_files import matrix_file


def test_runs_are_found_below_a_folder_and_each_once(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a" / "b" / "one"), make_run(tmp_path / "a" / "two")
    make_run(two / "checkpoints" / "copied")  # a run within a run's folder is not a run of its own
    (tmp_path / "empty").mkdir()
    found, nothing = find_runs([two, tmp_path / "a", tmp_path / "empty", tmp_path / "nowhere", two / ".." / "two"])
    assert found == [two, one]
    assert [(left.folder.name, left.reason[:14]) for left in nothing] == [
        ("empty", "holds no run: "),
        ("nowhere", "no such folder"),
    ]


def test_everything_of_a_run_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "fot", nll=True, personal=3, options={"threshold": 0.96})
    warnings: list[str] = []
    reading = read(folder, warnings)
    assert warnings == []
    assert reading.settings["methods.fot.threshold"] == 0.96
    assert set(reading.matrices) == {"accuracy", "nll"}
    np.testing.assert_allclose(reading.matrices["nll"], (100 - reading.matrices["accuracy"]) / 40)
    assert reading.space == {"fot.layers.0": {0: 15.0, 1: 30.0}, "fot.layers.1": {0: 7.5, 1: 15.0}}
    last = reading.matrices["accuracy"][-1].mean()
    np.testing.assert_allclose(reading.clients, [last + 3 * np.sin(client) for client in range(3)])
    assert reading.partition == read(make_run(tmp_path / "again", "ewc"), []).partition != ""
    assert reading.partition != read(make_run(tmp_path / "other", "ewc", seed=1), []).partition


def test_a_client_is_judged_by_the_tasks_that_it_has(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "clients").mkdir()
    header = "after_task,task_0,task_1,task_2\n"
    (folder / "clients" / "accuracy_matrix_000.csv").write_text(header + "0,50,1,1\n1,60,,99\n2,,,\n")  # not on task 1
    (folder / "clients" / "accuracy_matrix_001.csv").write_text(header + "0,,,\n1,,,\n2,,,\n")  # never evaluated
    assert read(folder, []).clients == [60.0]


SECTIONS = "seed_everything: 0\nmodel: {}\nmethods: {}\nschedule: {}\nfederated: {}\n"
"""A configuration's sections without ``data``."""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.yaml", None, "no such file; its settings are not compared"),
        ("config.yaml", "a: [1", "its settings are not compared"),
        ("config.yaml", "just text", "holds no configuration; its settings are not compared"),
        (
            "config.yaml",
            "seed_everything: 0\nmodel: {}\n",
            "config.yaml: lacks data, methods, schedule, federated; its se",
        ),
        *(
            ("config.yaml", f"{SECTIONS}{text}", "config.yaml: not the configuration of a run")
            for text in (
                "data: {}\nengine: fast",
                "data: {}\ntargets: 5",
                "data: {}\ntargets: {accuracies: [x], stop: true}",
                "data: {partition: {class_path: cfl.data.partitions.IID, init_args: [1]}}",
            )
        ),
        ("fot.csv", "task,layer,used_space\n0,a,1", "fot.csv, line 2: cut off, no line break ends it; its used space"),
        ("fot.csv", "", "fot.csv: empty; its used space is not compared"),
        ("nll_matrix.csv", "after_task\n", "its negative log-likelihood is not compared"),
        (
            "fot.csv",
            "task,layer,used_space\n0,a,much\n",
            "line 2: 'much' is neither a finite number nor empty; its used",
        ),
        ("fot.csv", "task,layer,used_space\nx,a,1\n", "line 2: 'x' is no task; its used space is not compared"),
        (
            "fot.csv",
            "task,layer,used_space\n0,a,1\n2,a,1\n",
            "line 3: 1 % of task 2 cannot be; valid: 0 to 100, of task 1",
        ),
        ("fot.csv", "task,layer,used_space\n0,a,101\n", "line 2: 101 % of task 0 cannot be"),
        ("fot.csv", "task,layer,used_space\n0,a,1\n0,b,1\n1,a,1\n", "line 4: b has 1 rows, of 2 tasks; its used"),
        ("fot.csv", "hello\n", "fot.csv: the first line names neither task nor round; its used space"),
        ("clients/accuracy_matrix_000.csv", "nonsense", "its clients are not compared"),
    ],
)
def test_a_broken_part_is_named_and_the_rest_read(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    folder = make_run(tmp_path / "run", "fot", nll=True, personal=1)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    readings, left_out, warnings = read_all([folder])
    assert [reading.run.method for reading in readings] == ["fot"]
    assert left_out == []
    (warning,) = warnings
    assert said in warning
    assert name.partition("/")[0] in warning
    assert "\n" not in warning


CONTRADICTIONS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "another figure": (
        lambda folder, _: change_summary(folder, acc=17.5),
        r"accuracy_matrix\.csv: acc = [\d.]+ at the end, but summary\.json says acc = 17\.5: one of them is damaged",
    ),
    "another run's matrix": (
        lambda folder, other: shutil.copy(other / "accuracy_matrix.csv", folder),
        r"accuracy_matrix\.csv: acc = [\d.]+ at the end, but summary",
    ),
    "another run's rounds": (
        lambda folder, other: shutil.copy(other / "rounds.csv", folder),
        r"rounds\.csv: acc = [\d.]+ at the end, but summary",
    ),
    "another run's rounds beside clients' matrices": (
        lambda folder, other: [change_summary(folder, clients_evaluated=3), shutil.copy(other / "rounds.csv", folder)],
        r"rounds\.csv: acc = [\d.]+ at the end, but summary",
    ),
    "another run's configuration": (
        lambda folder, other: shutil.copy(other / "config.yaml", folder),
        r"config\.yaml: seed_everything = 1, but summary\.json says seed = 0: they are of different runs",
    ),
    "a pipe": (
        lambda folder, _: [(folder / "accuracy_matrix.csv").unlink(), os.mkfifo(folder / "accuracy_matrix.csv")],
        r"accuracy_matrix\.csv: not a file",
    ),
}


def change_summary(folder: Path, **entries: Any) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize(("change", "said"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_files_of_different_runs_are_not_compared(
    change: Callable[[Path, Path], Any], said: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", evaluate_every=1)
    assert len(read_all([folder])[0]) == 1
    change(folder, make_run(tmp_path / "other", seed=1, evaluate_every=1))
    readings, (left,), _ = read_all([folder])
    assert readings == []
    assert re.search(said, left.reason)


def test_a_run_that_stopped_early_has_no_last_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", evaluate_every=1)
    matrix, initial = read_matrix_csv(folder / "accuracy_matrix.csv")
    matrix[-1] = float("nan")
    write_matrix_csv(folder / "accuracy_matrix.csv", matrix, initial)
    change_summary(folder, rounds_to_accuracy={"50": 9}, stopped_early=True)
    assert len(read_all([folder])[0]) == 1


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("summary.json", True),
        ("accuracy_matrix.csv", True),
        ("rounds.csv", True),
        ("config.yaml", False),
        ("fot.csv", False),
        ("partition.csv", False),
        ("nll_matrix.csv", False),
        ("clients/accuracy_matrix_001.csv", False),
    ],
)
@pytest.mark.parametrize("change", ["digit", "absent"])
def test_what_has_changed_since_the_run_ended_is_not_compared(
    name: str, refused: bool, change: str, tmp_path: Path
) -> None:
    """A file that changed since the run ended is left out by name, also if only a digit changed."""
    folder = make_run(tmp_path / "run", personal=2, nll=True)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    write_checksums(folder, names, {})
    assert read_all([folder])[1:] == ([], [])
    whole = (folder / name).read_text()
    if change == "absent":
        (folder / name).unlink()
    else:
        place = re.search(r"\d(?=\D*$)", whole)
        assert place is not None
        (folder / name).write_text(whole[: place.start()] + str((int(place[0]) + 1) % 10) + whole[place.end() :])
    readings, left_out, warnings = read_all([folder])
    assert len(readings) == (not refused)
    if change == "absent" and name == "summary.json":
        assert left_out[0].unfinished
        return
    said = "changed since the run ended" if change == "digit" else "no such file"
    (told,) = warnings or [left_out[0].reason]
    assert f"{folder / name}: {said}" in told


def test_broken_and_unfinished_runs_are_left_out_by_name(tmp_path: Path) -> None:
    good, corrupt, lacking, going = (make_run(tmp_path / name) for name in ("good", "corrupt", "lacking", "going"))
    (corrupt / "accuracy_matrix.csv").write_text("after_task,task_0\n0,abc\n")
    summary = json.loads((lacking / "summary.json").read_text())
    (lacking / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k not in ("acc", "seed")}))
    (going / "summary.json").unlink()
    lines = (going / "rounds.csv").read_text().splitlines()
    (going / "rounds.csv").write_text("\n".join(lines[:8]) + "\n")
    matrix = (going / "accuracy_matrix.csv").read_text().splitlines()
    (going / "accuracy_matrix.csv").write_text("\n".join([*matrix[:3], "1,,,", "2,,,"]) + "\n")
    readings, left_out, warnings = read_all([corrupt, lacking, going, good])
    assert [reading.run.folder for reading in readings] == [good]
    assert warnings == []
    assert [(one.folder, one.unfinished) for one in left_out] == [(corrupt, False), (lacking, False), (going, True)]
    assert "accuracy_matrix.csv, line 2: 'abc' is neither" in left_out[0].reason
    assert left_out[1].reason.endswith("summary.json: missing seed, acc")
    assert left_out[2].reason == "not finished: 7 rounds done, 1 of 3 tasks evaluated"


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_an_unfinished_run_of_any_measure_has_its_evaluated_tasks_counted(measure: Measure, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    matrix = (folder / "accuracy_matrix.csv").read_text().splitlines()
    (folder / "accuracy_matrix.csv").unlink()
    (folder / matrix_file(measure.name)).write_text("\n".join([*matrix[:4], "2,,,"]) + "\n")
    _, (left_out,), _ = read_all([folder])
    assert left_out.reason.endswith(" rounds done, 2 of 3 tasks evaluated")


def test_a_run_that_died_in_its_first_round_is_named(tmp_path: Path) -> None:
    """A run that died in its first round is listed as unfinished, although it has no table of rounds."""
    good, dead = make_run(tmp_path / "good"), tmp_path / "dead"
    assert tiny_cli.fit(dead, "--model.optimizer.lr", "1e30") == 2
    assert not (dead / "rounds.csv").exists()
    folders, nothing = find_runs([tmp_path])
    assert (folders, nothing) == ([dead, good], [])
    _, left_out, _ = read_all(folders)
    assert [(one.folder, one.reason, one.unfinished) for one in left_out] == [
        (dead, "not finished: 0 rounds done, no task yet", True)
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [("partition.csv", "its partition is not compared"), ("samples.png", "its samples are not shown")],
)
def test_a_file_that_cannot_be_read_is_its_own_runs_loss(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, damaged = make_run(tmp_path / "good"), make_run(tmp_path / "damaged")
    (damaged / name).touch()
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == damaged / name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    readings, left_out, warnings = read_all([good, damaged])
    assert [one.run.folder for one in readings] == [good, damaged]
    assert left_out == []
    (warning,) = warnings
    assert str(damaged / name) in warning
    assert said in warning


def test_a_run_whose_figures_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose file fails while it is read is left out with the reason."""
    good, damaged = make_run(tmp_path / "good"), make_run(tmp_path / "damaged")
    read_run = reading.read_run

    def failing(folder: Path) -> Run:
        if folder == damaged:
            raise OSError(errno.EIO, "Input/output error", str(folder / "summary.json"))
        return read_run(folder)

    monkeypatch.setattr(reading, "read_run", failing)
    readings, left_out, _ = read_all([damaged, good])
    assert [one.run.folder for one in readings] == [good]
    assert [one.folder for one in left_out] == [damaged]
    assert "Input/output error" in left_out[0].reason


def test_a_table_without_space_has_none(tmp_path: Path) -> None:
    (tmp_path / "ewc.csv").write_text("task,penalty\n0,1.5\n")
    assert read_space(tmp_path / "ewc.csv", 3) == {}


def test_a_partition_is_read_back_with_absent_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "partition.csv"
    path.write_text(
        "task,client,samples,classes,class_00,class_01,hash\r\n"
        "0,0,5,1,5,0,aa\r\n0,2,3,2,1,2,bb\r\n1,1,4,1,0,4,cc\r\n2,0,1,1,1,0,dd\r\n"
    )
    found = read_partition(path)
    assert (list(found.tasks), found.total_clients, found.total_tasks) == ([0, 1, 2], 3, 3)
    assert found.counts.tolist() == [
        [[5, -1, 1], [0, -1, 2]],
        [[-1, 0, -1], [-1, 4, -1]],
        [[1, -1, -1], [0, -1, -1]],
    ]
    with monkeypatch.context() as few:
        few.setattr(partition_file, "MOST_TASKS", 2)
        few.setattr(partition_file, "MOST_CLIENTS", 1)
        read: list[str] = []
        few.setattr(partition_file, "index_in", lambda text, what, *where: read.append(what) or int(text))
        cut = read_partition(path)
    assert (list(cut.tasks), cut.total_clients, cut.total_tasks) == ([0, 2], 3, 3)
    assert cut.counts.tolist() == [[[5], [0]], [[1], [0]]]
    assert read.count("number of samples") == 4, "only the numbers that are shown"
    for text, said in [
        ("a,b\n", "the first line must be"),
        ("task,client,class_00\n0,0,x\n", "line 2: 'x' is no number of samples"),
    ]:
        path.write_text(text)
        with pytest.raises(RunFolderError, match=said):
            read_partition(path)


def test_a_density_run_has_likelihoods_instead_of_accuracies(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", personal=2, nll=True, scenario="density")
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("acc", "fgt", "fgt_max", "bwt", "fwt"):
        del summary[key]
    (folder / "accuracy_matrix.csv").unlink()
    for path in (folder / "clients").iterdir():
        path.rename(path.with_name(path.name.replace("accuracy", "nll")))
    (folder / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if k != "nll"}))
    with pytest.raises(RunFolderError, match="missing acc"):
        read(folder, [])
    nll = read_matrix_csv(folder / "nll_matrix.csv")[0][-1].mean().item()
    (folder / "summary.json").write_text(json.dumps(summary | {"nll": nll, "base_nll": 1.25}))
    warnings: list[str] = []
    reading = read(folder, warnings)
    assert warnings == []
    assert (reading.run.measure, reading.run.acc, reading.run.fgt) == ("nll", None, None)
    assert set(reading.matrices) == {"nll"}
    assert len(reading.clients) == 2
    (table,) = compare([reading])
    figures = figures_of(table)
    assert [figure.key for figure in figures][:2] == ["nll", "base_nll"]
    assert figure_of(reading, "base_nll") == 1.25
    data = page_data([(table, None)])
    assert [measure["key"] for measure in data["measures"]] == ["nll"]
    shown = data["tables"][0]["rows"][0]["measures"]["nll"]["matrix"]
    np.testing.assert_allclose(shown, reading.matrices["nll"], rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_table_has_rows_of_all_tasks_or_of_all_but_the_last(rows: int, tmp_path: Path) -> None:
    path = tmp_path / "fot.csv"
    path.write_text("task,layer,used_space\n" + "".join(f"{task},a,{10 * task}\n" for task in range(rows)))
    if rows in (2, 3):
        assert read_space(path, 3) == {"a": {task: 10.0 * task for task in range(rows)}}
    else:
        with pytest.raises(RunFolderError, match=f"a has {rows} rows, of 2 tasks"):
            read_space(path, 3)
        assert len(read_space(path, None)["a"]) == rows, "of a run that stopped early"
