"""Cells of a table: values from runs, statuses, reports."""

from __future__ import annotations

import copy
import csv
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.paper_tables import MATRIX, fot, point, resolver, write_run

from cfl.papers.cells import Cell, Experiments
from cfl.papers.definition import NoTarget
from cfl.papers.published import Published
from cfl.papers.recipes import Rule
from cfl.papers.report import counts, tolerances, write_report
from cfl.papers.results import Results, read_result, read_results
from cfl.reporting.checksums import write_checksums
from cfl.reporting.compare.reading import find_runs
from cfl.reporting.compare.statistics import Spread
from cfl.reporting.csv_file import RunFolderError
from cfl.running import finished
from cfl.running.finished import read_finished
from cfl.running.missing_data import MissingData

PMNIST = {"benchmark": ["pmnist"], "partition": ["shards"]}


def experiments(root: Path, **missing: str) -> Experiments:
    memory = MissingData(root / "missing-data.json")
    memory.add(missing)
    return Experiments(resolver(), read_results(root), memory)


def arguments(table: str = "table1", scale: str = "paper", **axes: str) -> tuple[str, ...]:
    return fot()[table].recipe(point(scale, **axes)).arguments


def cell(seeds: dict[int, float], paper: tuple[float, float | None], scale: str = "paper", figure: str = "ACC") -> Cell:
    return Cell(fot()["table1"], point(scale), figure, Published({}, figure, *paper), seeds)


def test_spread_is_that_of_the_standard_library() -> None:
    values = [85.1, 86.4, 85.9]
    spread = Spread.of(values)
    assert spread is not None
    assert spread.mean == pytest.approx(statistics.fmean(values))
    assert spread.std == pytest.approx(statistics.stdev(values))
    assert Spread.of([1.5]) == Spread(1.5, None, 1)
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("seeds", "paper", "status"),
    [
        ({0: 84.0, 1: 86.0}, (87.0, 0.6), "matched"),  # 85 +- 1.414, difference 2 within 2.014
        ({0: 84.0, 1: 86.0}, (87.1, 0.6), "off by -2.10"),
        ({0: 85.0}, (85.5, None), "matched"),  # within the column's tolerance of 0.5
        ({0: 85.0}, (85.51, None), "off by -0.51"),
        ({0: 85.9}, (85.0, 0.9), "matched"),  # a single seed has no deviation
        ({0: 86.0}, (85.0, 0.9), "off by +1.00"),
        ({}, (85.0, 0.9), "not run"),
    ],
)
def test_matched_is_inside_both_spreads_or_the_tolerance(
    seeds: dict[int, float], paper: tuple[float, float | None], status: str
) -> None:
    assert cell(seeds, paper).status == status


@pytest.mark.parametrize("scale", ["short", "smoke"])
def test_a_reduced_scale_never_matches(scale: str) -> None:
    """A run at a reduced scale is never called a match, even if its number equals the paper's."""
    assert cell({0: 85.68}, (85.68, 0.57), scale).status == f"{scale}: by order only"


def test_a_published_number_that_is_no_target_is_not_compared() -> None:
    """A cell that a NoTarget names is not compared, even if our number equals the paper's. Other cells are compared."""
    of_nll = NoTarget("it is no likelihood", {"method": ["fot"]}, ["ACC"])
    table = replace(fot()["table1"], no_targets=[of_nll])

    def found(figure: str, method: str, scale: str = "paper") -> Cell:
        return Cell(table, point(scale, method=method), figure, Published({}, figure, 80.0, None), {0: 80.0})

    assert found("ACC", "fot").status == "not compared (it is no likelihood)"
    assert found("ACC", "fot").difference is None
    assert [found("FGT", "fot").status, found("ACC", "er").status] == ["matched", "matched"]
    assert found("ACC", "fot", "short").status == "short: by order only"
    assert replace(found("ACC", "fot"), seeds={}).status == "not run"
    assert counts([found("ACC", "fot"), found("ACC", "er")]) == "not compared 1, matched 1"
    assert tolerances(table, [found("ACC", "fot"), found("FGT", "fot")]) == ["", "Tolerance: FGT 0.5."]
    assert tolerances(table, [found("ACC", "fot")]) == []


