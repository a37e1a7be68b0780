"""Tables as text, Markdown, LaTeX, CSV and in the terminal."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from support import tiny_cli
from support.made_up import make_density_run, readings

from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.reading import LeftOut, read
from cfl.reporting.compare.rows import Comparison, Row
from cfl.reporting.compare.tables import differences_table, means_table, rounds_text
from cfl.reporting.compare.writing import (
    markdown_report,
    write_differences_csv,
    write_means_csv,
    write_runs_csv,
)
from cfl.reporting.measures import FIGURES
from cfl.reporting.method_names import printed
from cfl.reporting.summary_file import SUMMARY_KEYS
from cfl.reporting.text_table import TABLE_WIDTH, TextTable, print_table

ACCURACIES = {"fedavg": [70.0, 72.0, 80.0], "fot": [80.0, 81.5, 85.0]}


@pytest.fixture
def table(tmp_path: Path) -> Comparison:
    """A table of two methods with three seeds."""
    return comparison(
        tmp_path,
        *(
            {"method": method, "seed": seed, "acc": acc, "fgt": None, "seconds": 1000.0 + seed}
            for method, values in ACCURACIES.items()
            for seed, acc in enumerate(values)
        ),
    )


def comparison(folder: Path, *runs: dict[str, Any]) -> Comparison:
    (found,) = compare(readings(folder, *runs))
    return found


def cells_of(text: TextTable) -> list[dict[str, str]]:
    return [dict(zip(text.headings, row, strict=True)) for row in text.rows]


def test_means_and_deviations_stand_in_their_units(table: Comparison) -> None:
    fedavg, fot = cells_of(means_table(table))
    deviation = statistics.stdev(ACCURACIES["fedavg"])
    assert fedavg["method"] == "FedAvg"
    assert fedavg["seeds"] == "3"
    assert fedavg["ACC %"] == f"{222 / 3:.2f} ± {deviation:.2f}" == "74.00 ± 5.29"
    assert fedavg["seconds"] == "1,001.0 ± 1.0"
    assert fedavg["uplink MB"] == "12.00 ± 0.00"
    assert (fedavg["used space %"], fot["used space %"]) == ("-", "40.00 ± 0.00")
    assert (fedavg["rank"], fot["rank"]) == ("2", "1")
    assert "FGT" not in fedavg, "no run has it"


def test_a_single_seed_has_no_deviation_and_no_zero_is_negative(tmp_path: Path) -> None:
    (row,) = cells_of(means_table(comparison(tmp_path, {"acc": 81.254, "fgt": -0.001, "bwt": 0.001, "fwt": None})))
    assert (row["ACC %"], row["FGT"], row["BWT"]) == ("81.25", "0.00", "+0.00")
    assert not {"FWT", "seeds", "rank"} & set(row)


def test_differences_are_paired_with_scipys_interval(table: Comparison) -> None:
    text = differences_table(table, table.rows[0])
    assert text is not None
    (fot,) = cells_of(text)
    low, high = stats.ttest_rel(ACCURACIES["fot"], ACCURACIES["fedavg"]).confidence_interval(0.95)
    assert fot["ACC %"] == f"{24.5 / 3:+.2f} [{low:+.2f}, {high:+.2f}]"
    assert (fot["method"], fot["seeds"]) == ("FOT", "3")
    assert fot["seconds"] == "+0.0 [+0.0, +0.0]"
    assert "used space %" not in fot, "the baseline has none"
    assert "difference to FedAvg on common seeds, 95% confidence interval" in text.title
    assert differences_table(table, None) is None


def test_single_seeds_make_no_table_of_differences(tmp_path: Path) -> None:
    found = comparison(tmp_path, {"method": "fot"}, {"method": "fedavg"})
    assert differences_table(found, found.rows[1]) is None


def test_rounds_to_an_accuracy_say_how_many_seeds_got_there(tmp_path: Path) -> None:
    aims = [{"50": 3, "90": 10}, {"50": 5, "90": None}]
    runs = [{"method": "fot", "seed": seed, "rounds_to_accuracy": aim} for seed, aim in enumerate(aims)]
    other = {"method": "er", "rounds_to_accuracy": {"99": None}, "evaluate_every": 1}
    found = comparison(tmp_path, *runs, other, {"method": "ewc"})
    rows = cells_of(means_table(found))
    heads = ["rounds to 50 %", "rounds to 90 %", "rounds to 99 %"]
    assert [[row[head] for head in heads] for row in rows] == [
        ["4.0 ± 1.4", "10 (1 of 2)", "> 12"],
        ["1", "> 12", "> 12"],  # 50 % from its curve, though the run had no such target
        ["-", "-", "-"],
    ]


def test_a_target_that_no_seed_reached_is_beyond_the_longest_run(tmp_path: Path) -> None:
    runs = [{"seed": n, "rounds": rounds, "rounds_to_accuracy": {"99": None}} for n, rounds in enumerate((9, 12, 6))]
    assert rounds_text(Row("FOT", "fot", readings(tmp_path, *runs)), "99") == "> 12"


def test_a_figure_says_how_many_seeds_have_it_where_not_all(tmp_path: Path) -> None:
    fgts = {"fot": [1.0, 3.0, None], "er": [2.0, 5.0, 6.0], "ewc": [None, None, None]}
    runs = [{"method": m, "seed": s, "fgt": fgt, "bwt": -1.0} for m, of in fgts.items() for s, fgt in enumerate(of)]
    found = comparison(tmp_path, *runs)
    rows = {row["method"]: row for row in cells_of(means_table(found))}
    assert [rows[name]["FGT"] for name in ("FOT", "ER", "EWC")] == ["2.00 ± 1.41 (2 of 3)", "4.33 ± 2.08", "-"]
    assert {row["BWT"] for row in rows.values()} == {"-1.00 ± 0.00"}
    text = differences_table(found, next(row for row in found.rows if row.label == "ER"))
    assert text is not None
    differences = {row["method"]: row for row in cells_of(text)}
    assert differences["FOT"]["FGT"].startswith("-1.50 [")
    assert differences["FOT"]["FGT"].endswith("] (2 of 3)")
    assert differences["FOT"]["BWT"] == "+0.00 [+0.00, +0.00]"
    assert differences["EWC"]["FGT"] == "-"


def test_densities_reach_no_accuracy(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"rounds_to_accuracy": {"0.5": 3}, "evaluate_every": 1})
    density = read(make_density_run(tmp_path / "density", evaluate_every=1), [])
    (found,) = compare([*runs, density], ["method"])
    assert [row["rounds to 0.5 %"] for row in cells_of(means_table(found))] == ["3", "-"]


def test_markdown_has_the_cells_and_escapes_bars(table: Comparison) -> None:
    text = means_table(table)
    lines = [line for line in text.markdown() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [rows[0], *rows[2:]] == [list(text.headings), *map(list, text.rows)]
    assert set(lines[1]) == set("|-:")
    assert lines[1].count("|") == len(text.headings) + 1
    assert "| a\\|b | 1 |" in TextTable(["x", "y"], [["a|b", "1"]]).markdown()
    (shown,) = TextTable(["x", "y"], [["a & b <i> &lt;", "1"]]).markdown()[2:]
    assert shown == "| a & b &lt;i> &amp;lt; | 1 |"  # an ampersand that begins no entity is not escaped
    assert TextTable(["x", "y", "z"], [], "lrl", "t", ["a note"]).markdown() == [
        "## t", "", "> NOTE: a note", "", "| x | y | z |", "|---|---:|---|",
    ]  # fmt: skip


def test_the_report_names_what_is_not_compared(table: Comparison) -> None:
    left = [LeftOut(Path("runs/x"), "not finished: 3 rounds done, no task yet", unfinished=True)]
    report = markdown_report([means_table(table)], [table], left, ["a broken part"], ["accuracy_curve.png"])
    assert "- runs/x: not finished: 3 rounds done" in report
    assert "- a broken part" in report
    assert "![accuracy curve](accuracy_curve.png)" in report
    assert "Not compared" not in markdown_report([means_table(table)], [table], [], [])


@pytest.mark.parametrize("length", [5, 60, 300])
def test_a_piped_table_is_wide_enough_for_any_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "[b]" + "m" * length
    table = TextTable(["method", "[i]ACC"], [[name, "1.0"]], title="title", notes=["a note"])
    print_table(table.terminal("why"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["title", "NOTE: a note"]
    assert sum(name in line for line in lines) == sum("[i]ACC" in line for line in lines) == 1
    assert lines[-1] == "why"
    assert max(map(len, lines)) <= max(TABLE_WIDTH, length + 30)


def test_the_csv_of_runs_is_exact(tmp_path: Path) -> None:
    found = readings(
        tmp_path, {"acc": 100 / 3, "rounds_to_accuracy": {"9": 2}}, {"method": "er", "fwt": -0.1, "fgt": None}
    )
    write_runs_csv(tmp_path / "runs.csv", compare(found))
    rows = tiny_cli.rows(tmp_path / "runs.csv")
    for row, reading in zip(rows, found, strict=True):
        for key in SUMMARY_KEYS:
            value = getattr(reading.run, key)
            assert row[key] == ("" if value is None else str(value)), key
        assert row["folder"] == str(reading.run.folder)
    assert float(rows[0]["acc"]) == 100 / 3
    assert [row["rounds_to_9"] for row in rows] == ["2", ""]
    assert [row["row"] for row in rows] == ["FOT", "ER"]


def test_the_csv_of_runs_has_no_figures_over_all_tasks_of_a_run_that_stopped_before(tmp_path: Path) -> None:
    """As in the tables: its mean is over fewer tasks than the others'."""
    stopped, whole = readings(tmp_path, {"stopped_early": True}, {"seed": 1})
    stopped = replace(stopped, run=replace(stopped.run, begun=2))
    write_runs_csv(tmp_path / "runs.csv", compare([stopped, whole]))
    part, all_of_it = tiny_cli.rows(tmp_path / "runs.csv")
    over_tasks = ("acc", "fgt", "fgt_max", "bwt", "fwt")
    assert [part[key] for key in over_tasks] == [""] * 5
    assert [float(all_of_it[key]) for key in over_tasks] == [getattr(whole.run, key) for key in over_tasks]
    assert part["uplink_bytes"] == str(stopped.run.uplink_bytes)


