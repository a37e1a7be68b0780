"""Where the data say whose test samples are, a run tells the accuracy of the model at each client."""

from __future__ import annotations

import copy
import csv
import math
import tracemalloc
from fractions import Fraction
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support import tiny_cli
from support.naive import plain_network
from support.tiny import Owned, Rounds, SaveAfter, fit, kept_by, mlp, tiny_client, tiny_data
from torch import Tensor
from torch.func import functional_call

from cfl.__main__ import main
from cfl.callbacks.run_figures import figures_by_owner, rows_by_owner, run_figures
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import IID, Natural
from cfl.data.streams import ClassSplit, Permuted
from cfl.methods import PersonalLayers
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.training.access import federation_of

CLIENTS, TASKS = 5, 2


def data_of(scenario: Any = "domain", **options: Any) -> FederatedDataModule:
    stream = (Permuted if scenario == "domain" else ClassSplit)(Owned(), TASKS)
    settings = {"partition": Natural(), "num_clients": CLIENTS, "scenario": scenario, "eval_batch_size": 7, **options}
    return tiny_data(stream, **settings)


def counted(logits: Tensor, y: Tensor, owners: Tensor) -> list[tuple[int, int]]:
    """For each client, (right answers, answers) among the samples that it owns."""
    found = [[0, 0] for _ in range(CLIENTS)]
    for scores, label, owner in zip(logits.tolist(), y.tolist(), owners.tolist(), strict=True):
        found[owner][0] += max(range(len(scores)), key=scores.__getitem__) == label
        found[owner][1] += 1
    return [(right, of) for right, of in found]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize("scenario", ["domain", "task", "class"])
def test_each_client_is_tested_on_its_own_samples(scenario: str, personal: bool, shuffled: bool) -> None:
    """Counts and figures are those of predictions, one client's samples at a time, with plain PyTorch."""
    data = data_of(scenario, eval_shuffle=shuffled, schedule={"rounds_per_task": 1})
    methods: Any = {"own": PersonalLayers(["head.*"])} if personal else {}
    client, models = tiny_client(data, methods=methods), Rounds()
    federation = fit(client, data, callbacks=[models])
    network = plain_network(data, mlp, copy.deepcopy(models.models[-1])).eval()
    kept = kept_by(federation)
    assert federation.by_owner is not None
    row, accuracies = TASKS - 1, []
    for c in range(CLIENTS):
        state, of_tasks = {**models.models[-1], **kept.get(c, {})}, []
        for i, task in enumerate(data.tasks):
            first = 2 * i if scenario != "domain" else 0
            with torch.no_grad():
                logits = functional_call(network, state, (task.transform(task.test.images),))
            if scenario == "task":
                logits[:, :first], logits[:, first + 2 :] = -math.inf, -math.inf
            assert task.test.clients is not None
            right, of = counted(logits, task.test.labels + first, task.test.clients)[c]
            assert federation.by_owner.sums[c, row, i] == right
            assert federation.by_owner.counts[c, row, i] == of
            of_tasks.append(100 * right / of)
        accuracies.append(sum(of_tasks) / TASKS)
    figures = figures_by_owner(federation)
    expected = [np.mean(accuracies), np.std(accuracies), min(accuracies)]
    assert list(figures) == ["acc_by_owner", "acc_std_clients_by_owner", "acc_worst_client_by_owner"]
    assert list(figures.values()) == pytest.approx(expected)
    assert len({*accuracies}) > 1, "clients differ"
    if not personal:  # every sample has one owner, so clients' counts add up to the run's
        assert torch.equal(federation.by_owner.sums.sum(0), federation.accuracy.sums)
        assert torch.equal(federation.by_owner.counts.sum(0), federation.accuracy.counts)