def test_a_column_without_an_order_is_not_compared_at_a_reduced_scale() -> None:
    table3 = fot()["table3"]
    used = Cell(table3, point("short"), "used space", Published({}, "used space", 61.36, None), {0: 61.36})
    assert used.status == "short: not compared"


@pytest.mark.parametrize(("ours", "status"), [(1.0, "matched"), (0.0, "off by -1")])
def test_what_is_the_same_at_every_scale_is_compared_at_each(ours: float, status: str) -> None:
    """A column that does not depend on the scale is compared at every scale, such as whether clients store anything."""
    table2 = fot()["table2"]
    storage = Cell(table2, point("short", method="ewc"), "storage", Published({}, "storage", 1, None), {0: ours})
    assert storage.status == status
    assert storage.difference == ours - 1


def test_no_wrong_sign_is_a_match() -> None:
    """A gain of 0 does not match the paper's gain: the tolerance is smaller than the gain."""
    table7 = fot()["table7"]
    (gain,) = [p for p in table7.published if p.place["setting"] == "federated"]
    worse = Cell(table7, {**point(), "setting": "federated"}, "improvement", gain, {0: 0.0})
    assert worse.status == "off by -0.48"


def test_what_has_no_value_at_a_reduced_scale_says_so() -> None:
    """A cell without a value at a reduced scale names the scale, so that it is not taken for the published protocol."""
    table, why = fot()["table1"], {0: "never within 100 rounds"}
    none = Cell(table, point("short"), "ACC", None, {}, "no value (never within 100 rounds)", (), why)
    some = Cell(table, point("short"), "ACC", None, {1: 80.0}, "no value (never within 100 rounds)", (), why)
    assert none.status == "short: no value (never within 100 rounds)"
    assert some.status == "short: value in 1 of 2 seeds only (never within 100 rounds)"
    assert counts([none, some]) == "short: no value 1, short: some seeds only 1"
    assert replace(none, point=point()).status == "no value (never within 100 rounds)"
    assert Cell(table, point("short"), "ACC", None, status_without_value="not run").status == "not run"


