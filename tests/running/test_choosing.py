"""``cfl sweep --choose``: what is chosen by which runs, and that the same command goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from support import tiny_cli
from support.paper_tables import resolver, write_run

from cfl.__main__ import main
from cfl.running.jobs import Job
from cfl.running.launcher import Launcher
from cfl.running.runner import Outcome, Runner

LRS = ("0.1", "0.2", "0.4")
OPTIONS = ("--config", str(tiny_cli.TINY), "--methods", "fedavg,fot", "--set", f"model.optimizer.lr={','.join(LRS)}",
           "--data.validation=0.2", "--seeds", "2", "--choose-seeds", "10-11")  # fmt: skip
Figures = Mapping[str, float | None] | str | None


class Made:
    """Stands for the runner: writes made-up runs and remembers them.

    Attributes:
        figures: (method, lr, seed) -> figures of the summary; None diverges, a text is another failure.
        jobs: the runs that were made.
        mended: for functions of figures that fail at first.
    """

    def __init__(self) -> None:
        self.figures: Callable[[str, float, int], Figures] = lambda method, lr, seed: {}
        self.jobs: list[Job] = []
        self.mended = False

    def run(self, _: Runner, jobs: Sequence[Job]) -> list[Outcome]:
        return [self._one(job) for job in jobs]

    def _one(self, job: Job) -> Outcome:
        self.jobs.append(job)
        (method,) = job.config["methods"] or ["fedavg"]
        seed = int(job.arguments[-1].partition("=")[2])
        found = self.figures(method, job.config["model"]["optimizer"]["init_args"]["lr"], seed)
        if isinstance(found, str):
            return Outcome(job, "failed", found)
        matrix = [[(found or {}).get("acc") or 80.0]]
        write_run(job.folder, job.arguments[:-1], seed, **{"acc": 80.0, "matrix": matrix, **(found or {})})
        if found is None:
            (job.folder / "summary.json").unlink()
            (job.folder / "log.txt").write_text("error: client 3 trained to NaN or infinity in round 7\n")
            return Outcome(job, "failed", "exit status 2\nNaN", diverged=True)
        return Outcome(job, "finished")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr("cfl.running.sweep.Resolver", resolver)
    monkeypatch.setattr(Launcher, "begin", lambda _: None)
    monkeypatch.setattr(Runner, "run", lambda runner, jobs: made.run(runner, jobs))
    return made


def swept(folder: Path, *options: str) -> int:
    return main(["sweep", *OPTIONS, *options, "--out", str(folder)])


def rates_of_tests(made: Made) -> dict[str, set[float]]:
    """Method -> learning rates of the runs on the test sets."""
    found: dict[str, set[float]] = {}
    for job in made.jobs:
        if job.config["data"]["evaluate_on"] == "test":
            (method,) = job.config["methods"] or ["fedavg"]
            found.setdefault(method, set()).add(job.config["model"]["optimizer"]["init_args"]["lr"])
    return found


@pytest.mark.parametrize(("figure", "better"), [("acc", max), ("fgt", min)])
def test_the_tests_have_each_methods_best_values_on_validation_samples(
    figure: str, better: Callable[..., float], made: Made, tmp_path: Path
) -> None:
    """Against means that are taken from the run folders by themselves; a second call makes nothing."""
    values = {"fedavg": (70, 90, 60, 61, 72, 74), "fot": (50, 54, 40, 62, 80, 10)}

    def figures(method: str, lr: float, seed: int) -> dict[str, float]:
        on_validation = seed >= 10
        return {figure: float(values[method][2 * LRS.index(str(lr)) + seed % 10]) if on_validation else 20.0 + 60 * lr}

    made.figures = figures
    assert swept(tmp_path, "--choose", figure) == 0
    means: dict[str, dict[float, list[float]]] = {}
    for file in (tmp_path / "choosing").glob("*/summary.json"):
        config, summary = yaml.safe_load((file.parent / "config.yaml").read_text()), json.loads(file.read_text())
        assert config["data"]["evaluate_on"] == "validation"
        assert config["seed_everything"] in (10, 11)
        lr = config["model"]["optimizer"]["init_args"]["lr"]
        means.setdefault(summary["method"], {}).setdefault(lr, []).append(summary[figure])
    best = {method: {better(of, key=lambda lr, of=of: sum(of[lr]))} for method, of in means.items()}
    assert rates_of_tests(made) == best
    assert len(made.jobs) == 2 * 3 * 2 + 2 * 2
    assert {job.experiment["seed_everything"] for job in made.jobs[12:]} == {0, 1}
    rows = tiny_cli.rows(tmp_path / "means.csv")
    assert {row["row"] for row in rows} == {"FedAvg", "FOT"}
    written = (tmp_path / "chosen.md").read_bytes()
    assert swept(tmp_path, "--choose", figure) == 0
    assert len(made.jobs) == 16
    assert (tmp_path / "chosen.md").read_bytes() == written


def test_what_was_chosen_is_said_with_its_candidates_in_file_and_table(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of equal values the first; a value at the end of its grid is flagged."""
    accs = {("fedavg", 0.1): 60.0, ("fedavg", 0.2): 70.0, ("fedavg", 0.4): 70.0}
    made.figures = lambda method, lr, seed: {"acc": accs.get((method, lr), 90 - 100 * lr) + seed % 2}
    assert swept(tmp_path, "--choose", "acc") == 0
    fedavg = "fedavg: lr 0.2 has the highest acc on validation samples (seeds 10, 11) among lr 0.1, 0.2, 0.4"
    fot = "fot: lr 0.1 has the highest acc on validation samples (seeds 10, 11) among lr 0.1, 0.2, 0.4"
    end = "; lr 0.1 is at an end of what was tried, a better value may lie beyond"
    for name in ("comparison.md", "comparison.tex"):
        lines = [line.lstrip("> %").removeprefix("NOTE: ") for line in (tmp_path / name).read_text().splitlines()]
        assert {fedavg, fot + end} <= set(lines)
    said = (tmp_path / "chosen.md").read_text()
    assert (
        "| lr 0.1 | 60.50 ± 0.71 | 2 |\n| lr 0.2 **chosen** | 70.50 ± 0.71 | 2 |\n| lr 0.4 | 70.50 ± 0.71 | 2 |" in said
    )
    assert said.count("may lie beyond") == 1
    assert end in capsys.readouterr().out.replace("\n", "")


