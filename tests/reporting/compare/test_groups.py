"""Grouping runs into tables and rows: which are averaged, which are separate rows, and the notes about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.made_up import make_density_run, make_run, readings

from cfl.metrics.transfer import average_accuracy
from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.latex import latex_report
from cfl.reporting.compare.reading import Reading, read
from cfl.reporting.compare.rows import Comparison, Row, figure_of, means_over_tasks_seen
from cfl.reporting.measures import FIGURES
from cfl.runtime.errors import ConfigError

ACC = FIGURES[0]


def change_config(reading: Reading, section: str, **values: Any) -> Reading:
    path = reading.run.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section] |= values
    path.write_text(yaml.safe_dump(config))
    return read(reading.run.folder, [])


def shape(comparisons: list[Comparison]) -> dict[str, dict[str, list[int]]]:
    return {c.title: {row.label: [r.run.seed for r in row.readings] for row in c.rows} for c in comparisons}


def test_figures_on_validation_samples_are_in_a_table_of_their_own(tmp_path: Path) -> None:
    """Titles and captions say that figures are not of the test sets, and no mean is over both."""
    tested, tuned = readings(tmp_path, {"method": "fot", "seed": 0}, {"method": "fot", "seed": 1})
    tuned = change_config(tuned, "data", evaluate_on="validation", validation=0.1)
    tested = change_config(tested, "data", evaluate_on="test", validation=0.1)
    for keys in (None, ("benchmark", "method")):
        found = compare([tested, tuned], keys)
        assert [[r.run.seed for row in table.rows for r in row.readings] for table in found] == [[0], [1]]
        assert [table.title.endswith("on validation samples") for table in found] == [False, True]
        assert all(len(table.rows) == 1 and not table.notes for table in found)
        captions = [latex_report([(table, None)]).replace(r"\penalty1000{}", "") for table in found]
        assert ["domain-incremental, on validation samples, 3 tasks" in text for text in captions] == [False, True]


def test_two_measures_under_one_name_are_not_ranked_together(tmp_path: Path) -> None:
    """In one run the highest value is the best, in the other the lowest: no order is right for both."""
    runs = [
        replace(one, run=replace(one.run, own_measures={"mine": better, "same": "lower"}))
        for one, better in zip(
            readings(tmp_path, {"method": "fot"}, {"method": "fedavg"}), ("higher", "lower"), strict=True
        )
    ]
    folders = [str(one.run.folder) for one in runs]
    with pytest.raises(
        ConfigError, match=r"measures\.mine = 'higher is better in .*, lower in .* compare these apart"
    ) as told:
        compare(runs)
    assert all(folder in str(told.value) for folder in folders)
    assert len(compare(runs[:1])) == len(compare(runs[1:])) == 1


def test_seeds_are_averaged_and_benchmarks_kept_apart(tmp_path: Path) -> None:
    runs = readings(
        tmp_path,
        {"method": "fot", "seed": 1},
        {"method": "fot", "seed": 0},
        {"method": "fedavg"},
        {"method": "fot", "benchmark": "pmnist"},
        {"method": "fot", "partition": "iid"},
        {"method": "fot", "scenario": "class"},
        {"method": "fot", "tasks": 4},
        {"method": "fot", "scenario": "density"},
    )
    found = compare(runs)
    assert shape(found) == {
        "digits, shards-2, domain-incremental, 3 tasks": {"FOT": [1, 0], "FedAvg": [0]},
        "pmnist, shards-2, domain-incremental, 3 tasks": {"FOT": [0]},
        "digits, iid, domain-incremental, 3 tasks": {"FOT": [0]},
        "digits, shards-2, class-incremental, 3 tasks": {"FOT": [0]},
        "digits, shards-2, domain-incremental, 4 tasks": {"FOT": [0]},
        "digits, shards-2, density, 3 tasks": {"FOT": [0]},
    }
    assert list(found[0].rows[0].figure(ACC).items()) == [(0, runs[1].run.acc), (1, runs[0].run.acc)]
    (note,) = found[0].notes
    assert note.startswith("rows have different seeds: means are over each row's own")


def test_runs_of_a_method_with_other_settings_are_other_rows(tmp_path: Path) -> None:
    options = [(0.9, 0), (0.96, 0), (0.9, 1), (0.96, 1)]
    runs = readings(
        tmp_path,
        *({"seed": seed, "acc": 100 * t - seed, "options": {"threshold": t, "rank": [1]}} for t, seed in options),
    )
    (table,) = compare(runs)
    assert shape([table]) == {table.title: {"FOT (threshold 0.9)": [0, 1], "FOT (threshold 0.96)": [0, 1]}}
    assert table.notes == []

    # Grouped by method only, they are averaged, and a note says so.
    (table,) = compare(runs, ["benchmark", "method"])
    assert shape([table]) == {"digits": {"FOT": [0, 0, 1, 1]}}
    assert table.rows[0].figure(ACC) == pytest.approx({0: 93.0, 1: 92.0})
    assert "FOT: averaged over runs that differ in methods.fot.threshold" in table.notes


@pytest.mark.parametrize(("others", "ending"), [(5, "o4"), (6, "o4 and 1 more"), (9, "o4 and 4 more")])
def test_of_many_settings_that_differ_five_are_named(others: int, ending: str, tmp_path: Path) -> None:
    options = [{f"o{k}": value for k in range(others)} for value in (1, 2)]
    runs = readings(tmp_path, *({"seed": 0, "options": own} for own in options))
    (table,) = compare(runs, ["benchmark", "method"])
    (note,) = [note for note in table.notes if "averaged over" in note]
    assert note.startswith("FOT: averaged over runs that differ in methods.fot.o0, methods.fot.o1")
    assert note.endswith(f"methods.fot.{ending}")


def test_any_setting_can_group(tmp_path: Path) -> None:
    runs = readings(tmp_path, *({"method": m, "seed": s} for m in ("fot", "er") for s in (0, 1)))
    runs = [*runs[:3], change_config(runs[3], "schedule", batch_size=64)]
    tables = compare(runs, ["benchmark", "method", "schedule.batch_size"])
    assert shape(tables) == {
        "digits": {"FOT (batch_size 16)": [0, 1], "ER (batch_size 16)": [0], "ER (batch_size 64)": [1]}
    }
    tables = compare(runs, ["schedule.batch_size"])
    assert shape(tables) == {"all runs": {"batch_size 16": [0, 1, 0], "batch_size 64": [1]}}
    assert tables[0].rows[0].method == "fot|er"
    assert tables[0].notes[0] == "batch_size 16: averaged over runs that differ in method"


def test_a_key_that_no_run_has_is_refused_with_those_close_to_it(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"options": {"threshold": 0.9}})
    with pytest.raises(ConfigError, match=r"'methods.gpm.threshold' .* valid: methods\.fot\.threshold, or"):
        compare(runs, ["method", "methods.gpm.threshold"])
    with pytest.raises(ConfigError, match="valid: benchmark, partition, scenario, method, participation"):
        compare(runs, ["colour"])


def test_older_runs_without_an_option_are_averaged_with_newer_ones(tmp_path: Path) -> None:
    """A run that lacks a later option is averaged with runs that have it, unless both are of the same seed."""
    old, new = readings(tmp_path, {"seed": 0}, {"seed": 1, "options": {"added": 0.5}})
    assert shape(compare([old, new])) == {"digits, shards-2, domain-incremental": {"FOT": [0, 1]}}
    other = read(make_run(tmp_path / "other", seed=0, options={"added": 0.5}), [])
    (table,) = compare([old, new, other])
    assert {row.label: len(row.readings) for row in table.rows} == {"FOT": 1, "FOT (added 0.5)": 2}


def test_a_repetition_is_no_further_sample(tmp_path: Path) -> None:
    runs = readings(tmp_path, {}, {}, {"method": "er"})
    (table,) = compare(runs)
    assert [len(row.readings) for row in table.rows] == [1, 1]
    assert table.notes == [f"{runs[1].run.folder} repeats the experiment of {runs[0].run.folder} and is left out"]


def test_runs_without_a_configuration_repeat_no_other(tmp_path: Path) -> None:
    """Nothing tells what runs built in Python are of: with a seed twice each has a row, with each seed once they share
    one as other runs do."""
    made = {"config_hash": "", "used_space": None, "method": "er"}
    runs = readings(tmp_path, {**made, "acc": 60.0}, {**made, "acc": 90.0}, {"method": "er", "seed": 1})
    runs = [*(replace(run, settings={}) for run in runs[:2]), runs[2]]
    (table,) = compare(runs)
    assert [(row.label, [r.run.acc for r in row.readings]) for row in table.rows] == [
        ("ER (run0)", [60.0]),
        ("ER (run1)", [90.0]),
        ("ER", [runs[2].run.acc]),
    ]
    seeds = readings(tmp_path / "seeds", *({**made, "seed": seed} for seed in (0, 1)))
    (table,) = compare([replace(run, settings={}) for run in seeds])
    assert [row.label for row in table.rows] == ["ER"]
    assert not table.notes


def test_epsilons_of_another_delta_are_another_row(tmp_path: Path) -> None:
    """Privacy without a budget decides epsilons only: it tells apart runs that have one, and no others."""
    for noisy in (True, False):
        figures = {"epsilon_all_tasks": 9.0} if noisy else {}
        runs = readings(tmp_path / str(noisy), *({"method": "dp_fedavg", "seed": seed, **figures} for seed in (0, 1)))
        for reading, delta in zip(runs, (1e-5, 0.01), strict=True):
            path = reading.run.folder / "config.yaml"
            privacy = {"budget": None, "delta": delta, "accountant": "pld"}
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"privacy": privacy}))
        (table,) = compare([read(reading.run.folder, []) for reading in runs])
        assert [row.seeds for row in table.rows] == ([[0], [1]] if noisy else [[0, 1]])
        assert [row.label.rpartition("delta ")[2] for row in table.rows if noisy] == ["1e-05)", "0.01)"] * noisy


def test_runs_of_one_seed_that_nothing_tells_apart_are_rows_of_their_own(tmp_path: Path) -> None:
    """Their hashes say that they are of different experiments, so no mean is over both, unless the user groups them."""
    runs = readings(tmp_path, {}, {"config_hash": "another"})
    (table,) = compare(runs)
    assert shape([table]) == {table.title: {"FOT (run0)": [0], "FOT (run1)": [0]}}
    assert table.notes == []
    (table,) = compare(runs, ["benchmark", "method"])
    assert table.notes == ["FOT: averaged over runs that differ in nothing that their configurations show"]


def test_no_mean_is_over_runs_of_one_seed_in_a_row_among_others(tmp_path: Path) -> None:
    """Beside runs of another setting, too, a run from before an option existed is no sample of one that has it."""
    runs = readings(
        tmp_path,
        {"options": {"threshold": 0.9}, "acc": 60.0},
        {"options": {"threshold": 0.9, "added": 1}, "acc": 90.0},
        {"options": {"threshold": 0.5, "added": 1}, "acc": 70.0},
    )
    (table,) = compare(runs)
    assert sorted(acc for row in table.rows for acc in row.figure(ACC).values()) == [60.0, 70.0, 90.0]
    assert len({row.label for row in table.rows}) == 3


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_classes_of_one_name_in_different_modules_are_different_rows(seeds: tuple[int, int], tmp_path: Path) -> None:
    """Two files of the user's may each have a class Net; a class of the package is told apart from all of these."""
    runs = readings(tmp_path, *({"seed": seed, "config_hash": str(k)} for k, seed in enumerate((*seeds, 0))))
    paths = ("lab.nets_a.MLP", "lab.nets_b.MLP", "cfl.models.MLP")
    changed = [
        change_config(run, "model", network={"class_path": path, "init_args": {"hidden": [10]}})
        for run, path in zip(runs, paths, strict=True)
    ]
    (table,) = compare(changed)
    assert [row.label for row in table.rows] == [f"FOT (network {path})" for path in (*paths[:2], "MLP")]
    assert [[reading.run.folder for reading in row.readings] for row in table.rows] == [[r.run.folder] for r in changed]
    assert not any("averaged" in note for note in table.notes)


