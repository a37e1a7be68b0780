from __future__ import annotations

import copy
import csv
import io
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from cfl import comparison
from cfl.comparison import (
    SUMMARY_KEYS,
    TABLE_WIDTH,
    Run,
    RunFolderError,
    comparability_notes,
    comparison_markdown,
    comparison_table,
    main,
    matrix_table,
    print_table,
    read_curve,
    read_matrix_csv,
    read_run,
    rounds_to,
    run_labels,
    write_comparison,
    write_matrix_csv,
)
from cfl.figures import cell_colours
from cfl.metrics import FORMULAS, average_accuracy

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


def matrix(tasks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 100 * torch.rand(tasks, tasks, generator=generator, dtype=torch.float64)


def run_folder(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    summary = SUMMARY | changes
    (folder / "summary.json").write_text(json.dumps(summary))
    write_matrix_csv(folder / "accuracy_matrix.csv", matrix(summary["tasks"], seed=summary["seed"]))
    return folder


def runs_of(tmp_path: Path, *changes: dict[str, Any]) -> list[Run]:
    return [read_run(run_folder(tmp_path / f"run{k}", **change)) for k, change in enumerate(changes)]


def printed(table: Any) -> list[str]:
    file = io.StringIO()
    print_table(table, file)
    return file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_a_matrix_survives_the_file_to_the_last_bit(tmp_path: Path, tasks: int) -> None:
    a, b = matrix(tasks, 1), matrix(tasks, 2)[0]
    a[0, 0] = 100.0 / 3.0
    if tasks > 1:
        a[1, 0], a[0, 1], b[1] = 5e-324, NAN, NAN
    path = tmp_path / "accuracy_matrix.csv"
    for initial in (b, None, torch.full((tasks,), NAN, dtype=torch.float64)):
        write_matrix_csv(path, a, initial)
        read, read_initial = read_matrix_csv(path)
        torch.testing.assert_close(read, a, rtol=0, atol=0, equal_nan=True)
        if initial is None:
            assert read_initial is None
        else:
            assert read_initial is not None
            torch.testing.assert_close(read_initial, initial, rtol=0, atol=0, equal_nan=True)


def test_the_file_looks_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_matrix_csv(path, torch.tensor([[90.0, 10.5], [NAN, NAN]]), torch.tensor([10.0, NAN]))
    assert path.read_bytes() == b"after_task,task_0,task_1\ninit,10.0,\n0,90.0,10.5\n1,,\n"


def test_rows_may_be_absent_and_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("after_task,task_0,task_1,task_2\r\n2,7,8,9\r\n\r\n0,1,,3\r\ninit,4,5,6\r\n")
    a, b = read_matrix_csv(path)
    expected = torch.tensor([[1, NAN, 3], [NAN, NAN, NAN], [7, 8, 9]], dtype=torch.float64)
    torch.testing.assert_close(a, expected, rtol=0, atol=0, equal_nan=True)
    assert b is not None
    assert b.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line must be after_task"),
        ("after_task\n", "the first line must be"),
        ("after_task,task_1,task_0\n", "the first line must be"),
        ("after_task,task_0\n1,5\n", "line 2: row '1' cannot be; valid: init, 0 .. 0"),
        ("after_task,task_0\n0,5\n\n0,6\n", "line 4: row '0' appears twice"),
        ("after_task,task_0,task_1\n0,5\n", "line 2: 1 values instead of 2"),
        ("after_task,task_0\n0,5,6\n", "line 2: 2 values instead of 1"),
        ("after_task,task_0\n0,good\n", "line 2: 'good' is neither"),
        ("after_task,task_0\n0,inf\n", "line 2: 'inf' is neither"),
        ("after_task,task_0\n0,nan\n", "line 2: 'nan' is neither"),
        ("after_task,task_0\n0,\xff\n", "not a CSV file"),
    ],
)
def test_a_broken_matrix_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "accuracy_matrix.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunFolderError) as error:
        read_matrix_csv(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_matrix_is_not_written(tmp_path: Path) -> None:
    for a, b in [(torch.zeros(2, 3), None), (torch.zeros(2, 2), torch.zeros(3)), (torch.zeros(0, 0), None)]:
        with pytest.raises(ValueError, match="are needed"):
            write_matrix_csv(tmp_path / "m.csv", a, b)
    with pytest.raises(ValueError, match="infinite"):
        write_matrix_csv(tmp_path / "m.csv", torch.full((1, 1), math.inf))
    assert not (tmp_path / "m.csv").exists()


def test_a_run_is_read_as_written(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "a", used_space=53.97, something_else=[1, 2]))
    assert {key: getattr(run, key) for key in SUMMARY} == SUMMARY
    assert run.used_space == 53.97
    assert torch.equal(run.matrix, matrix(3))
    assert run.initial is None
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
        (json.dumps(SUMMARY).replace("81.25", "1e999"), "acc = Infinity cannot be; valid: a number or null"),
        (json.dumps(SUMMARY | {"acc": "81"}), 'acc = "81" cannot be; valid: a number or null'),
        (json.dumps(SUMMARY | {"acc": True}), "acc = true cannot be"),
        (json.dumps(SUMMARY | {"method": None}), "method = null cannot be; valid: text"),
        (json.dumps(SUMMARY | {"uplink_bytes": 1.5}), "uplink_bytes = 1.5 cannot be; valid: an integer"),
        (json.dumps(SUMMARY | {"seconds": None}), "seconds = null cannot be; valid: a number"),
        (json.dumps(SUMMARY | {"used_space": "all"}), 'used_space = "all" cannot be; valid: a number or null'),
        (
            json.dumps(SUMMARY | {"rounds_to_accuracy": {"85": 1.5}}),
            'rounds_to_accuracy = {"85": 1.5} cannot be',
        ),
        (json.dumps(SUMMARY | {"rounds_to_accuracy": {"high": 1}}), 'rounds_to_accuracy = {"high": 1} cannot be'),
        (json.dumps(SUMMARY | {"rounds_to_accuracy": [85]}), "rounds_to_accuracy = [85] cannot be"),
        (json.dumps(SUMMARY | {"stopped_early": 1}), "stopped_early = 1 cannot be; valid: true or false"),
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
    assert read_curve(rounds_csv(tmp_path, curve)) == curve
    assert read_curve(tmp_path / "nowhere.csv") == []
    (tmp_path / "rounds.csv").write_text("round,clients\n0,3\n1,3\n")
    assert read_curve(tmp_path / "rounds.csv") == []
    (tmp_path / "rounds.csv").write_text("round,acc\n0,1.0\n3,2.0\n")  # rounds that are nowhere have no accuracy
    assert read_curve(tmp_path / "rounds.csv") == [1.0, None, None, 2.0]
    (tmp_path / "rounds.csv").write_text("")
    assert read_curve(tmp_path / "rounds.csv") == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1.0\n1,good\n", "line 3: 'good' is neither a finite number nor empty"),
        ("0,inf\n", "line 2: 'inf' is neither"),
        ("first,1.0\n", "line 2: 'first' is no round"),
        (",1.0\n", "line 2: '' is no round"),
    ],
)
def test_a_broken_table_of_rounds_is_named_with_its_line(tmp_path: Path, rows: str, message: str) -> None:
    path = run_folder(tmp_path / "run") / "rounds.csv"
    path.write_text("round,acc\n" + rows)
    with pytest.raises(RunFolderError) as error:
        read_run(path.parent)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_rounds_to_an_accuracy() -> None:
    curve = [None, 70.0, None, 90.0, 85.0, None, 95.5]
    assert [rounds_to(curve, a) for a in (1, 70, 70.5, 85, 90, 90.5, 95.5, 95.6)] == [2, 2, 4, 4, 4, 7, 7, None]
    assert rounds_to([], 1) is None
    # A mean of 90 that misses by a rounding error is 90; one that misses by an answer in ten million is not.
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