def test_callbacks_are_told_after_each_evaluation() -> None:
    """Within tasks, too: the same figures from the counts of right answers, in exact fractions."""
    told: list[dict[str, float]] = []
    expected: list[dict[str, float]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            metrics = trainer.callback_metrics.items()
            told.append({key: float(value) for key, value in metrics if key.endswith("_by_owner")})
            matrix, row = federation_of(pl_module).by_owner, (len(told) - 1) // 2
            assert matrix is not None
            own = [
                sum(Fraction(100 * int(matrix.sums[c, row, i]), int(matrix.counts[c, row, i])) for i in range(row + 1))
                / (row + 1)
                for c in range(CLIENTS)
            ]
            figures = {"acc": fmean(own), "acc_std_clients": pstdev(own), "acc_worst_client": min(own)}
            expected.append({f"cl/{key}_by_owner": float(value) for key, value in figures.items()})

    data = data_of(schedule={"rounds_per_task": 2, "evaluate_every": 1})
    fit(tiny_client(data), data, callbacks=[Watch()])
    assert len(told) == 2 * TASKS
    for one, other in zip(told, expected, strict=True):
        assert one == pytest.approx(other)


def test_clients_with_own_clocks_are_tested_at_the_end_of_their_tasks() -> None:
    data = data_of(schedule={"rounds_per_task": 3, "clock_spread": 0.67})
    federation = fit(tiny_client(data), data)
    assert federation.by_owner is not None
    assert torch.equal(federation.by_owner.counts > 0, federation.accuracy.counts > 0)
    per_client = torch.bincount(data.tasks[0].test.clients, minlength=CLIENTS)
    assert torch.equal(federation.by_owner.counts[:, -2, 0], per_client)


def test_validation_samples_have_owners_too() -> None:
    data = data_of(validation=0.3, evaluate_on="validation", schedule={"rounds_per_task": 1})
    federation = fit(tiny_client(data), data)
    assert federation.by_owner is not None
    for c in range(CLIENTS):
        assert federation.by_owner.counts[c, 0, 0] == len(data.validation_dealt[0][c])


@pytest.mark.filterwarnings("ignore:the data say whose each sample is")
def test_other_runs_have_no_such_figures() -> None:
    """A run whose partition does not follow the data, or whose test samples nobody owns, is as it was."""
    for options in ({"partition": IID()}, {}):
        stream = Permuted(Owned(tests=bool(options)), TASKS)
        data = tiny_data(stream, **{"partition": Natural(), "num_clients": CLIENTS, **options})
        federation = fit(tiny_client(data), data)
        assert federation.by_owner is None
        assert rows_by_owner(federation) == []
        assert not [
            key for key in run_figures(federation, "", "", {}, torch.device("cpu")) if key.endswith("_by_owner")
        ]
        assert "accuracy_by_owner" not in federation.state_dict()
        assert "test clients" not in data.digests


def test_a_resumed_run_has_the_same_counts(tmp_path: Path) -> None:
    data = data_of()
    straight = fit(tiny_client(data), data, callbacks=[SaveAfter(3, tmp_path / "c.ckpt")])
    again = data_of()
    resumed = fit(tiny_client(again), again, ckpt_path=tmp_path / "c.ckpt")
    assert rows_by_owner(resumed) == rows_by_owner(straight) != []
    assert figures_by_owner(resumed) == figures_by_owner(straight)


def test_rows_hold_no_more_than_the_clients_with_samples() -> None:
    """The rows are those of a walk over the matrix, without a Python number for each of its 400,000 empty entries."""
    matrix = AccuracyMatrix(10, 4000)
    for client, after, task, right in ((7, 0, 3, 2), (3999, 1, 0, 4), (7, 1, 3, 0), (3, 1, 3, 1)):
        matrix.counts[client, after, task], matrix.sums[client, after, task] = 4, right
    data = tiny_data()
    federation: Any = SimpleNamespace(by_owner=matrix, data=data)
    assert data.tasks
    tracemalloc.start()
    found = rows_by_owner(federation)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [tuple(row.values()) for row in found] == [
        (0, 3, 7, 7, 4, 50.0),
        (1, 0, 3999, 3999, 4, 100.0),
        (1, 3, 3, 3, 4, 25.0),
        (1, 3, 7, 7, 4, 0.0),
    ]
    assert most < 1e6


def test_samples_of_others_are_not_counted() -> None:
    matrix = AccuracyMatrix(1, 2)
    outputs, y = torch.eye(4), torch.tensor([0, 1, 2, 0])
    matrix.add_by_owner(0, 0, outputs, y, None, torch.tensor([1, -1, 2, 1]))
    assert matrix.sums[:, 0, 0].tolist() == [0, 1]
    assert matrix.counts[:, 0, 0].tolist() == [0, 2]


# A table of hospitals.

HOSPITALS = ["east", "north", "west"]


def table(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """A table of three hospitals; "east" has no test rows of class b, and "a new one" has only test rows."""
    draw, rows = np.random.default_rng(3), []
    for number in range(160):
        kind, part = "ab"[number % 2], "test" if number % 4 > 1 else "train"
        hospital = HOSPITALS[int(draw.integers(0, 3))]
        if part == "test" and number % 7 == 0:
            hospital = "a new one"
        if (part, kind, hospital) == ("test", "b", "east"):
            hospital = "west"
        year = 2020 + number // 80
        x = draw.normal(size=3) + (kind == "b") * (0.3 + HOSPITALS.index("west") * (hospital == "west"))
        rows.append(
            {"kind": kind, "hospital": hospital, "part": part, "year": year}
            | {f"x{k}": round(float(value), 3) for k, value in enumerate(x)}
        )
    with (folder / "visits.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / "visits.csv"), rows


def test_a_run_on_a_table_tells_the_accuracy_at_each_hospital(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tests_by_owner.csv`` has what ``cfl predict`` says of a hospital's rows; a changed owner is found out."""
    path, rows = table(tmp_path)
    run = tmp_path / "run"
    of_source = {"path": path, "label": "kind", "client": "hospital", "part": "part", "task": "year"}
    options = [f"--data.stream.source.{key}={value}" for key, value in of_source.items()]
    given = ("--data.stream=NaturalTasks", "--data.stream.source=CsvTable", *options, "--data.partition=Natural")
    with pytest.warns(UserWarning, match="test samples are of clients without training samples"):
        assert tiny_cli.fit(run, *given, "--data.num_clients=3", "--schedule.rounds_per_task=2") == 0
    assert "ACC of clients on their own test samples: mean " in capsys.readouterr().out
    told = {
        (int(row["after_task"]), int(row["task"]), row["name"]): row
        for row in tiny_cli.rows(run / "tests_by_owner.csv")
    }
    assert {name for _, _, name in told} == {*HOSPITALS}
    by_hospital: dict[str, list[float]] = {name: [] for name in HOSPITALS}
    for task, year in enumerate((2020, 2021)):
        for client, name in enumerate(HOSPITALS):
            own = [r for r in rows if (r["part"], r["year"], r["hospital"]) == ("test", year, name)]
            with (tmp_path / "own.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, ["x0", "x1", "x2"], extrasaction="ignore")
                writer.writeheader()
                writer.writerows(own)
            out = tmp_path / "said.csv"
            arguments = ["--ckpt_path", str(run / "last.ckpt"), str(tmp_path / "own.csv"), "--out", str(out)]
            with tiny_cli.shortened(["validate"]):
                assert main(["predict", *arguments]) == 0
            said = [row["class"] for row in tiny_cli.rows(out)]
            right = sum(one == row["kind"] for one, row in zip(said, own, strict=True))
            line = told[1, task, name]
            assert (int(line["client"]), int(line["samples"])) == (client, len(own))
            assert float(line["accuracy"]) == pytest.approx(100 * right / len(own))
            by_hospital[name].append(100 * right / len(own))
    summary = tiny_cli.summary(run)
    means = [sum(of) / 2 for of in by_hospital.values()]
    assert summary["acc_worst_client_by_owner"] == pytest.approx(min(means))
    assert summary["acc_by_owner"] == pytest.approx(sum(means) / 3)
    assert "tests_by_owner.csv" in (run / "SHA256SUMS").read_text()
    text = Path(path).read_text()
    first = next(r for r in rows if (r["part"], r["hospital"]) == ("test", "north"))
    before = ",".join(str(value) for value in first.values())
    Path(path).write_text(text.replace(before, before.replace("north", "west", 1)))
    assert tiny_cli.run("validate", "--ckpt_path", str(run / "last.ckpt")) == 2
    assert "those of test clients have changed since" in capsys.readouterr().err