def test_a_method_of_the_users_is_not_called_as_one_of_the_package(tmp_path: Path) -> None:
    """Whether both have one name in the configuration or two."""
    for name in ("fedprox", "mine"):
        runs = readings(tmp_path / name, {"method": "fedprox"}, {"method": name, "config_hash": "mine"})
        own = change_config(runs[1], "methods", **{name: {"class_path": "lab.mine.FedProx", "init_args": {}}})
        (table,) = compare([runs[0], own])
        labels = [row.label for row in table.rows]
        assert [len(row.readings) for row in table.rows] == [1, 1]
        if name == "mine":
            assert labels == ["FedProx", "mine"]
        else:
            assert labels == ["fedprox (fedprox FedProx)", "fedprox (fedprox lab.mine.FedProx)"]


def test_runs_on_other_files_are_no_repetitions(tmp_path: Path) -> None:
    """Runs on different samples are not repetitions of one another, and a note says that the samples differ.

    Runs that do not record their samples count as repetitions, without a note.
    """
    old, new = ({"data_digests": {"train": digits, "test": "2"}} for digits in ("0", "1"))
    (table,) = compare(readings(tmp_path, old, new, {"method": "er"}, {"method": "er", "seed": 1, **new}))
    assert [len(row.readings) for row in table.rows] == [2, 2]
    assert table.notes[-1] == "tasks do not have the same samples in all runs: seed 0"
    for one, other in ((old, {}), ({}, old)):
        first, second = readings(tmp_path / f"repeated{len(one)}", one, other)
        (table,) = compare([first, second])
        assert table.notes == [f"{second.run.folder} repeats the experiment of {first.run.folder} and is left out"]
    (table,) = compare(readings(tmp_path / "alike", old, {"method": "er", **old}, {"method": "ewc"}))
    assert not table.notes


