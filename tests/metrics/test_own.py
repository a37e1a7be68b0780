"""Measures of a user's own: the code and commands in the documentation page work, and values are those of the model."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support import tiny_cli
from support.made_up import make_run
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassCalibrationError
from torchmetrics.regression import MeanAbsoluteError

import cfl
from cfl.callbacks.checkpoint import RoundCheckpoint
from cfl.cli.main import restored
from cfl.metrics.own import OwnMatrix
from cfl.metrics.transfer import transfers
from cfl.reporting.compare.command import main as compare
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.run_folder import read_run
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-measure.md").read_text()
CALIBRATION = f"torchmetrics.classification.{MulticlassCalibrationError.__name__}"
TOP2 = ("--measures.top2", "my_measures.Top", "--measures.top2.k", "2")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    place = tmp_path / "modules"
    place.mkdir()
    (place / "my_measures.py").write_text(code)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "my_measures", raising=False)
    return place


def matrix_of(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    values, initial = read_matrix_csv(folder / f"measures.{name}_matrix.csv")
    assert initial is not None
    return values, initial


def share_of_top(scores: np.ndarray, classes: np.ndarray, k: int) -> float:
    """Percent of samples with fewer than k outputs above that of their class."""
    above = [(row > row[label]).sum() for row, label in zip(scores, classes, strict=True)]
    return 100 * float(np.mean(np.array(above) < k))


@pytest.mark.parametrize("number", [0, 1])
def test_the_printed_commands_run(number: int, tmp_path: Path) -> None:
    printed = re.findall(r"cfl (fit .*?)\n\n", PAGE, re.DOTALL)[number]
    command = shlex.split(printed.replace("\\\n", " "))
    short = ("--schedule.rounds_per_task", "1", "--data.stream.num_tasks", "2", "--trainer.accelerator", "cpu")
    assert tiny_cli.run(*command, *short, "--run.dir", str(tmp_path / "run")) == 0
    names = [["calibration"], ["top3", "balanced"]][number]
    assert [*tiny_cli.summary(tmp_path / "run")["measures"]] == names
    assert all(bool(matrix_of(tmp_path / "run", name)[0].isfinite().all()) for name in names)


@pytest.mark.parametrize("scenario", ["domain", "task", "class"])
def test_values_are_those_of_the_model(scenario: str, tmp_path: Path) -> None:
    """The last row is computed once more from the model's outputs, among those outputs that tests choose from."""
    own = (*TOP2, "--measures.balanced", "my_measures.BalancedAccuracy")
    assert tiny_cli.fit(tmp_path / "run", "--data.scenario", scenario, *own) == 0
    client, *_ = restored(["--ckpt_path", str(tmp_path / "run" / "last.ckpt"), "--allow=my_measures"])
    data = client.require_federation().data
    allowed = data.outputs.test_after(1)
    for task in range(2):
        inputs, labels = data.inputs.of_test_set(task, slice(None), torch.device("cpu"), False)
        classes = labels.numpy()
        with torch.no_grad():
            scores = client.network.double()(inputs.double()).numpy()
        if allowed is not None:
            scores[:, ~allowed[task].numpy()] = -np.inf
        expected = share_of_top(scores, classes, 2)
        assert matrix_of(tmp_path / "run", "top2")[0][1, task].item() == pytest.approx(expected, abs=1e-4)
        right = scores.argmax(1) == classes
        balanced = 100 * np.mean([right[classes == one].mean() for one in np.unique(classes)])
        assert matrix_of(tmp_path / "run", "balanced")[0][1, task].item() == pytest.approx(balanced, abs=1e-4)
    summary = tiny_cli.summary(tmp_path / "run")
    a, b = matrix_of(tmp_path / "run", "top2")
    assert summary["measures.top2"] == pytest.approx(a[1].mean().item())
    assert summary["measures.top2.fgt"] == pytest.approx((a[0, 0] - a[1, 0]).item())
    assert summary["measures.top2.bwt"] == pytest.approx((a[1, 0] - a[0, 0]).item())
    assert summary["measures.top2.fwt"] == pytest.approx((a[0, 1] - b[1]).item())