def test_the_table_converts_rounds_and_marks_what_is_undefined(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"used_space": 53.966}, {"method": "fedavg", "fgt": 16.724, "bwt": -16.724, "fwt": 3})
    lines = printed(comparison_table(runs))
    heading, first, second = [cells(line) for line in lines if line[0] in "┃│"]
    assert heading == (
        ["method", "ACC %", "FGT %", "BWT", "FWT", "uplink MB", "downlink MB", "seconds", "used input space %"]
    )
    assert first == ["fot", "81.25", "0.00", "+0.00", "-", "1,234.57", "0.00", "12.3", "53.97"]
    assert second == ["fedavg", "81.25", "16.72", "-16.72", "+3.00", "1,234.57", "0.00", "12.3", "-"]
    assert "MB = 1e6 bytes" in " ".join(lines)


@pytest.mark.parametrize("length", [5, 60, 300])
def test_a_piped_table_is_wide_enough_for_any_name(tmp_path: Path, monkeypatch: Any, length: int) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "[b]" + "m" * length
    lines = printed(comparison_table(runs_of(tmp_path, {"method": name}, {"method": "fot"})))
    assert sum(name in line for line in lines) == 1
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) >= 99  # all columns at their natural width
    if length == 5:
        assert max(map(len, lines)) <= TABLE_WIDTH