def test_the_csv_of_means_and_differences_are_scipys(table: Comparison, tmp_path: Path) -> None:
    write_means_csv(tmp_path / "means.csv", [table])
    means = {(row["row"], row["figure"]): row for row in tiny_cli.rows(tmp_path / "means.csv")}
    assert {figure for _, figure in means} <= {figure.key for figure in FIGURES}
    for method, values in ACCURACIES.items():
        row = means[printed(method, {}), "acc"]
        assert float(row["mean"]) == pytest.approx(statistics.fmean(values))
        assert float(row["std"]) == pytest.approx(statistics.stdev(values))
        assert row["shown"] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
        assert (row["seeds"], row["rank"]) == ("3", "1.0" if method == "fot" else "2.0")
    write_differences_csv(tmp_path / "differences.csv", [(table, table.rows[0])])
    (row,) = [row for row in tiny_cli.rows(tmp_path / "differences.csv") if row["figure"] == "acc"]
    low, high = stats.ttest_rel(ACCURACIES["fot"], ACCURACIES["fedavg"]).confidence_interval(0.95)
    assert (row["row"], row["baseline"], row["seeds"]) == ("FOT", "FedAvg", "3")
    assert [float(row[key]) for key in ("difference", "low", "high")] == pytest.approx([24.5 / 3, low, high])
    assert row["shown"] == f"{24.5 / 3:+.2f} [{low:+.2f}, {high:+.2f}]"
    write_differences_csv(tmp_path / "none.csv", [(table, None)])
    assert tiny_cli.rows(tmp_path / "none.csv") == []