def test_values_come_from_the_runs(tmp_path: Path) -> None:
    for seed, acc in enumerate((80.5, 79.5, 80.6)):
        write_run(tmp_path / f"fedavg{seed}", arguments(), seed, acc)
    write_run(tmp_path / "fot", arguments(method="fot"), 0, 85.0)
    known = experiments(tmp_path)
    cells = {(c.point["method"], c.figure): c for c in known.cells(fot()["table1"], "paper", PMNIST)}
    assert cells["fedavg", "ACC"].seeds == {0: 80.5, 1: 79.5, 2: 80.6}
    assert cells["fedavg", "ACC"].status == "matched"
    assert cells["fedavg", "FGT"].status == "off by +3.29"  # 12.5, the paper's 9.21 +- 0.67
    assert cells["fot", "ACC"].status == "matched"
    assert cells["er", "ACC"].status == "not run"
    few = known.cells(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg"]}, seeds=[0])
    assert {c.figure: c.seeds for c in few} == {"ACC": {0: 80.5}, "FGT": {0: 12.5}}
    later = known.cells(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg"]}, seeds=[1, 2])
    assert {c.figure: list(c.seeds) for c in later} == {"ACC": [1, 2], "FGT": [1, 2]}
    assert all(not c.seeds for c in known.cells(fot()["table1"], "short", PMNIST))
    assert counts([cells["fedavg", "ACC"], cells["fot", "ACC"], cells["fedavg", "FGT"]]) == "matched 2, off 1"


def test_the_same_run_serves_several_tables(tmp_path: Path) -> None:
    cifar = {"benchmark": "cifar100", "method": "fot"}
    matrix = [[50.0 + t - abs(t - i) for i in range(10)] for t in range(10)]
    write_run(tmp_path / "a", arguments(**cifar), 0, 71.0, matrix=matrix, used_space=33.1, gpse_seconds=9.0)
    known = experiments(tmp_path)

    def values(name: str, scale: str = "paper") -> dict[tuple[str, ...], object]:
        table = fot()[name]
        return {
            (*table.place(c.point).values(), c.figure): c.seeds[0] for c in known.cells(table, scale) if 0 in c.seeds
        }

    assert values("table1") == {("cifar100", "shards", "fot", "ACC"): 71.0, ("cifar100", "shards", "fot", "FGT"): 12.5}
    assert values("table3") == {("cifar100", "shards", "used space"): 33.1}
    of_table12 = values("table12")
    assert set(of_table12) == {("0.87", figure) for figure in fot()["table12"].figures}
    assert of_table12["0.87", "T1"] == matrix[9][0] == 50.0
    assert of_table12["0.87", "T10"] == 59.0
    # (100 - 9) seconds over the 7 client epochs of rounds.csv; 9 tasks with GPSE, 25 clients each.
    assert values("table4") == {
        ("cifar100", "local epoch"): pytest.approx(91 / 7),
        ("cifar100", "GPSE"): pytest.approx(9.0 / (9 * 25)),
    }
    assert values("figure5")["cifar100", "shards", "fot", "task 1"] == [50.0 + t - t for t in range(10)]
    averages = values("figure4")["cifar100", "shards", "fot", "ACC"]
    assert averages == [pytest.approx(sum(matrix[t][: t + 1]) / (t + 1)) for t in range(10)]
    assert values("figure6")["0.87", "task 3"] == [None, None, *(50.0 + t - (t - 2) for t in range(2, 10))]
    assert values("figure7") == {}  # the made-up layers are not AlexNet's


def test_client_epochs_count_every_pass_of_every_client(tmp_path: Path) -> None:
    settings = copy.deepcopy(resolver().config(arguments()))
    settings["schedule"]["local_epochs"] = 3
    write_run(tmp_path / "a", arguments(), config=settings)
    assert read_result(tmp_path / "a").client_epochs == 3 * (3 + 4)  # clients of the two rounds


def test_a_difference_of_two_runs_is_taken_seed_by_seed(tmp_path: Path) -> None:
    cifar = {"benchmark": "cifar100", "partition": "iid"}
    for seed, (fedavg, er) in enumerate([(10.0, 9.0), (12.0, 11.6)]):
        write_run(tmp_path / f"fedavg{seed}", arguments(**cifar), seed, fgt=fedavg)
        write_run(tmp_path / f"er{seed}", arguments(method="er", **cifar), seed, fgt=er)
    write_run(tmp_path / "fedavg2", arguments(**cifar), 2, fgt=50.0)
    centralised, federated = experiments(tmp_path).cells(fot()["table7"], "paper")
    assert federated.seeds == {0: pytest.approx(1.0), 1: pytest.approx(0.4)}
    assert federated.status == "matched"
    assert centralised.status.startswith("cannot run here (the paper does not say")


def test_single_task_is_the_diagonal(tmp_path: Path) -> None:
    write_run(tmp_path / "a", fot()["table11"].recipe(point(method="single-task")).arguments)
    found = [c for c in experiments(tmp_path).cells(fot()["table11"], "paper") if c.seeds]
    assert [c.seeds for c in found] == [{0: pytest.approx((80 + 90 + 95) / 3)}]


def test_a_figure_that_a_run_lacks_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", arguments(method="fot"), used_space=None)
    (found,) = experiments(tmp_path).cells(fot()["table3"], "paper", PMNIST)
    assert found.status == "no value (used_space: the run has no used_space)"


def test_a_seed_without_a_value_is_not_forgotten(tmp_path: Path) -> None:
    """A cell in which one seed has no value is not compared with the paper, and says how many seeds have one."""
    for seed, used in ((0, 61.0), (1, None), (2, 62.0)):
        write_run(tmp_path / str(seed), arguments(method="fot"), seed, used_space=used)
    known = experiments(tmp_path)
    (found,) = known.cells(fot()["table3"], "paper", PMNIST)
    assert (found.seeds, set(found.without)) == ({0: 61.0, 2: 62.0}, {1})
    assert found.status == "value in 2 of 3 seeds only (used_space: the run has no used_space)"
    assert found.ran
    assert found.difference is None
    text = write_report(known, fot()["table3"], "paper", PMNIST, tmp_path).text
    assert "| 61.50 ± 0.71 | 2 of 3 | " in text


def test_missing_data_is_said_where_it_is_needed(tmp_path: Path) -> None:
    known = experiments(tmp_path, SVHN="SVHN: files are missing", CIFAR10="CIFAR10: files are missing")
    statuses = {c.point["benchmark"]: c.status for c in known.cells(fot()["table3"], "paper")}
    assert statuses["five-datasets"] == "cannot run here (needs CIFAR10, SVHN)"
    assert {statuses[b] for b in ("pmnist", "cifar100", "mini-imagenet")} == {"not run"}
    assert {c.status for c in known.cells(fot()["table3"], "smoke")} == {"not run"}  # smoke runs use made-up data


def test_jobs_are_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", arguments(), seed=1)
    chosen = {**PMNIST, "method": ["fedavg", "fot", "unwritten"]}
    table = replace(fot()["table1"], axes={**fot()["table1"].axes, "method": chosen["method"]})
    lacks = experiments(tmp_path).jobs(table, "paper", chosen, range(2), tmp_path)
    jobs = lacks.jobs
    assert [job.name for job in jobs] == [
        "pmnist shards fedavg paper seed 0",
        "pmnist shards fot paper seed 0",
        "pmnist shards fot paper seed 1",
    ]
    assert len(lacks.finished) == 1
    assert lacks.cannot == [("pmnist shards unwritten paper", "method unwritten not available")]
    folder = jobs[0].folder.relative_to(tmp_path)
    assert str(folder).startswith("fot/pmnist/shards/fedavg/paper-seed0-")
    assert resolver().experiment(jobs[1].arguments[:-1], 0) == jobs[1].experiment
    assert len({job.folder for job in jobs}) == 3
    later = experiments(tmp_path).jobs(table, "paper", {**PMNIST, "method": ["fedavg", "fot"]}, range(1, 3), tmp_path)
    assert [job.name for job in later.jobs] == [
        "pmnist shards fot paper seed 1",
        "pmnist shards fedavg paper seed 2",
        "pmnist shards fot paper seed 2",
    ]
    assert len(later.finished) == 1


def test_a_value_that_a_constructor_refuses_is_told_before_anything_is_run(tmp_path: Path) -> None:
    bad = Rule({"method": "fot"}, settings={"methods.fot.threshold": 1.5})
    table = replace(fot()["table1"], rules=[*fot()["table1"].rules, bad])
    lacks = experiments(tmp_path).jobs(table, "paper", {**PMNIST, "method": ["fedavg", "fot"]}, range(1), tmp_path)
    assert [job.name for job in lacks.jobs] == ["pmnist shards fedavg paper seed 0"]
    assert "methods.fot.threshold = 1.5 cannot work" in lacks.refused[0][1]


def test_a_refused_configuration_is_its_own_cells_failure(tmp_path: Path) -> None:
    """A refused configuration makes its own cell fail. The other cells are run and reported."""
    bad = Rule({"method": "fot"}, settings={"methods.fot.threshold": "high"})
    table = replace(fot()["table1"], rules=[*fot()["table1"].rules, bad])
    chosen = {**PMNIST, "method": ["fedavg", "fot"]}
    lacks = experiments(tmp_path).jobs(table, "paper", chosen, range(1), tmp_path)
    assert [job.name for job in lacks.jobs] == ["pmnist shards fedavg paper seed 0"]
    ((name, message),) = lacks.refused
    assert name == "pmnist shards fot paper"
    assert message.startswith("methods.fot.threshold = 'high' cannot work")
    write_run(tmp_path / "a", arguments(), 0, 80.0)
    write_run(tmp_path / "b", arguments(method="fot"), 0, 85.0)
    statuses = {c.point["method"]: c.status for c in experiments(tmp_path).cells(table, "paper", chosen)}
    assert statuses["fedavg"] != "not run"
    assert statuses["fot"].startswith("cannot run here (its configuration is refused: ")


def test_a_run_that_two_cells_need_is_made_once(tmp_path: Path) -> None:
    jobs = experiments(tmp_path).jobs(fot()["table7"], "paper", None, range(1), tmp_path).jobs
    assert sorted(job.name.split()[2] for job in jobs) == ["er", "fedavg"]
    jobs = experiments(tmp_path).jobs(fot()["figure6"], "paper", {"threshold": ["0.80"]}, range(2), tmp_path).jobs
    assert len(jobs) == 2


def test_runs_are_found_behind_links_and_once(tmp_path: Path) -> None:
    """Runs behind symbolic links are found once, also if a link leads back to the folder."""
    folder = write_run(tmp_path / "disk" / "a", arguments())
    (tmp_path / "runs").mkdir()
    for name, target in (("a", folder), ("b", folder), ("c", tmp_path / "runs")):
        (tmp_path / "runs" / name).symlink_to(target)
    results = read_results(tmp_path / "runs")
    assert [result.folder for result in results.all] == [tmp_path / "runs" / "a"]
    assert find_runs([tmp_path / "runs"]) == ([tmp_path / "runs" / "a"], [])


@pytest.mark.parametrize("seed", [".inf", "[]", "many"])
def test_a_seed_that_is_no_number_ends_no_search(seed: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, arguments())
    (tmp_path / "a" / "SHA256SUMS").unlink(missing_ok=True)
    config = tmp_path / "a" / "config.yaml"
    config.write_text(re.sub("seed_everything: .*", f"seed_everything: {seed}", config.read_text()))
    for read in (read_result, read_finished):
        found = finished.read_results(tmp_path, read)
        assert len(found.all) == 1
        (said,) = found.left_out
        assert said.startswith(f"{tmp_path / 'a' / 'config.yaml'}: ")


def test_unfinished_and_broken_folders_are_no_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", arguments())
    (folder / "config.yaml").unlink()
    (write_run(tmp_path / "b", arguments()) / "summary.json").write_text("{")
    (write_run(tmp_path / "c", arguments()) / "summary.json").unlink()
    assert read_results(tmp_path).all == []
    left_out = read_results(tmp_path).left_out
    assert all(str(tmp_path / name) in said for name, said in zip("ab", left_out, strict=True))


def test_two_methods_may_measure_a_layer(tmp_path: Path) -> None:
    """A layer that two methods measure is named method.layer. A table that lacks a task is a damaged run."""
    config = resolver().config(arguments(method="fot"))
    methods = {**config["methods"], "gpm": {"class_path": "GPM"}}
    folder = write_run(tmp_path / "a", (), config={**config, "methods": methods})
    gpm = folder / "gpm.csv"
    gpm.write_text("task,layer,used_space\n0,b,1.0\n1,b,2.0\n0,c,3.0\n1,c,4.0\n")
    assert read_result(folder).space == {"a": [10.0, 20.0], "fot.b": [11.0, 21.0], "gpm.b": [1.0, 2.0], "c": [3.0, 4.0]}
    gpm.write_text("task,layer,used_space\n0,b,1.0\n1,b,2.0\n2,b,3.0\n")  # with a row after the last task, too
    assert read_result(folder).space["gpm.b"] == [1.0, 2.0, 3.0]
    gpm.write_text("task,layer,used_space\n0,b,1.0\n")
    with pytest.raises(RunFolderError, match=r"gpm\.csv, line 2: b has 1 rows, of 2 tasks"):
        read_result(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rounds.csv", b"round,clients\n0,3\n1"),
        ("rounds.csv", b"round,clients\n0,three\n"),
        ("fot.csv", b"task,layer,used_space\n0,a\n"),
        ("fot.csv", b"task,layer,used_space\n0,a,\n1,a,20.0\n"),
        ("fot.csv", b"task,layer,used_space\n0,a,10.0\n0,b,11.0\n1,a,20.0\n"),
        ("rounds.csv", b"round,clients\n0,3\n"),
        ("rounds.csv", b"garbage"),
        ("config.yaml", b"\xff\xfe\x00"),
        ("config.yaml", b"seed_everything: null"),
        ("config.yaml", b"methods: 3"),
        ("summary.json", b"[1, 2"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", arguments(method="fot"))
    if name == "config.yaml" and not content.startswith(b"\xff"):
        settings = yaml.safe_load((folder / name).read_text())
        content = yaml.safe_dump({**settings, **yaml.safe_load(content)}).encode()
    (folder / name).write_bytes(content)
    results = read_results(tmp_path)
    assert results.all == []
    assert len(results.left_out) == 1
    assert str(folder / name) in results.left_out[0]


@pytest.mark.parametrize("name", ["config.yaml", "fot.csv", "accuracy_matrix_task_il.csv"])
def test_files_that_changed_since_the_run_ended_are_named(name: str, tmp_path: Path) -> None:
    """A run with a file that changed after its end is left out, even if the file is valid by itself."""
    folder = write_run(tmp_path / "a", arguments(method="fot"))
    shutil.copy(folder / "accuracy_matrix.csv", folder / "accuracy_matrix_task_il.csv")
    write_checksums(folder, [path.name for path in folder.iterdir()], {})
    assert len(read_results(tmp_path).all) == 1
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("num_clients: ", "num_clients: 1").replace("10.0", "11.0"))
    results = read_results(tmp_path)
    assert results.all == []
    assert results.left_out == [f"{folder / name}: changed since the run ended, it has another SHA-256 than then"]


def test_a_configuration_with_another_seed_than_the_summary_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", arguments(), seed=1)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("everything: 1", "everything: 2"))
    for read in (read_result, read_finished):
        with pytest.raises(RunFolderError, match=r"config\.yaml: seed_everything = 2, but summary\.json says seed = 1"):
            read(folder)


def test_a_run_that_diverged_is_no_run_that_was_never_made(tmp_path: Path) -> None:
    """A seed that diverged is reported as failed, alone and beside seeds that finished."""
    for name, seed in (("a", 0), ("b", 1)):
        folder = write_run(tmp_path / name, arguments(), seed)
        (folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
        if seed == 0:
            (folder / "summary.json").unlink()
    known = experiments(tmp_path)
    both = known.cells(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg", "fot"]})
    cells = {cell.point["method"]: cell for cell in both}
    assert cells["fot"].status == "not run"
    assert cells["fedavg"].status == "value in 1 of 2 seeds only (values left the finite numbers)"
    only, _ = known.cells(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg"]}, [0])
    assert only.status == "failed (values left the finite numbers)"
    assert not only.seeds


@pytest.mark.parametrize("diverged", [0, 1])
def test_a_cell_failed_only_if_every_run_diverged(diverged: int, tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path / str(seed), arguments(), seed, acc=None)
        if seed == diverged:
            (folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
            (folder / "summary.json").unlink()
    cell, *_ = experiments(tmp_path).cells(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg"]})
    assert (cell.figure, cell.status) == ("ACC", "no value (acc: the run has no acc)")


def test_a_run_that_diverged_is_not_made_again(tmp_path: Path) -> None:
    """A seed that diverged in any folder is not run again. If another folder has it finished, it counts as finished."""
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        folder = write_run(tmp_path / name, arguments(), seed)
        (folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
        if name != "c":
            (folder / "summary.json").unlink()
    lacks = experiments(tmp_path).jobs(fot()["table1"], "paper", {**PMNIST, "method": ["fedavg"]}, range(3), tmp_path)
    assert [job.name for job in lacks.jobs] == ["pmnist shards fedavg paper seed 2"]
    assert len(lacks.finished) == 1
    assert lacks.diverged == [("pmnist shards fedavg paper seed 0", tmp_path / "a")]


def test_runs_on_other_data_are_not_held_against_the_paper(tmp_path: Path) -> None:
    said = "MNIST has 30 training and 30 test samples; the published set has 60000 and 10000"
    write_run(tmp_path / "a", arguments(), 0, 80.06, data_unlike_published=[said])
    write_run(tmp_path / "b", arguments(method="fot"), 0, 85.21, data_unlike_published=[])
    chosen = {**PMNIST, "method": ["fedavg", "fot"]}
    cells = {(c.point["method"], c.figure): c for c in experiments(tmp_path).cells(fot()["table1"], "paper", chosen)}
    assert cells["fedavg", "ACC"].status == f"not compared (other data: {said})"
    assert cells["fedavg", "ACC"].difference is None
    assert cells["fot", "ACC"].status == "matched"


def test_an_interrupted_run_goes_on_where_it_was_begun(tmp_path: Path) -> None:
    """An interrupted run is continued in its own folder, even if its configuration lacks an option added since.

    A folder of another seed or of another experiment is not used.
    """
    chosen = {**PMNIST, "method": ["fot"]}

    def folder() -> Path:
        (job,) = experiments(tmp_path).jobs(fot()["table1"], "paper", chosen, range(1), tmp_path).jobs
        return job.folder

    own = folder()
    settings = copy.deepcopy(resolver().config(arguments(method="fot")))
    del settings["methods"]["fot"]["init_args"]["gpse_batch_size"]
    for name, change in (
        ("paper-seed0-00000001", {"seed_everything": 1}),
        ("paper-seed0-00000002", {"seed_everything": 0, "schedule": {**settings["schedule"], "batch_size": 7}}),
        ("paper-seed0-00000003", {"seed_everything": 0}),
    ):
        begun = own.with_name(name)
        begun.mkdir(parents=True)
        (begun / "config.yaml").write_text(yaml.safe_dump({**settings, **change}))
        assert folder() == own
        (begun / "last.ckpt").touch()
    assert folder() == own.with_name("paper-seed0-00000003")
    own.mkdir()
    (own / "last.ckpt").touch()
    assert folder() == own


def test_report_text_csv_and_picture(tmp_path: Path) -> None:
    write_run(tmp_path / "a", arguments(), 0, 80.5)
    write_run(tmp_path / "b", arguments(method="fot"), 0, 87.0)
    write_run(tmp_path / "c", arguments(method="gpm"), 0, 70.0)
    report = write_report(experiments(tmp_path), fot()["table1"], "paper", PMNIST, tmp_path)
    assert "| Permuted MNIST | non-IID | FL | ACC | 80.06 ± 0.43 | 80.50 | 1 | +0.44 | matched |" in report.text
    assert "\n- Weight decay 1e-5 with SGD, as in the authors' code" in report.text  # a note of all the paper's tables
    assert re.search(r"\| FOT \| ACC \[\d+] \| 85.21 ± 0.13 \| 87.00 \| 1 \| \+1.79 \| off by \+1.79 \|", report.text)
    assert "| GPM+FL | ACC [" in report.text
    assert ". GPM: threshold" in report.text
    assert "| Permuted MNIST | non-IID | ACC | FL, GPM+FL, FOT | 1 | +1.00 | yes | yes | +6.50 | +5.15 |" in report.text
    assert "\nTolerance: ACC 0.5, FGT 0.5.\n" in report.text
    text, table, picture = report.files
    shown_rows, rows_of_file = (
        [re.sub(r" \[\d+]", "", line) for line in found.splitlines() if line.startswith("| Permuted MNIST | non-IID ")]
        for found in (report.text, text.read_text())
    )
    assert len(shown_rows) > 10
    assert shown_rows == rows_of_file  # the file has further rows, of other benchmarks
    with table.open() as file:
        found = [row for row in csv.DictReader(file) if (row["benchmark"], row["partition"]) == ("pmnist", "shards")]
    rows = {(row["method"], row["figure"]): row for row in found}
    assert rows["fot", "ACC"]["ours"] == "87.0"
    assert rows["fot", "ACC"]["paper_std"] == "0.13"
    assert float(rows["fot", "ACC"]["difference"]) == pytest.approx(1.79)
    assert rows["er", "ACC"]["ours"] == rows["er", "ACC"]["difference"] == ""
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_of_some_methods_leaves_the_others(tmp_path: Path) -> None:
    """A report's files have all methods and seeds. What it prints and counts are the chosen ones only."""
    for seed in range(4):
        write_run(tmp_path / f"a{seed}", arguments(), seed, 80.0 + seed)
    write_run(tmp_path / "b", arguments(method="fot"), 0, 87.0)
    table, known = fot()["table1"], experiments(tmp_path)
    whole = write_report(known, table, "paper", {}, tmp_path, range(table.seeds))
    before = [path.read_bytes() for path in whole.files]
    some = write_report(known, table, "paper", {**PMNIST, "method": ["fot"]}, tmp_path, [0])
    assert [path.read_bytes() for path in some.files] == before
    assert "| FL | ACC | 80.06 ± 0.43 | 81.50 ± 1.29 | 4 |" in some.files[0].read_text()
    assert "| FL | ACC" not in some.text
    asked = counts(known.cells(table, "paper", {**PMNIST, "method": ["fot"]}, [0]))
    assert f"\nCells: {asked}.\n" in some.text
    write_report(known, table, "paper", {"method": ["fot"]}, tmp_path, range(4))
    assert "| FL | ACC | 80.06 ± 0.43 | 81.50 ± 1.29 | 4 |" in some.files[0].read_text()
    names = {path.name for path in (tmp_path / "fot" / "reports").iterdir()}
    assert names == {"table1-paper.md", "table1-paper.csv", "table1-paper.png"}


def test_notes_of_a_report_are_of_its_cells(tmp_path: Path) -> None:
    about = ["- Permuted MNIST: all 60,000", "- 5-Datasets: in"]
    whole = write_report(experiments(tmp_path), fot()["table1"], "paper", {"benchmark": ["pmnist"]}, tmp_path)
    assert [note in whole.text for note in about] == [True, False]
    assert "- Weight decay 1e-5" in whole.text
    assert "- Both figures in percent" in whole.text
    assert all(note in whole.files[0].read_text() for note in about)


def test_a_short_report_compares_by_order_only(tmp_path: Path) -> None:
    for method, acc in (("fedavg", 80.06), ("gpm", 72.17), ("fot", 85.21)):  # exactly the paper's numbers
        write_run(tmp_path / method, arguments(scale="short", method=method), 0, acc)
    report = write_report(experiments(tmp_path), fot()["table1"], "short", PMNIST, tmp_path)
    assert "| matched |" not in report.text
    assert "\nTolerance: " not in report.text
    assert "off by" not in report.text
    with report.files[1].open() as file:
        assert {row["difference"] for row in csv.DictReader(file)} == {""}
    assert "| Permuted MNIST | non-IID | ACC | FL, GPM+FL, FOT | 1 | +1.00 | yes | yes | +5.15 | +5.15 |" in report.text


def test_curves_have_a_line_per_task(tmp_path: Path) -> None:
    for seed, shift in ((0, 0.0), (1, 2.0)):
        matrix = [[value + shift for value in row] for row in MATRIX]
        write_run(tmp_path / str(seed), arguments(benchmark="cifar100"), seed, matrix=matrix)
    chosen = {"benchmark": ["cifar100"], "partition": ["shards"], "method": ["fedavg", "fot"]}
    report = write_report(experiments(tmp_path), fot()["figure4"], "paper", chosen, tmp_path)
    with report.files[1].open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedavg" and row["ours"]]
    assert [(row["after"], float(row["ours"]), row["seeds"]) for row in rows] == [
        ("1", 81.0, "2"),
        ("2", 81.0, "2"),
        ("3", 81.0, "2"),
    ]
    assert report.files[2].read_bytes().startswith(b"\x89PNG")


def test_nothing_run_no_picture(tmp_path: Path) -> None:
    report = write_report(experiments(tmp_path), fot()["table3"], "paper", {}, tmp_path)
    assert [path.suffix for path in report.files] == [".md", ".csv"]


def test_numbers_as_they_are_shown() -> None:
    assert Spread(85.678, 0.571, 3).shown(2) == "85.68 ± 0.57"
    assert Spread(-0.001, None, 1).shown(2) == "0.00"


def test_a_result_keeps_what_was_not_evaluated(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", arguments(), matrix=[[1.0, float("nan")], [2.0, 3.0]])
    assert read_result(folder).matrix == [[1.0, None], [2.0, 3.0]]
    assert Results([read_result(folder)]).all[0].figure("diagonal") == [1.0, 3.0]