def test_the_table_of_rounds_has_them(tmp_path: Path) -> None:
    """As accuracies: the mean and the value on each task after every evaluation, empty in other rounds."""
    assert tiny_cli.fit(tmp_path / "every", *TOP2, "--schedule.evaluate_every", "1") == 0
    assert tiny_cli.fit(tmp_path / "ends", *TOP2) == 0
    every, ends = (tiny_cli.rows(tmp_path / name / "rounds.csv") for name in ("every", "ends"))
    matrix, _ = matrix_of(tmp_path / "every", "top2")
    for row in every:
        values = [float(row[f"measures.top2_task_{task}"]) for task in range(2)]
        task = int(row["task"])
        assert float(row["measures.top2"]) == pytest.approx(sum(values[: task + 1]) / (task + 1))
        assert all(top2 >= float(row[f"acc_task_{i}"]) for i, top2 in enumerate(values))  # the answer is among the two
    assert [float(every[2][f"measures.top2_task_{task}"]) for task in range(2)] == matrix[0].tolist()
    assert [float(every[5][f"measures.top2_task_{task}"]) for task in range(2)] == matrix[1].tolist()
    of_measure = [name for name in ends[0] if "top2" in name]
    for number, row in enumerate(ends):
        evaluated = number in (2, 5)
        assert {name: row[name] for name in of_measure} == dict.fromkeys(of_measure, "") | (
            {name: every[number][name] for name in of_measure} if evaluated else {}
        )


