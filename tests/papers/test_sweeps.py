"""Sweeps: grids, the coarse-then-fine search, and which candidate is chosen."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paper_tables import resolver, write_run

from cfl.papers.command import main
from cfl.papers.recipes import CONFIGS
from cfl.papers.results import Results, read_results
from cfl.papers.sweeps import Search, SweepState, read_sweep
from cfl.running.jobs import Job
from cfl.running.launcher import Launcher
from cfl.running.runner import Outcome, Runner
from cfl.runtime.errors import ConfigError

ENTRY: dict[str, Any] = {
    "paper": "fot",
    "point": {"benchmark": "pmnist", "partition": "shards", "method": "fot"},
    "scale": "short",
    "seeds": 2,
    "grid": {"methods.fot.threshold": [0.8, 0.9, 0.95]},
}


def finish(words: list[str]) -> Path:
    """Replace the folder that a runner has made by the finished run of its command; return the folder."""
    folder = Path(words[-2].removeprefix("--run.dir="))
    (folder / ".lock").unlink()
    log = (folder / "log.txt").rename(folder.parent / "log.txt")  # the runner has this file open
    folder.rmdir()
    write_run(folder, words[1:-3], 0, 70.0)
    log.rename(folder / "log.txt")
    return folder


def sweep_file(folder: Path, **changes: Any) -> Path:
    path = folder / "sweep.yaml"
    entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(entry))
    return path


@pytest.mark.parametrize("path", sorted((CONFIGS / "papers").glob("*/sweeps/*.yaml")), ids=lambda path: path.name)
def test_the_projects_sweeps_can_be_run(path: Path) -> None:
    read_sweep(path).check(resolver())
    state = SweepState(read_sweep(path), resolver(), Results([]))
    assert state.jobs(Path("runs"))
    assert state.chosen is None


def test_a_grid_runs_what_is_missing_and_chooses_the_highest_mean(tmp_path: Path) -> None:
    sweep = read_sweep(sweep_file(tmp_path))
    state = SweepState(sweep, resolver(), Results([]))
    jobs = state.jobs(tmp_path)
    assert [job.name for job in jobs] == [f"sweep threshold {v} seed {s}" for v in (0.8, 0.9, 0.95) for s in (0, 1)]
    assert state.chosen is None
    assert "nothing is chosen" in state.markdown()
    scores = {0.8: (70.0, 72.0), 0.9: (60.0, 90.0), 0.95: (75.0, 75.0)}  # means 71, 75, 75: of equals the first
    for job in jobs[:-1]:
        threshold, seed = float(job.name.split()[2]), int(job.name.split()[-1])
        write_run(job.folder, job.arguments, seed, scores[threshold][seed])
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert [job.folder for job in state.jobs(tmp_path)] == [jobs[-1].folder]
    assert state.chosen is None
    write_run(jobs[-1].folder, jobs[-1].arguments, 1, 75.0)
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert state.jobs(tmp_path) == []
    assert state.chosen == (("methods.fot.threshold", 0.9),)
    assert (
        "# chosen: threshold 0.9 by sweeps/sweep.yaml (highest acc, scale short, 2 seeds): 75.00 ± 21.21; "
        "others: threshold 0.8: 71.00 ± 1.41; threshold 0.95: 75.00 ± 0.00\n" in state.markdown()
    )
    assert "| threshold 0.9 **chosen** | 75.00 ± 21.21 | 2 |" in state.markdown()


def test_candidates_may_be_compared_on_validation_samples(tmp_path: Path) -> None:
    settings = {"data.validation": 0.1, "data.evaluate_on": "validation"}
    sweep = read_sweep(sweep_file(tmp_path, seeds=1, set=settings))
    jobs = SweepState(sweep, resolver(), Results([])).jobs(tmp_path)
    for job in jobs:
        assert {f"--{key}={value}" for key, value in settings.items()} <= set(job.arguments)
        write_run(job.folder, job.arguments, 0, 70.0)
    note = SweepState(sweep, resolver(), read_results(tmp_path)).markdown()
    assert "(highest acc on validation samples, scale short, 1 seed): 70.00" in note


def test_values_that_are_no_numbers_are_named_as_on_the_command_line(tmp_path: Path) -> None:
    """YAML's null, true and lists, in the names of runs and in the line for the method's configuration."""
    grid = {"methods.fot.layers": [None, ["fc1", "fc2"]], "methods.fot.threshold": [0.9]}
    sweep = read_sweep(sweep_file(tmp_path, seeds=1, grid=grid))
    jobs = SweepState(sweep, resolver(), Results([])).jobs(tmp_path)
    assert [job.name for job in jobs] == [
        "sweep layers null, threshold 0.9 seed 0",
        'sweep layers ["fc1", "fc2"], threshold 0.9 seed 0',
    ]


def test_lowest_of_another_figure(tmp_path: Path) -> None:
    sweep = read_sweep(sweep_file(tmp_path, seeds=1, select={"value": "fgt", "best": "lowest"}))
    for job, fgt in zip(SweepState(sweep, resolver(), Results([])).jobs(tmp_path), (3.0, 1.0, 2.0), strict=True):
        write_run(job.folder, job.arguments, 0, fgt=fgt)
    assert SweepState(sweep, resolver(), read_results(tmp_path)).chosen == (("methods.fot.threshold", 0.9),)


@pytest.mark.parametrize(("best", "flagged"), [(0.8, True), (0.9, False), (0.95, True)])
def test_an_optimum_at_the_end_of_its_grid_is_flagged(best: float, flagged: bool, tmp_path: Path) -> None:
    """A chosen value that is the lowest or highest of its grid is flagged, in any order of the listed values."""
    sweep = read_sweep(sweep_file(tmp_path, seeds=1, grid={"methods.fot.threshold": [0.9, 0.95, 0.8]}))
    for job in SweepState(sweep, resolver(), Results([])).jobs(tmp_path):
        write_run(job.folder, job.arguments, 0, 80.0 if f" {best} " in job.name else 70.0)
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert state.chosen == (("methods.fot.threshold", best),)
    assert ("1 seed): 80.00, at the end of the grid; others: " in state.markdown()) == flagged
    assert ("1 seed): 80.00; others: " in state.markdown()) != flagged


def test_a_value_that_is_no_number_of_a_run_is_named(tmp_path: Path) -> None:
    """A ``select.value`` that is no number is refused once a run has it, because summaries may have any entry."""
    sweep = read_sweep(sweep_file(tmp_path, seeds=1, select={"value": "benchmark"}))
    (job, *_) = SweepState(sweep, resolver(), Results([])).jobs(tmp_path)
    write_run(job.folder, job.arguments, 0)
    with pytest.raises(ConfigError, match=r"select.value = 'benchmark' cannot work; .* a number, not str"):
        SweepState(sweep, resolver(), read_results(tmp_path))


def test_a_value_that_no_run_records_is_named_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ``select.value`` that no run records stops a sweep after its first run."""
    ran: list[str] = []

    def start(_: Launcher, words: list[str], environment: object, log: int, lock: int) -> subprocess.Popen[bytes]:
        ran.append(words[-2])
        finish(words)
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(Launcher, "start", start)
    path = sweep_file(tmp_path, seeds=1, select={"value": "accc"})
    assert main(["sweep", str(path), "--runs", str(tmp_path / "runs")]) == 2
    assert "select.value = 'accc' cannot work; valid: an expression of what runs record" in capsys.readouterr().err
    assert len(ran) == 1