def test_runs_that_cannot_be_compared_directly_are_noted_above(tmp_path: Path) -> None:
    assert comparability_notes(runs_of(tmp_path / "same", {}, {"method": "er", "seed": 5})) == []
    runs = runs_of(tmp_path, {}, {"benchmark": "permuted_mnist", "tasks": 10}, {"benchmark": "permuted_mnist"})
    notes = comparability_notes(runs)
    assert notes == [
        "NOTE: different benchmarks are compared: digits, permuted_mnist",
        "NOTE: different numbers of tasks are compared: 3, 10",
    ]
    lines = printed(comparison_table(runs))
    assert [line.strip() for line in lines[:2]] == notes
    assert f"> {notes[0]}" in comparison_markdown(runs)


def test_labels_say_what_differs_and_are_never_alike(tmp_path: Path) -> None:
    assert run_labels(runs_of(tmp_path / "a", {}, {"method": "er"})) == ["fot", "er"]
    runs = runs_of(tmp_path / "b", {}, {"seed": 1}, {"method": "er", "partition": "iid"})
    assert run_labels(runs) == ["fot (shards, seed 0)", "fot (shards, seed 1)", "er (iid, seed 0)"]
    assert run_labels(runs_of(tmp_path / "c", {}, {"clients": 5}, {"rounds": 7})) == [
        "fot (50 rounds, 10 clients)",
        "fot (50 rounds, 5 clients)",
        "fot (7 rounds, 10 clients)",
    ]
    # the same settings in every listed respect: the folder tells them apart, or its path if the name does not
    one, other = (read_run(run_folder(tmp_path / side / "run")) for side in ("left", "right"))
    third = read_run(run_folder(tmp_path / "left" / "third"))
    assert run_labels([one, third]) == ["fot [run]", "fot [third]"]
    assert run_labels([one, other, third]) == [f"fot [{one.folder}]", f"fot [{other.folder}]", "fot [third]"]


def test_the_markdown_table_has_the_cells_of_the_printed_one(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"method": "fot"}, {"method": "er"})
    text = comparison_markdown(runs, ["accuracy_curve.png"])
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    shown = [cells(line) for line in printed(comparison_table(runs)) if line[0] in "┃│"]
    assert [rows[0], *rows[2:]] == shown
    assert {len(row) for row in rows} == {9}
    assert all(formula in text for formula in FORMULAS.values())
    assert "![accuracy curve](accuracy_curve.png)" in text
    piped = comparison_markdown([read_run(run_folder(tmp_path / "pipe", method="a|b"))])
    assert "| a\\|b |" in piped