def test_training_does_not_notice(tmp_path: Path) -> None:
    """A run with measures has the hash, weights and accuracies of one without."""
    assert tiny_cli.fit(tmp_path / "with", *TOP2) == 0
    assert tiny_cli.fit(tmp_path / "without") == 0
    ours, theirs = (tiny_cli.summary(tmp_path / name) for name in ("with", "without"))
    for key in ("config_hash", "acc", "fgt", "uplink_bytes"):
        assert ours[key] == theirs[key]
    weights, others = (tiny_cli.checkpoint(tmp_path / name)["state_dict"] for name in ("with", "without"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert "measures" not in theirs
    assert not [key for key in tiny_cli.checkpoint(tmp_path / "without")["federation"] if key.startswith("measures")]


class _Half(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.should_stop = pl_module.federation.round == 3


def _half_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: dict[str, Any]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RoundCheckpoint, "_due", lambda *_: True)  # a slow machine may leave out the last one
        with pytest.raises(RunFolderError, match="a callback ended the run"):
            cfl.fit(tiny_cli.TINY, {"run.dir": str(folder)}, *options, callbacks=[_Half()])


def test_a_resumed_run_has_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top2 = {"measures": {"top2": {"class_path": "my_measures.Top", "init_args": {"k": 2}}}}
    assert tiny_cli.fit(tmp_path / "whole", *TOP2, "--measures.top3", "my_measures.Top", "--measures.top3.k", "3") == 0
    _half_a_run(tmp_path / "half", monkeypatch, top2)
    resumed = ("fit", "--ckpt_path", str(tmp_path / "half" / "last.ckpt"), "--allow=my_measures")
    assert tiny_cli.run(*resumed, "--measures.top3", "my_measures.Top", "--measures.top3.k", "3") == 0
    ours, theirs = (matrix_of(tmp_path / name, "top2") for name in ("half", "whole"))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    added, known = (matrix_of(tmp_path / name, "top3")[0] for name in ("half", "whole"))
    assert bool(added[0].isnan().all())
    assert torch.equal(added[1], known[1])
    assert tiny_cli.summary(tmp_path / "half")["measures.top3.fgt"] is None
    ours, theirs = (tiny_cli.rows(tmp_path / name / "rounds.csv") for name in ("half", "whole"))
    columns = [name for name in theirs[0] if "top3" not in name and name != "seconds"]
    assert [name for name in ours[0] if name != "seconds"] == columns  # the table keeps those of its first row
    assert [[row[name] for name in columns] for row in ours] == [[row[name] for name in columns] for row in theirs]


def test_other_options_need_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path / "run", *TOP2) == 0
    again = ("validate", "--ckpt_path", str(tmp_path / "run" / "last.ckpt"), "--allow=my_measures")
    capsys.readouterr()
    assert tiny_cli.run(*again) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^measures.top2 +{tiny_cli.summary(tmp_path / 'run')['measures.top2']:.3f} ", said, re.MULTILINE)
    assert tiny_cli.run(*again, "--measures.top2.k", "3") == 2
    error = capsys.readouterr().err
    assert "measures.top2 = 'my_measures.Top(k=3)' cannot work; valid: my_measures.Top(k=2), as in the chec" in error


def test_a_comparison_needs_no_class(
    tmp_path: Path, module: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the class's file, all that is written has the measure. The method with the lower error is first."""
    runs = tmp_path / "runs"
    error = ("--measures.error", CALIBRATION, "--measures.error.num_classes", "4")
    for method in ((), ("--methods.fedprox", "FedProx")):
        assert tiny_cli.fit(runs / str(len(method)), *TOP2, *error, *method) == 0
    (module / "my_measures.py").unlink()
    monkeypatch.delitem(sys.modules, "my_measures")
    capsys.readouterr()
    assert compare([str(runs), "--out", str(tmp_path / "out"), "--columns", "acc,measures.error"]) == 0
    assert "my_measures" not in sys.modules
    printed = capsys.readouterr().out
    assert {"top2", "error FGT"} <= {*re.findall(r"[┃ ](top2|error FGT) ", printed)}
    for text in (printed, (tmp_path / "out" / "comparison.md").read_text()):
        assert "top2: mean top2 over all tasks at the end; top2 FGT: how much worse tasks" in " ".join(text.split())
    rows = tiny_cli.rows(tmp_path / "out" / "means.csv")
    errors = {row["row"]: row for row in rows if row["figure"] == "measures.error"}
    first, second = sorted(errors.values(), key=lambda row: float(row["mean"]))
    assert float(first["rank"]) <= float(second["rank"])
    for folder, row in (("0", "FedAvg"), ("2", "FedProx")):
        assert float(errors[row]["mean"]) == pytest.approx(tiny_cli.summary(runs / folder)["measures.error"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert '"key":"measures.top2"' in page.replace(" ", "")
    assert "error $\\downarrow$" in (tmp_path / "out" / "comparison.tex").read_text()


@pytest.mark.parametrize("measures", ["top5", ["top5"], {"../x": "higher"}, {"top5": "best"}, {"top5": ["higher"]}])
def test_a_broken_summary_is_refused(measures: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"measures = .* cannot be; valid: names -> higher or lower"):
        read_run(make_run(tmp_path / "run", measures=measures))


def test_clients_with_models_of_their_own_have_their_own_values(tmp_path: Path) -> None:
    personal = ("--methods.personal", "PersonalLayers", "--methods.personal.layers", "['head.*']")
    assert tiny_cli.fit(tmp_path / "run", *personal, *TOP2) == 0
    files = (tmp_path / "run" / "clients").glob("measures.top2_matrix_*.csv")
    of_clients = [read_matrix_csv(file)[0] for file in files]
    assert len(of_clients) == 4
    torch.testing.assert_close(torch.stack(of_clients).nanmean(0), matrix_of(tmp_path / "run", "top2")[0])
    assert tiny_cli.fit(tmp_path / "run", "--run.overwrite", "true") == 0
    assert not [*(tmp_path / "run").rglob("measures.*")]


class Batches(Metric):
    """The mean of batches' means, which depends on the size of batches."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("batches", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, y: Tensor) -> None:
        self.total += (scores.argmax(1) == y).float().mean()
        self.batches += 1

    def compute(self) -> Tensor:
        return self.total / self.batches


class Forgetful(Batches):
    """A metric that keeps what it has counted where torchmetrics does not know of it."""

    def update(self, scores: Tensor, y: Tensor) -> None:
        self.seen = len(y)

    def compute(self) -> Tensor:
        return torch.tensor(self.seen)


class Several(Batches):
    def compute(self) -> Tensor:
        return torch.zeros(2)


class Failing(Batches):
    def update(self, scores: Tensor, y: Tensor) -> None:
        scores.topk(1000)


class Undirected(Batches):
    higher_is_better = None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Batches, r"add up over batches; 0\.[0-9]+ of all samples at once, 0\."),
        (Forgetful, "add up over batches; 67 of all samples at once, 41 of"),
        (Several, r"one number of log-probabilities \[B, O\] and classes \[B\]; .*Error: "),
        (Failing, r"RuntimeError: selected index k out of range \(test_own.py, line \d+\)"),
        (Undirected, "a torchmetrics.Metric with higher_is_better = True, or False"),
    ],
)
def test_metrics_that_cannot_work_are_refused(kind: type[Metric], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"measures.x = .*test_own.{kind.__name__}.* cannot work; valid: .*{said}"):
        OwnMatrix("x", kind(), True, 2).try_out(4, None)


@pytest.mark.parametrize("one", [MetricCollection([MeanMetric()]), lambda scores, y: 0.0])
def test_what_is_no_metric_is_refused(one: Any) -> None:
    with pytest.raises(ConfigError, match=r"measures\.x = .* cannot work; valid: a torchmetrics\.Metric with"):
        OwnMatrix("x", one, True, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--measures.x", "my_measures.No"),
            "measures.x = 'my_measures.No' cannot work; valid: a subclass of Metric",
        ),
        (("--measures.x", "cfl.methods.FOT"), "cfl.methods.FOT is no subclass of Metric"),
        (("--measures.x.k", "2"), "measures.x = 'options without a class' cannot work; valid: names with classes"),
        (("--measures", "my_measures.Top"), "measures = 'my_measures.Top' cannot work; valid: names with classes"),
        ((*TOP2, "--measures.top2.m", "2"), "measures.top2.m is no option of Top; valid: k"),
        ((*TOP2[:3], "many"), "measures.top2.k = 'many' cannot work; valid: an integer"),
        (("--measures.a b", "my_measures.Top"), "measures.a b = 'a b' cannot work; valid: a name of at most 100"),
        (("--measures.x", "my_measures.Top"), "selected index k out of range (my_measures.py, line "),
        ((*TOP2, "--federated.measures", "{}"), "federated.measures = "),
        (("--measures", '{"x": {"class_path": "my_measures.Top", "init_args": {"k": null}}}'), "measures.x.k = None "),
        (
            ("--measures.x", "torchmetrics.Accuracy", "--measures.x.task", "multiclass"),
            "measures.x = 'torchmetrics.Accuracy' cannot work; valid: options with which it can be made; ValueError: ",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_cli.fit(tmp_path / "run", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_measures_of_several_files_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"measures: {{{name}: {{class_path: my_measures.Top}}}}")
    files = ("--config", str(tmp_path / "one.yaml"), "--config", str(tmp_path / "two.yaml"))
    config = tiny_cli.printed_config(capsys, "--config", str(tiny_cli.TINY), *files, "--measures.one.k", "3")
    assert {name: one["init_args"]["k"] for name, one in config["measures"].items()} == {"one": 3, "two": 5}


@pytest.mark.parametrize("batch", [1, 7, 60])
def test_processes_and_batches_do_not_matter(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that share the test batches compute the mean recall that numpy computes of all samples."""
    import my_measures

    generator = torch.Generator().manual_seed(batch)
    scores, y = torch.randn(60, 5, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    allowed = torch.tensor([True, True, True, True, False])
    ours, theirs = (OwnMatrix("recall", my_measures.BalancedAccuracy(), True, 3) for _ in range(2))
    for number, start in enumerate(range(0, 60, batch)):
        part = slice(start, start + batch)
        (ours, theirs)[number % 2].add(1, 2, scores[part], y[part], allowed)
    others = dict(theirs._seen)
    monkeypatch.setattr(distributed, "gather", lambda own: [own, others])
    ours.add_up(1)
    answers = scores[:, :4].argmax(1).numpy()
    recalls = [float(np.mean(answers[y.numpy() == one] == one)) for one in np.unique(y.numpy())]
    assert ours.compute()[1, 2].item() == pytest.approx(100 * np.mean(recalls), abs=1e-4)
    assert int(ours.compute().isfinite().sum()) == 1
    assert ours.summary(after=1)["measures.recall"] is None  # two tasks were not evaluated


def test_options_tell_metrics_apart() -> None:
    import my_measures

    kind = "torchmetrics.classification.calibration_error.MulticlassCalibrationError"
    told = [OwnMatrix("x", MulticlassCalibrationError(4, n_bins=bins), True, 2).definition for bins in (10, 10, 15)]
    assert told[0] == told[1] != told[2]
    assert told[2].startswith(f"{kind}(")
    assert "n_bins=15" in told[2]
    assert OwnMatrix("x", my_measures.BalancedAccuracy(), True, 2).definition == "my_measures.BalancedAccuracy()"


def test_options_with_the_names_of_a_matrixs_attributes_tell_metrics_apart() -> None:
    class Named(Batches):
        def __init__(self, num_tasks: int, key: str) -> None:
            super().__init__()
            self.num_tasks, self.key, self.better = num_tasks, key, 0.5

    assert OwnMatrix("x", Named(7, "a"), True, 2).definition.endswith("Named(better=0.5, key='a', num_tasks=7)")


@pytest.mark.parametrize("kind", ["update", "compute"])
def test_a_metric_that_fails_on_a_test_set_is_named(kind: str) -> None:
    class Picky(MeanAbsoluteError):
        def update(self, predicted: Tensor, y: Tensor) -> None:
            if kind == "update" and len(y) < 10:
                raise ValueError("too few")
            super().update(predicted, y)

        def compute(self) -> Tensor:
            if self.total < 10:
                raise ValueError("too few")
            return super().compute()

    matrix = OwnMatrix("picky", Picky(), False, 1)
    matrix.try_out(1, None)

    def evaluate() -> None:
        matrix.add(0, 0, torch.zeros(2, 1), torch.zeros(2, 1), None)
        matrix.add_up(0)

    with pytest.raises(RuntimeError, match=r"measures\.picky \(test_own\..*Picky\) failed: ValueError: too few"):
        evaluate()


def test_scores_are_logarithms_of_probabilities() -> None:
    seen: list[Tensor] = []

    class Spy(Batches):
        def update(self, scores: Tensor, y: Tensor) -> None:
            seen.append(scores)

    matrix = OwnMatrix("spy", Spy(), True, 1)
    outputs, allowed = torch.tensor([[0.0, 1.0, 5.0], [200.0, 0.0, 5.0]]), torch.tensor([True, True, False])
    matrix.add(0, 0, outputs, torch.tensor([0, 1]), allowed)
    e = np.e
    expected = [[np.log(1 / (1 + e)), np.log(e / (1 + e)), -np.inf], [0.0, -200.0, -np.inf]]
    np.testing.assert_allclose(seen[0].numpy(), expected, rtol=1e-6)


def test_errors_of_numbers_rise_with_forgetting() -> None:
    """The mean absolute error of predicted numbers, and its FGT, which is above 0 where the error has risen."""
    matrix = OwnMatrix("mae", MeanAbsoluteError(), False, 2)
    matrix.try_out(3, None)
    y = torch.zeros(4, 3)
    errors = {(0, 0): 1.0, (0, 1): 4.0, (1, 0): 3.0, (1, 1): 2.0, (-1, 0): 9.0, (-1, 1): 5.0}
    for (row, task), error in errors.items():
        matrix.add(row, task, y + error, y, None)
    for row in (-1, 0, 1):
        matrix.add_up(row)
    figures = {"measures.mae": 2.5, "measures.mae.fgt": 2, "measures.mae.bwt": -2, "measures.mae.fwt": 1}
    assert matrix.summary() == figures
    expected = transfers(matrix.compute(), matrix.initial(), lower_is_better=True)
    assert expected["fgt"].item() == 2


def test_runs_without_classes_and_numbers_refuse_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = {"class_path": "Synthetic", "init_args": {"num_classes": 4, "shape": [1, 4, 4]}}
    binary = json.dumps({"class_path": "Binarised", "init_args": {"source": images}})
    density = ("--data.scenario", "density", "--model.network", "MADE", "--data.stream.source", binary)
    assert tiny_cli.fit(tmp_path / "run", *density, *TOP2) == 2
    valid = "none where runs measure negative log-likelihood"
    assert f"measures.top2 = 'Top' cannot work; valid: {valid}" in capsys.readouterr().err