@pytest.mark.parametrize(("said", "state"), [("to NaN or infinity in round 3", "done"), ("no such file", "open")])
def test_only_a_run_that_diverged_is_a_failed_candidate(
    said: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that diverged counts as the worst candidate, and the sweep ends.

    Any other failure is reported and leaves the sweep unfinished. The same command does not run it again.
    """
    ran: list[str] = []

    def start(_: Launcher, words: list[str], environment: object, log: int, lock: int) -> subprocess.Popen[bytes]:
        ran.append(next(word.partition("=")[2] for word in reversed(words) if "threshold" in word))
        folder = finish(words)
        if ran[-1] == "0.9":
            (folder / "summary.json").unlink()
        script = f"import sys; sys.exit({f'client 1 trained {said}' if ran[-1] == '0.9' else 0!r})"
        return subprocess.Popen([sys.executable, "-S", "-c", script], stderr=log)

    monkeypatch.setattr(Launcher, "start", start)
    path = sweep_file(tmp_path, seeds=1, grid={"methods.fot.threshold": [0.8, 0.9]})
    arguments = ["sweep", str(path), "--runs", str(tmp_path / "runs")]
    status = main(arguments)
    out = capsys.readouterr().out
    assert ran == ["0.8", "0.9"]
    assert status == (0 if state == "done" else 1)
    if state == "done":
        assert "# chosen: threshold 0.8 " in out
        assert "; others: threshold 0.9: diverged" in out
        report = tmp_path / "runs/fot/reports/sweep-sweep.md"
        written = report.read_text()
        assert main([*arguments, "--dry-run"]) == 0
        assert capsys.readouterr().out == "", "there is nothing left to run"
        assert report.read_text() == written
        assert main(arguments) == 0
        assert len(ran) == 2, "it would diverge again"
        assert report.read_text() == written
    else:
        assert "Not finished: nothing is chosen yet." in out
        assert "- sweep threshold 0.9 seed 0" in out


def test_a_finished_run_of_another_experiment_is_not_asked_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run whose configuration is of another experiment is named, and the sweep does not ask for it again."""
    asked: list[Job] = []

    def run(_: Runner, jobs: list[Job]) -> list[Outcome]:
        asked.extend(jobs)
        assert len(asked) == 1
        write_run(jobs[0].folder, [*jobs[0].arguments, "--data.num_clients=3"], 0)
        return [Outcome(jobs[0], "finished", "by another process")]

    monkeypatch.setattr(Runner, "run", run)
    path = sweep_file(tmp_path, seeds=1, grid={"methods.fot.threshold": [0.9]})
    assert main(["sweep", str(path), "--runs", str(tmp_path / "runs")]) == 1
    file = asked[0].folder / "config.yaml"
    said = f"- sweep threshold 0.9 seed 0: {file} is not of the experiment that was asked for"
    assert said in capsys.readouterr().out


def test_a_candidate_that_is_a_tables_run_is_shared(tmp_path: Path) -> None:
    """The threshold 0.96 is Table 1's own, so its experiment is that of the table's cell."""
    sweep = read_sweep(sweep_file(tmp_path, grid={"methods.fot.threshold": [0.96]}, seeds=1))
    base = list(sweep.base.arguments)
    (job,) = SweepState(sweep, resolver(), Results([])).jobs(tmp_path)
    assert job.experiment == resolver().experiment(base)


@pytest.mark.parametrize("optimum", [0.003, 0.02, 1.0, 5.0, 37.0, 450.0])
def test_search_finds_the_best_power_then_the_best_double(optimum: float) -> None:
    """On a score with one maximum, the value found is at most a factor of sqrt(2) from it."""
    tried: list[float] = []

    def score(value: float) -> float:
        tried.append(value)
        return -abs(math.log(value / optimum))

    best = Search("key", 1.0, (10, 2), steps=4).run(score)
    assert best is not None
    assert max(best / optimum, optimum / best) <= math.sqrt(2) * 1.001
    assert len(tried) < 20
    assert best == min(list(tried), key=lambda value: abs(math.log(value / optimum)))


def test_search_stops_where_a_value_is_not_known_yet() -> None:
    known = {1.0: 5.0, 10.0: 6.0}
    asked: list[float] = []

    def score(value: float) -> float | None:
        asked.append(value)
        return known.get(value)

    assert Search("key", 1.0).run(score) is None
    assert asked == [1.0, 10.0, 100.0]


def test_search_steps_over_values_of_no_use() -> None:
    """A search continues past values with a score of -inf until one is finite; then such a value ends a direction."""
    tried: list[float] = []

    def score(value: float) -> float:
        tried.append(value)
        return -abs(math.log(value / 0.02)) if value < 0.5 else -math.inf

    assert Search("key", 10.0, (10, 2), steps=3).run(score) == 0.02
    assert tried == [10, 100, 1000, 10_000, 1, 0.1, 0.01, 0.02, 0.04, 0.005]


def sweep_for_rounds(folder: Path, **changes: Any) -> Path:
    point = {"benchmark": "mnist", "epochs": "50", "method": "fedcurv"}
    select = {"value": 'rounds_to("90")', "best": "lowest"}
    return sweep_file(folder, **{"paper": "fedcurv", "point": point, "select": select, "seeds": 1, **changes})


def write_rounds(job: Job, seed: int, to_90: int | None) -> None:
    """Write a run that reaches 90 % in round ``to_90``, counted from 1, or only 89 % after ten rounds if it is None."""
    curve = [50.0] * 9 + [89.0] if to_90 is None else [50.0] * (to_90 - 1) + [90.0]
    write_run(job.folder, job.arguments, seed, matrix=[[90.0]], rounds=len(curve))
    rows = ["round,clients,acc", *(f"{r},24,{acc}" for r, acc in enumerate(curve))]
    (job.folder / "rounds.csv").write_text("\n".join(rows) + "\n")


def test_a_run_that_never_gets_there_is_worse_than_any_number(tmp_path: Path) -> None:
    """A candidate with a seed that never reaches the accuracy is the worst, even if its other seed is the best."""
    grid = {"methods.fedcurv.strength": [4.0, 1.0, 0.5, 0.25]}
    sweep = read_sweep(sweep_for_rounds(tmp_path, grid=grid, seeds=2))
    rounds = [None, 1, 9, 8, 7, 9, 9, 10]  # 4.0: never, 1. 1.0: 9, 8. 0.5: 7, 9. 0.25: 9, 10
    for job, count in zip(SweepState(sweep, resolver(), Results([])).jobs(tmp_path), rounds, strict=True):
        write_rounds(job, int(job.name.split()[-1]), count)
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert state.jobs(tmp_path) == []
    assert state.chosen == (("methods.fedcurv.strength", 0.5),)
    assert "| strength 4.0 | 1.00; never within 10 rounds | 2 |" in state.markdown()
    assert "| strength 0.5 **chosen** | 8.00 ± 1.41 | 2 |" in state.markdown()


@pytest.mark.parametrize("shape", ["grid", "search"])
def test_where_no_run_gets_there_nothing_is_chosen(shape: str, tmp_path: Path) -> None:
    key = "methods.fedcurv.strength"
    ways = {"grid": {key: [1.0, 0.1]}, "search": {"key": key, "start": 1.0, "factor": [10], "steps": 1}}
    sweep = read_sweep(sweep_for_rounds(tmp_path, **{"grid": None, shape: ways[shape]}))
    for _ in range(4):
        for job in SweepState(sweep, resolver(), read_results(tmp_path)).jobs(tmp_path):
            write_rounds(job, 0, None)
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert state.chosen is None
    assert "No candidate has a value: nothing is chosen." in state.markdown()


def test_a_failed_run_is_the_worst_and_not_asked_for_again(tmp_path: Path) -> None:
    search = {"key": "methods.fedcurv.strength", "start": 1.0, "factor": [10], "steps": 2}
    sweep = read_sweep(sweep_for_rounds(tmp_path, grid=None, search=search))
    asked = []
    for _ in range(6):
        for job in SweepState(sweep, resolver(), read_results(tmp_path)).jobs(tmp_path):
            asked.append(float(job.name.split()[2]))
            if asked[-1] > 1:  # diverges
                write_run(job.folder, job.arguments, 0)
                (job.folder / "summary.json").unlink()
                (job.folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
            else:
                write_rounds(job, 0, {1.0: 5, 0.1: 4, 0.01: 6}[asked[-1]])
    assert asked == [1.0, 10.0, 0.1, 0.01]
    state = SweepState(sweep, resolver(), read_results(tmp_path))
    assert state.chosen == (("methods.fedcurv.strength", 0.1),)
    assert "| strength 10.0 | diverged | 1 |" in state.markdown()


def test_a_search_goes_on_until_it_is_over(tmp_path: Path) -> None:
    """A search that is asked again after its runs are made goes on until it has a result, as in the command."""
    search = {"key": "schedule.batch_size", "start": 8, "factor": [2], "steps": 2}
    sweep = read_sweep(sweep_file(tmp_path, grid=None, search=search, seeds=1))
    scores = {8: 60.0, 16: 70.0, 32: 65.0, 4: 50.0}
    asked = []
    for _ in range(6):
        state = SweepState(sweep, resolver(), read_results(tmp_path))
        jobs = state.jobs(tmp_path)
        if not jobs:
            break
        for job in jobs:
            value = int(job.name.split()[-3])
            asked.append(value)
            write_run(job.folder, job.arguments, 0, scores[value])
    assert asked == [8, 16, 32, 4]
    assert state.chosen == (("schedule.batch_size", 16),)


@pytest.mark.parametrize("option", ["--dry-run", "--jobs=1"])
@pytest.mark.parametrize(
    "changes",
    [
        {"grid": {"methods.fot.threshold": [0.9, 1.5]}},
        {"grid": None, "search": {"key": "methods.fot.threshold", "start": 1.5}},
        {"grid": {"schedule.batch_size": [16, 0]}},
        {"grid": {"buffer.size": [-1]}},
    ],
)
def test_a_value_that_a_constructor_refuses_is_told_before_anything_is_run(
    changes: dict[str, Any],
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cfl.papers.command.Runner.run", lambda *_: pytest.fail("something is run"))
    file = sweep_file(tmp_path, **changes)
    assert main(["sweep", str(file), f"--runs={tmp_path / 'runs'}", option]) == 2
    assert "cannot work; valid: " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_sweep_of_files_alone(tmp_path: Path) -> None:
    path = sweep_file(
        tmp_path, point=None, configs=["benchmarks/pmnist.yaml"], set={"schedule.rounds_per_task": 2}, grid={"a": [1]}
    )
    assert read_sweep(path).base.arguments[1:] == ("--schedule.rounds_per_task=2",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gird": {}}, "one of paper, point"),
        ({"paper": "none"}, "one of .*fot"),
        ({"scale": "tiny"}, "one of paper, short, smoke"),
        ({"seeds": 0}, "at least 1"),
        ({"search": {"key": "a", "start": 1}}, "either grid or search"),
        ({"grid": None}, "either grid or search"),
        ({"grid": None, "search": {"key": "a", "start": 0}}, "above 0"),
        ({"grid": None, "search": {"key": "a", "start": 1, "factor": [1]}}, "above 1"),
        ({"grid": None, "search": {"key": "a", "start": 1, "by": 2}}, "one of key, start"),
        ({"select": {"value": "import os"}}, "an expression"),
        ({"select": {"best": "nicest"}}, "one of highest, lowest"),
        ({"point": None}, "or configs"),
        ({"point": [1]}, "point.*a mapping"),
        (
            {"point": {"benchmark": "pmnist", "partitoin": "iid"}},
            "point.partitoin.*one of the axes benchmark, partition",
        ),
        # Axes of single tables, whose rules are no part of a sweep.
        ({"point": {**ENTRY["point"], "threshold": "0.80"}}, "point.threshold.*one of the axes .*under configs or set"),
        ({"point": {**ENTRY["point"], "variant": "dp"}}, "point.variant.*one of the axes"),
        ({"point": {"benchmark": "pmnist", "partition": "IID"}}, "point.partition.*one of iid, shards"),
        ({"point": {"benchmark": "pmnist", "scale": "paper"}}, "point.scale.*one of the axes"),
        ({"grid": None, "search": {"key": "a", "start": 10**400}}, "search.start.*above 0"),
        ({"set": 3}, "set.*a mapping"),
        ({"paper": ["fot"]}, "one of .*fot"),
        ({"scale": ["short"]}, "one of paper, short, smoke"),
        ({"seeds": True}, "at least 1"),
        ({"configs": "benchmarks/pmnist.yaml"}, "a list of files"),
        ({"grid": ["a"]}, "grid.*a mapping"),
        ({"grid": {}}, "config keys with a list"),
        ({"grid": {"a": []}}, "at least one value"),
        ({"grid": None, "search": 3}, "search.*a mapping"),
        ({"grid": None, "search": {"start": 1}}, "a config key"),
        ({"grid": None, "search": {"key": "a"}}, "search.start.*above 0"),
        ({"grid": None, "search": {"key": "a", "start": "1"}}, "search.start.*above 0"),
        ({"grid": None, "search": {"key": "a", "start": 1, "factor": 10}}, "above 1"),
        ({"grid": None, "search": {"key": "a", "start": 1, "steps": "2"}}, "search.steps.*at least 1"),
        ({"select": "acc"}, "select.*a mapping"),
        ({"select": {"value": 1}}, "an expression"),
        ({"select": {"value": "averages"}}, "select.value = 'averages' .* a number, not a list"),
        ({"select": {"value": "mean"}}, "select.value = 'mean' .* a number"),
        ({"select": {"value": "mean()"}}, r"select.value = 'mean\(\)' .* a number"),
        ({"select": {"value": "meen(diagonal)"}}, "select.value = .* not understood"),
        ({"select": {"value": "'acc'"}}, "select.value = .* a number, not str"),
        ({"select": {"worst": "acc"}}, "one of value, best"),
    ],
)
def test_bad_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(sweep_file(tmp_path, **changes))


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("grid: [1", encoding="utf-8")
    with pytest.raises(ConfigError, match="a YAML file"):
        read_sweep(path)
