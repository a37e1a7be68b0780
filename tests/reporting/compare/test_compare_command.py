"""The command ``cfl compare``: printed tables, written files, runs that are left out, options that are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.made_up import make_density_run, make_run

import cfl.reporting.compare.pictures as cfl_pictures
from cfl.__main__ import main as cfl
from cfl.reporting.compare.command import main

FILES = ["comparison.md", "comparison.tex", "differences.csv", "means.csv", "report.html", "runs.csv"]
PICTURES = ["accuracy_curve.png", "accuracy_heatmaps.png"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two methods, two seeds."""
    for method in ("fot", "fedavg"):
        for seed in (0, 1):
            make_run(tmp_path / "runs" / f"{method}{seed}", method, seed)
    return tmp_path / "runs"


def test_pictures_need_a_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--pictures"]) == 2
    assert capsys.readouterr().err == "error: --pictures = 'png' cannot work; valid: --out FOLDER beside it\n"


def test_it_prints_and_writes_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(runs.parent.rglob("*"))
    assert cfl(["compare", str(runs)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert sum("│ FedAvg │" in line for line in lines) == 1, "means"
    assert sum("│ FOT " in line for line in lines) == 2, "means and differences"
    assert "difference to FedAvg on common seeds" in " ".join(lines)
    assert captured.err == ""
    assert sorted(runs.parent.rglob("*")) == before


def test_a_report_is_a_folder_of_files(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs.parent / "new" / "report"
    assert main([str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "report.html")
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert all(path.stat().st_size > 50 for path in out.iterdir())


def test_pictures_are_drawn_where_asked_for(runs: Path) -> None:
    out = runs.parent / "out"
    make_run(runs / "other", benchmark="pmnist", evaluate_every=1)
    assert main([str(runs), "--out", str(out), "--pictures"]) == 0
    second = ["accuracy_curve_2.png", "accuracy_heatmaps_2.png", "accuracy_rounds_2.png"]
    assert {path.name for path in out.iterdir()} == {*FILES, *PICTURES, *second}
    for name in (*PICTURES, *second):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (out / "comparison.md").read_text()
    assert main([str(runs / "fot0"), "--out", str(out), "--pictures"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *PICTURES}, "of another comparison"
    assert main([str(runs / "fot0"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == set(FILES), "of one with pictures"


def test_another_comparison_in_the_folder_may_remove_a_former_picture(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps may end in one folder at once."""
    out, unlink = runs.parent / "out", Path.unlink
    out.mkdir()
    (out / "accuracy_curve.png").write_bytes(b"of a former comparison")

    def second(path: Path, missing_ok: bool = False) -> None:
        os.unlink(path)  # by the other process
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", second)
    assert main([str(runs), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == set(FILES)


def test_pictures_have_the_formats_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs.parent / "out"
    assert main([str(runs), "--out", str(out), "--pictures", "pdf,svg"]) == 0
    kinds = {f"accuracy_{kind}" for kind in ("curve", "heatmaps")}
    files = {f"{kind}.{ending}" for kind in kinds for ending in ("pdf", "svg")}
    assert {path.name for path in out.iterdir()} == {*FILES, *files}
    assert "![accuracy curve](accuracy_curve.svg)" in (out / "comparison.md").read_text()
    assert main([str(runs), "--out", str(out), "--pictures", "pdf"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *(f"{kind}.pdf" for kind in kinds)}, "no former ones"
    assert "\n[accuracy curve](accuracy_curve.pdf)" in (out / "comparison.md").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(out), "--pictures", str(runs)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"--pictures: '{runs}' cannot work; valid: some of png, pdf, svg, with commas between them" in said


def test_pictures_show_what_runs_measure(runs: Path) -> None:
    """Pictures of density runs show likelihoods. In a table with both kinds of runs, each kind has its own pictures."""
    out, kinds = runs.parent / "out", ("curve", "heatmaps", "rounds")
    density = make_density_run(runs.parent / "density", evaluate_every=1)
    assert main([str(density), "--out", str(out), "--pictures"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *(f"nll_{kind}.png" for kind in kinds)}
    assert main([str(density), str(runs), "--group-by", "method", "--out", str(out), "--pictures"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *PICTURES, *(f"nll_{kind}.png" for kind in kinds)}
    assert main([str(runs), "--out", str(out), "--pictures"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *PICTURES}


def test_accuracies_are_drawn_as_without_densities_beside_them(
    runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[dict[str, Any]] = []
    keep = cfl_pictures.accuracy_heatmaps
    monkeypatch.setattr(
        cfl_pictures, "accuracy_heatmaps", lambda shown, **options: drawn.append(dict(shown)) or keep(shown, **options)
    )
    make_density_run(tmp_path / "density")
    for paths in ([runs], [runs, tmp_path / "density"]):
        assert main([*map(str, paths), "--group-by", "method", "--out", str(tmp_path / "o"), "--pictures"]) == 0
    alone, beside, densities = drawn
    assert set(alone) == set(beside) == {"FedAvg", "FOT"}
    assert all(bool((alone[name] == beside[name]).all()) for name in alone)
    assert set(densities) == {"FedWeIT"}


def test_pictures_of_others_stay(runs: Path) -> None:
    out, others = runs.parent / "out", ("accuracy_matrix.png", "accuracy_curve_of_mine.png", "accuracy_rounds.png.png")
    out.mkdir()
    for name in (*others, "accuracy_curve_12.png"):
        (out / name).write_text(name)
    assert main([str(runs), "--out", str(out), "--pictures"]) == 0
    assert {path.name for path in out.iterdir()} == {*FILES, *PICTURES, *others}


@pytest.mark.parametrize("finished", [True, False])
def test_a_runs_folder_is_not_written_into(finished: bool, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs / "fot0"
    (out / "accuracy_curve.png").write_text("the run's own")
    if not finished:
        (out / "summary.json").unlink()
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main([str(runs), "--out", str(out), "--pictures"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: --out = '{out}' cannot work; valid: a folder of the comparison's own, ")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_what_cannot_be_compared_is_named_and_the_rest_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt, going = make_run(runs / "x_corrupt", "er"), make_run(runs / "y_going", "er")
    (corrupt / "summary.json").write_text("not\njson")
    (going / "summary.json").unlink()
    (runs / "fot1" / "config.yaml").write_text("a: [")
    assert main([str(runs), str(runs.parent / "nowhere"), "--out", str(runs.parent / "out")]) == 0
    captured = capsys.readouterr()
    assert "FedAvg" in captured.out
    lines = captured.err.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["warning"] * 4
    for folder, reason in [
        (runs.parent / "nowhere", "no such folder; not compared"),
        (corrupt / "summary.json", "not valid JSON"),
        (going, "not finished: 12 rounds done, 3 of 3 tasks evaluated; not compared"),
        (runs / "fot1" / "config.yaml", "its settings are not compared"),
    ]:
        assert sum(str(folder) in line and reason in line for line in lines) == 1, folder
    page = (runs.parent / "out" / "report.html").read_text()
    assert "not finished: 12 rounds done" in page
    assert "not finished: 12 rounds done" in (runs.parent / "out" / "comparison.md").read_text()


def test_a_folder_may_have_a_name_in_another_encoding(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(os.fsencode(runs) + b"/b\xff"))
    shutil.copytree(runs / "fot0", odd)
    make_run(odd.with_name(f"{odd.name}2"), "er", seed=5)
    assert main([str(runs), "--out", str(runs.parent / "out")]) == 0
    page, table = (runs.parent / "out" / name for name in ("report.html", "runs.csv"))
    assert "b\\udcff2" in page.read_text()
    assert "b\\udcff2" in table.read_text()


def test_only_the_columns_that_are_shown_are_explained(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mean accuracy" in out
    assert "NLL" not in out


def test_it_fails_with_one_line_where_nothing_can_be_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs.parent / "file").write_text("")
    for arguments, said in [
        ([runs.parent / "nowhere"], "there is no finished run to compare"),
        ([runs, "--baseline", "gpm"], "--baseline = 'gpm' cannot work; valid: one of fedavg, FedAvg, fot, FOT"),
        (
            [runs, "--group-by", "run.dir"],
            "--group-by = 'run.dir' cannot work; valid: benchmark, partition, scenario, method, participation, tasks, "
            "clients, rounds, or a dotted key of a run's configuration that decides its results",
        ),
        ([runs, "--group-by", "methods.fot.threshhold"], "--group-by = 'methods.fot.threshhold' cannot work; valid: "),
        (
            [runs, "--out", runs.parent / "file"],
            "file' cannot work; valid: a folder that can be written (file exists)",
        ),
    ]:
        assert main([str(argument) for argument in arguments]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert said in errors[0]


@pytest.mark.parametrize("columns", ["", " , "])
def test_no_columns_are_not_the_usual_ones(columns: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(runs), "--out", str(runs.parent / "out"), "--columns", columns])
    assert stop.value.code == 2
    assert f"--columns: {columns!r} cannot work; valid: at least one column" in capsys.readouterr().err


def test_the_baseline_and_the_groups_can_be_chosen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs), "--baseline", "fot", "--group-by", "benchmark, method"]) == 0
    out = capsys.readouterr().out
    assert "digits: difference to FOT on common seeds" in " ".join(out.split())


def test_help_explains_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cfl(["compare", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in ("usage: cfl compare", "--group-by", "methods.fot.threshold", "FGT: mean loss of accuracy since"):
        assert said in text


def test_a_comparison_imports_nothing_that_trains(runs: Path) -> None:
    heavy = (
        "lightning",
        "torchmetrics",
        "torchvision",
        "matplotlib",
        "wandb",
        "cfl.cli.main",
        "cfl.methods",
        "cfl.callbacks",
    )
    program = (
        "import json, sys; from cfl.__main__ import main; status = main(sys.argv[1:]); "
        f"print(json.dumps([status, [name for name in {heavy!r} if name in sys.modules]]))"
    )
    command = [sys.executable, "-c", program, "compare", str(runs), "--out", str(runs.parent / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_the_help_of_cfl_mentions_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cfl(["--help"]) == 0
    assert "  compare " in capsys.readouterr().out