def test_a_setting_that_diverged_or_has_no_value_is_the_worst(made: Made, tmp_path: Path) -> None:
    """A setting with one bad seed is not chosen, however good the other; that is no failure of the sweep."""

    def figures(method: str, lr: float, seed: int) -> Figures:
        if lr == 0.4 and seed == 11:
            return None if method == "fedavg" else {"bwt": None}
        return {"bwt": {0.1: -9.0, 0.2: -8.0, 0.4: 50.0}[lr]}

    made.figures = figures
    assert swept(tmp_path, "--choose", "bwt") == 0
    assert rates_of_tests(made) == {"fedavg": {0.2}, "fot": {0.2}}
    said = (tmp_path / "chosen.md").read_text()
    assert "| lr 0.4 | 50.00; diverged | 2 |" in said
    assert "| lr 0.4 | 50.00; undefined | 2 |" in said
    count = len(made.jobs)
    assert swept(tmp_path, "--choose", "bwt") == 0
    assert len(made.jobs) == count


def test_a_method_without_any_value_is_not_tested(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.figures = lambda method, lr, seed: None if method == "fot" else {"acc": 100 * lr}
    assert swept(tmp_path, "--choose", "acc") == 1
    assert rates_of_tests(made) == {"fedavg": {0.4}}
    assert "no result of fot: nothing is chosen: no combination has a value\n" in capsys.readouterr().out


def test_a_failed_run_leaves_its_method_unfinished_until_it_is_made(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(method: str, lr: float, seed: int) -> Figures:
        failing = not made.mended and (method, lr, seed) == ("fot", 0.2, 11)
        return "exit status 1\nno such file" if failing else {"acc": 100 * lr}

    made.figures = figures
    assert swept(tmp_path, "--choose", "acc") == 1
    assert rates_of_tests(made) == {"fedavg": {0.4}}
    said = capsys.readouterr().out
    assert "no result of fot, lr 0.2 on validation samples seed 11: failed, exit status 1: no such file\n" in said
    assert "no result of fot: nothing is chosen: runs that choose are lacking\n" in said
    made.jobs.clear()
    assert swept(tmp_path, "--choose", "acc", "--dry-run") == 0
    said = capsys.readouterr().out
    assert said.startswith("cfl fit ")
    assert said.count("--data.evaluate_on=validation --seed_everything=11") == said.count("cfl fit") == 1
    assert not made.jobs
    made.mended = True
    assert swept(tmp_path, "--choose", "acc") == 0
    assert len(made.jobs) == 1 + 2
    assert rates_of_tests(made) == {"fot": {0.4}}


def test_a_method_with_nothing_to_choose_is_tested_at_once(made: Made, tmp_path: Path) -> None:
    """FedAvg has no option of FOT's, so it has one combination, and no runs choose."""
    made.figures = lambda method, lr, seed: {"acc": 100 * lr}
    words = ["sweep", "--config", str(tiny_cli.TINY), "--methods", "fedavg,fot", "--data.validation=0.2"]
    words += ["--set", "methods.fot.threshold=0.9,0.95", "--choose", "acc", "--out", str(tmp_path)]
    assert main(words) == 0
    names = [job.name for job in made.jobs]
    assert names == [
        "fot, threshold 0.9 on validation samples seed 1000",
        "fot, threshold 0.95 on validation samples seed 1000",
        "fedavg seed 0",
        "fot, threshold 0.9 seed 0",
    ]
    assert "## fedavg\n\nOne combination of values: nothing to choose.\n" in (tmp_path / "chosen.md").read_text()