def test_what_makes_rows_less_comparable_is_said(tmp_path: Path) -> None:
    one, two = readings(tmp_path, {}, {"method": "er", "rounds": 24})
    path = two.run.folder / "partition.csv"
    path.write_text(path.read_text().replace(",00", ",01"))
    (table,) = compare([one, read(two.run.folder, [])])
    assert table.notes == [
        "different numbers of rounds are compared: 12, 24",
        "rows differ in more than the method: schedule.rounds_per_task",
        "clients do not hold the same samples in all rows: seed 0",
    ]
    # Rounds of a run that stopped at its targets are a result.
    stopped = {"stopped_early": True, "rounds_to_accuracy": {"50": 3}}
    changed = [read(make_run(tmp_path / name, method=name, rounds=12, **stopped), []) for name in ("ewc", "fedavg")]
    (table,) = compare([one, *changed])
    assert not any("rounds" in note for note in table.notes)


def test_a_run_that_stopped_before_its_last_task_has_no_figures_over_all_tasks(tmp_path: Path) -> None:
    """A run that stopped before its last task has no ACC, FGT and BWT in a table: its means are of fewer tasks."""
    stopped = read(make_run(tmp_path / "stopped", stopped_early=True, evaluate_every=1), [])
    of_task = replace(stopped, run=replace(stopped.run, begun=2))
    whole = read(make_run(tmp_path / "whole", "fedavg"), [])
    (table,) = compare([of_task, whole])
    rows = {row.method: row for row in table.rows}
    figures = {figure.key: figure for figure in FIGURES}
    assert [rows["fot"].figure(figures[key]) for key in ("acc", "fgt", "bwt")] == [{}, {}, {}]
    assert rows["fot"].figure(figures["seconds"]) == {0: stopped.run.seconds}
    assert rows["fedavg"].figure(figures["acc"]) == {0: whole.run.acc}
    assert "FOT, seed 0: stopped in task 1 (of 0 to 2), and has no figures over all tasks" in table.notes
    assert stopped.run.begun == 3
    (table,) = compare([stopped, whole])
    assert table.rows[0].figure(figures["acc"]) == {0: stopped.run.acc}
    note = "FOT: stopped by the privacy budget before the last round: seed 0 after 12"
    assert note in table.notes
    for rounds, noted in ((None, True), (9, False)):  # no note if all targets are reached, as this ends a run, too
        aimed = replace(stopped, run=replace(stopped.run, rounds_to_accuracy={"50": 3, "90": rounds}))
        assert (note in compare([aimed, whole])[0].notes) == noted