def test_files_are_written_and_the_csv_is_exact(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {"acc": 100 / 3, "used_space": 50.5}, {"method": "er", "fwt": -0.1})
    write_comparison(runs, tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    names = ["accuracy_curve.png", "accuracy_heatmaps.png", "comparison.csv", "comparison.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names[:2]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (out / "comparison.md").read_text()
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["fot", "er"]
    for row, run in zip(rows, runs, strict=True):
        for key in (*SUMMARY_KEYS, "used_space"):
            value = getattr(run, key)
            assert row[key] == ("" if value is None else str(value))
        assert row["folder"] == str(run.folder)
    assert float(rows[0]["acc"]) == 100 / 3
    with pytest.raises(ValueError, match="no run"):
        write_comparison([], out)


def test_rounds_to_accuracy_are_compared_where_runs_have_targets(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", rounds=4, rounds_to_accuracy={"90": 4, "85": 2}, stopped_early=True)
    two = run_folder(tmp_path / "two", method="er", rounds=6, rounds_to_accuracy={"85": 5, "95": None})
    three = run_folder(tmp_path / "three", method="ewc", rounds=6)
    rounds_csv(one, [80.0, 85.0, 86.0, 91.0])
    rounds_csv(two, [10.0, 20.0, 30.0, 40.0, 85.0, 90.0])
    runs = [read_run(folder) for folder in (one, two, three)]
    lines = [cells(line) for line in printed(comparison_table(runs)) if line[0] in "┃│"]
    assert [line[9:] for line in lines] == [
        ["rounds to 85 %", "rounds to 90 %", "rounds to 95 %"],
        ["2", "4", "> 4"],
        ["5", "6", "> 6"],  # also where the run itself was not asked for it
        ["-", "-", "-"],
    ]
    markdown = comparison_markdown(runs)
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in markdown.splitlines() if line.startswith("|")]
    assert [rows[0], *rows[2:]] == lines
    write_comparison(runs, tmp_path / "out")
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [[row[f"rounds_to_{name}"] for name in ("85", "90", "95")] for row in table] == [
        ["2", "4", ""],
        ["5", "6", ""],
        ["", "", ""],
    ]
    assert [row["folder"] for row in table] == [str(run.folder) for run in runs]


def test_rounds_of_a_stopped_run_are_no_setting(tmp_path: Path) -> None:
    stopped = [{"rounds": 4, "stopped_early": True}, {"rounds": 7, "method": "er", "stopped_early": True}]
    assert comparability_notes(runs_of(tmp_path / "a", *stopped)) == []
    assert run_labels(runs_of(tmp_path / "b", *stopped, {"method": "ewc"})) == ["fot", "er", "ewc"]
    runs = runs_of(tmp_path / "c", {"rounds": 60}, *stopped, {"method": "ewc"})
    assert comparability_notes(runs) == ["NOTE: different numbers of rounds are compared: 60, 50"]
    assert run_labels(runs) == ["fot (60 rounds)", "fot", "er", "ewc (50 rounds)"]


def test_learning_curves_are_drawn_of_runs_that_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[dict[str, Any], list[float]]] = []
    draw = comparison.learning_curves
    monkeypatch.setattr(comparison, "learning_curves", lambda *a: drawn.append(copy.deepcopy(a)) or draw(*a))
    out = tmp_path / "out"
    one = run_folder(tmp_path / "one", rounds_to_accuracy={"90": None})
    rounds_csv(one, [None, 80.0, None])
    two = run_folder(tmp_path / "two", method="er")
    rounds_csv(two, [1.0, 2.0, 3.0, 4.0], 3)  # three tasks, four evaluations
    three = run_folder(tmp_path / "three", method="ewc")
    rounds_csv(three, [1.0, None, 3.0, 4.0], 3)  # one for each task
    write_comparison([read_run(folder) for folder in (one, two, three)], out)
    assert drawn == [({"fot": [None, 80.0, None], "er": [1.0, 2.0, 3.0, 4.0]}, [90.0])]
    assert (out / "accuracy_rounds.png").read_bytes().startswith(b"\x89PNG")
    assert "](accuracy_rounds.png)" in (out / "comparison.md").read_text()
    write_comparison([read_run(three)], out)
    assert not (out / "accuracy_rounds.png").exists(), "of another comparison"


def test_the_command_prints_writes_and_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", method="er")]
    out = tmp_path / "out"
    assert main([*map(str, folders), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == str(out)
    assert "81.25" in captured.out
    assert captured.err == ""
    assert len(list(out.iterdir())) == 4

    before = sorted(tmp_path.rglob("*"))
    assert main([str(folders[0])]) == 0  # without --out nothing is written
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_fails_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    (bad / "summary.json").write_text("not\njson")
    (tmp_path / "file").write_text("")
    for arguments, message in [
        ([good, tmp_path / "c"], f"{tmp_path / 'c'}: no such folder"),
        ([good, bad], f"{bad / 'summary.json'}: not valid JSON"),
        ([good, tmp_path / "b" / ".." / "a"], "given twice"),
        ([good, "--out", tmp_path / "file"], str(tmp_path / "file")),
    ]:
        assert main([str(argument) for argument in arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert message in lines[0]


def test_help_explains_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(formula in text for formula in FORMULAS.values())


@pytest.mark.filterwarnings("ignore:'cfl.comparison' found in sys.modules:RuntimeWarning")
def test_the_module_runs_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["comparison.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("cfl.comparison", run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"error: {tmp_path / 'none'}: no such folder\n")


def test_the_matrix_table_shows_every_accuracy_and_the_average() -> None:
    a = matrix(4)
    a[3] = NAN
    a[0, 2] = NAN
    lines = printed(matrix_table(a))
    rows = [cells(line) for line in lines if line[0] == "│"]
    for t, row in enumerate(rows):
        average = "" if t == 3 else f"{average_accuracy(a, after=t).item():.2f}"
        assert row == [str(t), *("" if math.isnan(x) else f"{x:.1f}" for x in a[t].tolist()), average]
    assert len(rows) == 4


def test_the_matrix_table_of_many_tasks_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    a = matrix(50)
    rows = [cells(line) for line in printed(matrix_table(a)) if line[0] == "│"]
    assert [row[1:-1] for row in rows] == [[f"{x:.0f}" for x in row.tolist()] for row in a]


def test_the_matrix_table_is_coloured_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=80)
    console.print(matrix_table(torch.tensor([[90.0, 10.0], [20.0, 80.0]])))
    for value, seen in [(90.0, True), (10.0, False), (20.0, True), (80.0, True)]:
        background, ink = (tuple(int(colour[k : k + 2], 16) for k in (1, 3, 5)) for colour in cell_colours(value, seen))
        escape = "\x1b[38;2;{};{};{};48;2;{};{};{}m{:.1f}".format(*ink, *background, value)
        assert escape in file.getvalue()


def test_what_is_no_matrix_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 3\]"):
        matrix_table(torch.zeros(2, 3, 3))