def test_labels_of_many_settings_stay_short_and_apart(tmp_path: Path) -> None:
    names = "abcde"
    runs = readings(tmp_path, *({"options": {n: int(n == name) for n in names}} for name in names))
    labels = [row.label for row in compare(runs)[0].rows]
    assert labels[:3] == ["FOT (a 1, b 0, c 0)", "FOT (a 0, b 1, c 0)", "FOT (a 0, b 0, c 1)"]
    assert labels[3:] == ["FOT (a 0, b 0, c 0)", "FOT (a 0, b 0, c 0) #2"]
    options = [{"a": int(n > 0), "b": int(n > 0), "c": int(n > 0), "d": n} for n in range(4)]
    told = readings(tmp_path / "told", *({"options": values} for values in options))
    assert [row.label for row in compare(told)[0].rows] == [
        "FOT (a 0, b 0, d 0)",
        "FOT (a 1, b 1, d 1)",
        "FOT (a 1, b 1, d 2)",
        "FOT (a 1, b 1, d 3)",
    ]
    long = readings(tmp_path / "long", {"options": {"x": list(range(30))}}, {"options": {"x": 1}})
    assert [row.label for row in compare(long)[0].rows] == ["FOT (x [0, 1, 2, 3, 4,…)", "FOT (x 1)"]


def test_the_baseline(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"method": "fot"}, {"method": "fedavg"}, {"method": "er"})
    (table,) = compare(runs)

    def label(row: Row | None) -> str | None:
        return None if row is None else row.label

    assert label(table.baseline(None)) == "FedAvg"
    assert label(table.baseline("er")) == label(table.baseline("ER")) == "ER"
    assert table.baseline("gpm") is None
    (table,) = compare([runs[0], runs[2]])
    assert label(table.baseline(None)) == "ER"
    assert compare(runs[:1])[0].baseline(None) is None


def test_of_several_rows_of_a_method_the_one_that_can_be_paired_is_the_baseline(tmp_path: Path) -> None:
    fedavg = [{"method": "fedavg", "seed": seed, "rounds": 12} for seed in (0, 1)]
    alone = {"method": "fedavg", "seed": 1, "rounds": 24}  # one seed in common makes no interval
    fot = [{"method": "fot", "seed": seed} for seed in (0, 1)]
    (table,) = compare(readings(tmp_path, alone, *fedavg, *fot))
    first, second, _ = (row.label for row in table.rows)
    for name in (None, "fedavg"):
        row = table.baseline(name)
        assert row is not None
        assert (row.label, row.seeds) == (second, [0, 1])
        assert table.about_baseline(name) == [
            f"differences are to {second!r}; --baseline takes others by their labels: {first!r}"
        ]
    assert table.about_baseline("fot") == []
    assert table.about_baseline(first) == [
        f"no row has two seeds in common with {first!r}, so there are no differences to it"
    ]


def test_of_repetitions_the_one_of_which_more_is_known_stays(tmp_path: Path) -> None:
    damaged, whole = readings(tmp_path, {}, {})
    damaged = replace(damaged, settings={})
    for runs in ([damaged, whole], [whole, damaged]):
        (table,) = compare(runs)
        assert [reading.run.folder for row in table.rows for reading in row.readings] == [whole.run.folder]
        assert table.notes == [f"{damaged.run.folder} repeats the experiment of {whole.run.folder} and is left out"]


def test_of_repetitions_the_one_with_further_figures_stays(tmp_path: Path) -> None:
    """A user's measures and epsilons are no part of the experiment: of two runs the one that has them is kept."""
    measured = {"measures": {"top2": "higher"}, "measures.top2": 90.0}
    for further in (measured, {"epsilon_all_tasks": 8.0}):
        folder = tmp_path / next(iter(further))
        plain, more = readings(folder, {"config_hash": "one"}, {"config_hash": "one", **further})
        for runs in ([plain, more], [more, plain]):
            (table,) = compare(runs)
            assert [reading.run.folder for row in table.rows for reading in row.readings] == [more.run.folder]


def test_matrices_are_averaged_per_seed_and_never_over_other_shapes(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"seed": 0}, {"seed": 1}, {"seed": 0, "config_hash": "x", "level": 70.0}, {"tasks": 4})
    row = Row("fot", "fot", runs[:3])
    first, second = row.matrices("accuracy")
    np.testing.assert_allclose(first, (runs[0].run.matrix + runs[2].run.matrix).numpy() / 2)
    np.testing.assert_allclose(second, runs[1].run.matrix.numpy())
    assert Row("fot", "fot", runs).matrices("accuracy") == []
    assert row.matrices("nll") == []


def test_the_mean_over_tasks_seen_is_acc(tmp_path: Path) -> None:
    (reading,) = readings(tmp_path, {"tasks": 5, "rounds": 10})
    expected = [average_accuracy(reading.run.matrix, t).item() for t in range(5)]
    np.testing.assert_allclose(means_over_tasks_seen(reading.run.matrix.numpy()), expected)


def test_transfers_of_nll_are_good_where_it_falls(tmp_path: Path) -> None:
    """Worked by hand: tasks 0 and 1 rise by 10 and 15; tasks 1 and 2 fall by 8 before they are learned."""
    reading = read(make_density_run(tmp_path / "run"), [])
    n = torch.tensor([[70, 90, 95], [85, 60, 88], [80, 75, 50]], dtype=torch.float64)
    for initial, fwt in ((torch.tensor([100.0, 98.0, 96.0]), 8.0), (None, None)):
        known = replace(reading, run=replace(reading.run, matrix=n, initial=initial))
        assert [figure_of(known, f"nll_{name}") for name in ("fgt", "bwt", "fwt")] == [12.5, -12.5, fwt]
    others = {**reading.run.others, "clients_evaluated": 3}  # a mean over clients does not follow from the mean matrix
    assert figure_of(replace(reading, run=replace(reading.run, others=others)), "nll_fgt") is None


def test_a_mean_that_is_undefined_at_the_end_is_not_that_of_an_earlier_task(tmp_path: Path) -> None:
    """For example the last task's test images have no boxes."""
    (reading,) = readings(tmp_path, {"nll": True})
    matrix = reading.matrices["nll"].copy()
    matrix[:, -1] = np.nan
    run = replace(reading.run, others={**reading.run.others, "nll": None})
    assert figure_of(replace(reading, run=run, matrices={"nll": matrix}), "nll") is None
