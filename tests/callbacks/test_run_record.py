"""The run folder: its figures equal a second computation, and a folder in use is neither mixed nor overwritten."""

from __future__ import annotations

import csv
import itertools
import json
import math
import multiprocessing
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from support import tiny_cli
from support.tiny import SaveAfter, fit, permuted, tiny_client, tiny_data

import cfl
import cfl.callbacks.run_pictures
import cfl.callbacks.run_record
import cfl.reporting.compare.pictures
from cfl.callbacks import LocalModels, RunRecord
from cfl.callbacks.rounds_table import RoundsTable
from cfl.callbacks.run_figures import methods_figures
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Shards
from cfl.data.report import partition_figure, write_partition_csv
from cfl.data.schedule import Schedule
from cfl.data.sequences import RandomTasks
from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted
from cfl.methods import Method
from cfl.methods.base import Report
from cfl.metrics.transfer import average_accuracy
from cfl.models import MLP
from cfl.reporting import folder_lock
from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.pictures import write_pictures
from cfl.reporting.compare.reading import read as read_whole
from cfl.reporting.figures import accuracy_curve
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.run_folder import read_run
from cfl.reporting.summary_file import SUMMARY_KEYS
from cfl.runtime.checkpoint_file import write_checkpoint
from cfl.runtime.errors import ConfigError
from cfl.runtime.source_digest import digest_of, source_digest

ROUNDS, TASKS, SAMPLED = 6, 2, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished FedAvg run, evaluated every second round, with its pictures."""
    folder = tmp_path_factory.mktemp("record") / "run"
    assert tiny_cli.fit(folder, "--schedule.evaluate_every", "2", pictures=True) == 0
    return folder


@pytest.fixture(scope="module")
def data() -> FederatedDataModule:
    """The data of that run, built without a configuration file."""
    stream = Permuted(Synthetic(4, [1, 4, 4], 96, 40, noise=60.0), num_tasks=TASKS)
    schedule = Schedule(rounds_per_task=3, clients_per_round=SAMPLED, batch_size=8)
    return FederatedDataModule(stream, schedule, Shards(2), num_clients=4, seed=0)


def test_folder_holds_what_it_promises(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        *("config.yaml", "summary.json", "rounds.csv", "accuracy_matrix.csv", "last.ckpt", "SHA256SUMS"),
        *("partition.csv", "partition.png", "accuracy_matrix.png", "accuracy_curve.png", "accuracy_rounds.png"),
    }


def test_pictures_are_pictures(run: Path) -> None:
    for name in ("partition.png", "accuracy_matrix.png", "accuracy_curve.png", "accuracy_rounds.png"):
        with Image.open(run / name) as picture:
            assert min(picture.size) > 100, name
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10, name


def test_the_first_round_does_not_wait_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition's picture is drawn once, after the first round."""
    drawn = []

    def note(folder: Path, *_: Any) -> None:
        drawn.append((folder / "rounds.csv").read_text().count("\n") - 1)

    monkeypatch.setattr(cfl.callbacks.run_record, "save_partition_figure", note)
    assert tiny_cli.fit(tmp_path / "run") == 0
    assert drawn == [1]


def test_summary_keeps_the_contract(run: Path) -> None:
    """summary.json has all keys that comparisons read, with their types, and describes the run."""
    summary = tiny_cli.summary(run)
    assert set(SUMMARY_KEYS) <= set(summary)
    known = read_run(run)  # refuses wrong types
    assert (known.method, known.benchmark, known.partition) == ("fedavg", "permuted-synthetic", "shards-2")
    assert (known.scenario, known.seed, known.rounds, known.tasks, known.clients) == ("domain", 0, ROUNDS, TASKS, 4)
    assert summary["parameters"] == tiny_cli.PARAMETERS
    assert summary["server_sees"] == "sums only"
    assert summary["used_space"] is None
    assert summary["model_bytes"] == 4 * 4 * tiny_cli.PARAMETERS, "of four clients, in float32"
    assert summary["downlink_bytes_by_topic"] == {"model": ROUNDS * SAMPLED * 4 * tiny_cli.PARAMETERS}


def test_summary_names_the_device_that_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary names the strategy's device: after a run on a GPU, the network is back on the CPU."""
    end = SingleDeviceStrategy.teardown

    def end_of_a_gpu(self: SingleDeviceStrategy) -> None:
        end(self)
        self._root_device = torch.device("cuda:0")

    monkeypatch.setattr(SingleDeviceStrategy, "teardown", end_of_a_gpu)
    assert tiny_cli.fit(tmp_path) == 0
    assert tiny_cli.summary(tmp_path)["device"] == "cuda:0"


BREAKS = """
import math
import torch
from cfl.methods import Method

class Breaks(Method):
    individual_uplinks = True

    def finish_clients(self, cohort, positions):
        for position in positions:
            if cohort.round in (1, 3) and cohort.clients[position] == min(cohort.clients):
                cohort.parameters["head.bias"].data[position] = math.nan
            message = {"number": torch.tensor([math.nan if cohort.round == 4 else 1.0])}
            self.context.channel.uplink_individually("breaks", message, [cohort.clients[position]])

    def end_round(self, plan):
        self.context.channel.collect_individually("breaks")
"""


def test_skipped_clients_and_what_the_server_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaking.py").write_text(BREAKS)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--methods.breaks", "breaking.Breaks", "--federated.on_bad_update", "skip")
    assert tiny_cli.fit(tmp_path / "run", *options) == 0
    found = tiny_cli.summary(tmp_path / "run")
    assert [row["skipped_clients"] for row in tiny_cli.rows(tmp_path / "run" / "rounds.csv")] == list("010100")
    assert found["skipped_clients"] == 2
    sent = tiny_cli.rows(tmp_path / "run" / "rounds.csv")[4]["clients"]
    assert found["skipped_messages"] == {"breaks": int(sent)}
    assert found["server_sees"] == "single clients' messages"


def test_figures_that_several_methods_have_are_told_apart() -> None:
    class Weighs(Method):
        def __init__(self, **figures: float) -> None:
            self.figures = figures

        def report(self) -> Report:
            return Report(dict(self.figures))

    found = methods_figures({"one": Weighs(bytes=1, seconds=2), "two": Weighs(bytes=3), "three": Weighs(share=4)})
    assert found == {"one_bytes": 1, "seconds": 2, "two_bytes": 3, "share": 4}


def test_what_every_run_has_is_no_methods_to_say_and_numbers_become_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Claims(Method):
        def report(self) -> Report:
            own = {"acc": 200.0, "share": torch.tensor(0.5), "count": np.int64(3), "model_bytes": 7, "used_space": 50.0}
            return Report(own, [{"task": 0, "size": torch.tensor(1.5)}])

    data, folder = tiny_data(), tmp_path / "run"
    record = RunRecord(dir=str(folder))
    fit(tiny_client(data, methods={"claims": Claims()}), data, callbacks=[record])
    found = json.loads((folder / "summary.json").read_text())
    assert found["acc"] <= 100
    assert (found["share"], found["count"]) == (0.5, 3)
    assert (found["model_bytes"], found["used_space"]) == (7, 50.0), "methods know these better, and may say them"
    assert "methods.claims reports acc, which every run has: the method's value is left out" in caplog.text
    assert tiny_cli.rows(folder / "claims.csv") == [{"task": "0", "size": "1.5"}]


def test_a_report_of_another_kind_is_refused_by_the_methods_name() -> None:
    class Plain(Method):
        def report(self) -> Any:
            return {"share": 0.5}

    with pytest.raises(TypeError, match=r"^methods\.mine: report gives dict, not a cfl\.methods\.base\.Report$"):
        methods_figures({"mine": Plain()})


def test_summary_says_which_code_it_was(run: Path, tmp_path: Path) -> None:
    """The digest in the summary is of paths and contents of all source files. It does not depend on their folder."""
    found = tiny_cli.summary(run)["versions"]["source"]
    assert re.fullmatch("[0-9a-f]{12}", found)
    copies = [tmp_path / "one" / "cfl", tmp_path / "two" / "cfl"]
    for copy in copies:
        shutil.copytree(
            Path(cfl.__file__).parent, copy, ignore=lambda _, names: [n for n in names if n == "__pycache__"]
        )
    copy, other = copies
    assert found == digest_of([copy]) == digest_of([other]) == source_digest()
    rooms = [copy / "callbacks", copy / "runtime"]
    assert found != digest_of(rooms) == digest_of(rooms[::-1])
    (copy / "notes.txt").write_text("no code")
    assert digest_of([copy]) == found
    (copy / "runtime" / "errors.py").rename(copy / "runtime" / "mistakes.py")
    moved = digest_of([copy])
    (copy / "runtime" / "mistakes.py").write_text("pass")
    assert len({found, moved, digest_of([copy])}) == 3
    (other / "callbacks" / "run_record.py").write_text("pass")
    assert digest_of([other]) != found, "the callbacks count, which lie beside the package in a checkout"


def test_summary_figures_follow_from_the_matrix(run: Path) -> None:
    """ACC, FGT, BWT and FWT in the summary follow from the CSV file by their formulas for two tasks."""
    summary = tiny_cli.summary(run)
    (init, first, second) = (
        [float(value) for key, value in row.items() if key != "after_task"]
        for row in tiny_cli.rows(run / "accuracy_matrix.csv")
    )
    assert summary["acc"] == pytest.approx((second[0] + second[1]) / 2)
    assert summary["fgt"] == summary["fgt_max"] == pytest.approx(first[0] - second[0])
    assert summary["bwt"] == pytest.approx(second[0] - first[0])
    assert summary["fwt"] == pytest.approx(first[1] - init[1])
    assert summary["fgt"] != 0  # so that signs and indices matter


def test_matrix_rows_are_models_and_columns_are_tasks(run: Path, data: FederatedDataModule) -> None:
    """The matrix has a row for each model and a column for each task. Its last row is the score of the checkpoint."""

    def score(network: MLP) -> list[float]:
        return [
            100 * float((network(task.transform(task.test.images)).argmax(1) == task.test.labels).double().mean())
            for task in data.tasks
        ]

    network = MLP((1, 4, 4), 4, hidden=[8], dropout=0.0)
    state = tiny_cli.checkpoint(run)["state_dict"]
    network.load_state_dict({name.removeprefix("network."): value for name, value in state.items()})
    matrix, initial = read_matrix_csv(run / "accuracy_matrix.csv")
    assert initial is not None
    assert matrix[1].tolist() == pytest.approx(score(network))
    assert matrix[0].tolist() != pytest.approx(matrix[:, 0].tolist())  # a transposed matrix would differ
    assert matrix[0, 0] == float(tiny_cli.rows(run / "rounds.csv")[2]["acc_task_0"])


def test_rounds_have_a_row_each_with_task_and_sampled_clients(run: Path, data: FederatedDataModule) -> None:
    rounds = tiny_cli.rows(run / "rounds.csv")
    assert [(r["round"], r["task"], r["round_in_task"], r["clients"]) for r in rounds] == [
        (str(r), str(r // 3), str(r % 3), str(len(data.rounds.round(r).clients))) for r in range(ROUNDS)
    ]
    seconds = [float(row["seconds"]) for row in rounds]
    assert all(a < b for a, b in zip([0.0, *seconds], seconds, strict=False))
    assert tiny_cli.summary(run)["seconds"] == seconds[-1]


def test_bytes_of_federated_averaging_are_clients_times_weights_times_four(run: Path) -> None:
    """The bytes are cumulative: one model down and one update up in float32 for each sampled client, nothing else."""
    message = 4 * tiny_cli.PARAMETERS
    for row in tiny_cli.rows(run / "rounds.csv"):
        expected = (int(row["round"]) + 1) * SAMPLED * message
        assert (int(row["uplink_bytes"]), int(row["downlink_bytes"])) == (expected, expected)
    summary = tiny_cli.summary(run)
    assert summary["uplink_bytes"] == summary["downlink_bytes"] == ROUNDS * SAMPLED * message
    assert summary["uplink_bytes_by_topic"] == {"update": ROUNDS * SAMPLED * message}


def test_accuracies_appear_only_in_evaluated_rounds(run: Path) -> None:
    """Accuracies are in every second round of a task and in its last. Other rounds have empty cells, not 0."""
    rounds = tiny_cli.rows(run / "rounds.csv")
    evaluated = [row["round"] for row in rounds if row["acc"]]
    assert evaluated == ["1", "2", "4", "5"]
    matrix = read_matrix_csv(run / "accuracy_matrix.csv")[0]
    for row in rounds:
        assert (row["acc"] == "") == (row["acc_task_0"] == "") == (row["acc_task_1"] == "")
        if row["round_in_task"] == "2":
            task = int(row["task"])
            assert [float(row["acc_task_0"]), float(row["acc_task_1"])] == matrix[task].tolist()
            assert float(row["acc"]) == pytest.approx(float(matrix[task, : task + 1].mean()))


def test_loss_is_the_mean_over_local_steps(tmp_path: Path, data: FederatedDataModule) -> None:
    """The loss in rounds.csv is the mean over local steps.

    The learning rate is too small to change the weights, so that the loss can be computed from the untrained network.
    """
    assert tiny_cli.fit(tmp_path, "--model.optimizer.lr", "1e-30", "--model.network.hidden", "[]") == 0
    state = tiny_cli.checkpoint(tmp_path)["state_dict"]
    weight, bias = (state[f"network.head.{name}"].double() for name in ("weight", "bias"))
    for row in tiny_cli.rows(tmp_path / "rounds.csv"):
        plan = data.rounds.round(int(row["round"]))
        task = data.tasks[plan.task]
        losses = []
        for client in plan.clients:
            for sample in data.indices[plan.task][client].tolist():
                x = task.transform(task.train.images[sample : sample + 1]).double().flatten()
                logits = [float(w @ x + b) for w, b in zip(weight, bias, strict=True)]
                log_sum = math.log(sum(math.exp(z) for z in logits))
                losses.append(log_sum - logits[int(task.train.labels[sample])])
        assert len(losses) % 8 == 0  # all batches are full
        assert float(row["loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_partition_table_counts_the_dealt_samples(run: Path, data: FederatedDataModule) -> None:
    """partition.csv has the counts by task, client and class of the data built without a configuration."""
    expected = {
        (task, client, k): int((data.tasks[task].train.labels[torch.from_numpy(index)] == k).sum())
        for task, dealt in enumerate(data.indices)
        for client, index in dealt.items()
        for k in range(4)
    }
    table = {
        (int(row["task"]), int(row["client"]), k): int(row[f"class_{k:02d}"])
        for row in tiny_cli.rows(run / "partition.csv")
        for k in range(4)
    }
    assert table == expected
    assert sum(table.values()) == TASKS * 96


@pytest.mark.parametrize("outputs", ["task", "place"])
@pytest.mark.parametrize("split", ["clients", "holders", "whole"])
def test_partition_table_has_the_clients_that_learn_a_task(split: Any, outputs: Any, tmp_path: Path) -> None:
    """Three clients learn one of three tasks each. A share of another task that is dealt to a client is not used."""
    data = tiny_data(permuted(3), num_clients=3, scenario="task", sequences=RandomTasks(1, split, outputs))
    dealt = cfl.callbacks.run_record._dealt(data)
    write_partition_csv(tmp_path / "partition.csv", data.tasks, dealt)
    rows = tiny_cli.rows(tmp_path / "partition.csv")
    found = {(int(row["task"]), int(row["client"])): int(row["samples"]) for row in rows}
    learned = RandomTasks(1).of_clients(3, 3, data.seed)[:, 0].tolist() if outputs == "task" else range(3)
    assert found == {(task, client): len(data.indices[0][client]) for client, task in enumerate(learned)}
    assert len(partition_figure(data.tasks, dealt).axes) >= 3


def test_method_leaves_its_own_table_and_figures(tmp_path: Path) -> None:
    """FOT's table has a row for each layer after every task except the last. The summary has used space and bytes."""
    assert tiny_cli.fit(tmp_path, "--methods.fot", "FOT") == 0
    table, summary = tiny_cli.rows(tmp_path / "fot.csv"), tiny_cli.summary(tmp_path)
    assert [(row["task"], row["layer"], row["input_dim"]) for row in table] == [
        ("0", "layers.0", "16"),
        ("0", "head", "8"),
    ]
    shares = [int(row["basis_size"]) / int(row["input_dim"]) for row in table]
    assert summary["used_space"] == pytest.approx(100 * sum(shares) / 2)
    extra = summary["uplink_bytes_by_topic"]
    assert summary["uplink_bytes"] == ROUNDS * SAMPLED * 4 * tiny_cli.PARAMETERS + extra["fot sketch"]
    last = tiny_cli.rows(tmp_path / "rounds.csv")[-1]
    assert (int(last["uplink_bytes"]), int(last["downlink_bytes"])) == (
        summary["uplink_bytes"],
        summary["downlink_bytes"],
    )
    assert summary["uplink_bytes"] != summary["downlink_bytes"]
    # A sketch has five columns per input dimension, in float32; two float64 scalars per layer come with it.
    assert extra["fot sketch"] == SAMPLED * sum(5 * d * d * 4 + 2 * 8 for d in (16, 8))


def test_personal_models_have_a_matrix_per_client_and_their_mean(tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path, "--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']") == 0
    clients = [read_matrix_csv(path)[0] for path in sorted((tmp_path / "clients").glob("*.csv"))]
    assert len(clients) == 4
    mean = sum(clients) / 4
    torch.testing.assert_close(read_matrix_csv(tmp_path / "accuracy_matrix.csv")[0], mean, rtol=1e-12, atol=0)
    assert tiny_cli.summary(tmp_path)["acc"] == pytest.approx(float(mean[1].mean()))


@pytest.mark.parametrize(
    "methods",
    [(), ("--methods.own", "PersonalLayers", "--methods.own.layers", "['layers.*']")],
    ids=["global", "personal"],
)
def test_class_incremental_run_is_also_scored_with_known_tasks(methods: tuple[str, ...], tmp_path: Path) -> None:
    """A class-incremental run has a second matrix with known tasks, which is nowhere below the first."""
    options = ("--data.stream", "ClassSplit", "--data.stream.num_tasks", "2", "--data.scenario", "class")
    source = (*("--data.stream.source", "Synthetic", "--data.stream.source.num_classes", "4"),)
    assert tiny_cli.fit(tmp_path, *options, *source, *methods) == 0
    unknown, known = (
        read_matrix_csv(tmp_path / f"accuracy_matrix{suffix}.csv")[0].tril() for suffix in ("", "_task_il")
    )
    assert bool((known >= unknown).all())
    assert bool((known > unknown).any())
    assert tiny_cli.summary(tmp_path)["acc_task_il"] == pytest.approx(float(known[1].mean()))


def test_stream_of_one_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one task, forgetting and transfer are undefined, not zero."""
    assert tiny_cli.fit(tmp_path, "--data.stream.num_tasks", "1") == 0
    summary = tiny_cli.summary(tmp_path)
    assert summary["acc"] == read_matrix_csv(tmp_path / "accuracy_matrix.csv")[0].item()
    assert [summary[key] for key in ("fgt", "fgt_max", "bwt", "fwt")] == [None] * 4
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "   mean over " in line]
    assert [line.split()[:2] for line in lines[1:]] == [
        [name, "undefined"] for name in ("FGT", "FGT_MAX", "FGT_MAX_LAST", "BWT", "FWT")
    ]
    assert len({line.index("mean over") for line in lines}) == 1  # in columns, however long a name is
    up, down = (f"{summary[key] / 1e6:,.2f} MB" for key in ("uplink_bytes", "downlink_bytes"))
    assert f"{summary['rounds']} rounds, uplink {up}, downlink {down}, " in out


def test_figures_on_validation_samples_are_printed_with_a_line_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "all figures are on validation samples (data.evaluate_on), not on the test sets\n"
    share = ("--data.validation", "0.2")
    assert tiny_cli.fit(tmp_path / "test", *share) == 0
    assert "on validation samples" not in capsys.readouterr().out
    assert tiny_cli.fit(tmp_path / "validation", *share, "--data.evaluate_on", "validation") == 0
    assert re.search(rf"┘\n{re.escape(told)}ACC ", capsys.readouterr().out)
    assert tiny_cli.run("validate", "--ckpt_path", str(tmp_path / "validation" / "last.ckpt")) == 0
    assert told in capsys.readouterr().out


def test_a_summary_is_json_whatever_a_run_has_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinity are written as null: JSON has neither, and readers refuse what Python would write."""
    strange = {"mine": math.nan, "nested": {"up": math.inf, "several": [1.5, -math.inf, "nan", 3]}}
    monkeypatch.setattr(LocalModels, "summary", lambda self: strange)
    assert tiny_cli.fit(tmp_path) == 0
    read_run(tmp_path)  # refuses NaN
    found = tiny_cli.summary(tmp_path)
    assert (found["mine"], found["nested"]) == (None, {"up": None, "several": [1.5, None, "nan", 3]})


# A folder that is already in use.


def test_finished_run_is_not_overwritten_unless_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert tiny_cli.fit(run, "--seed_everything", "1") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: run.dir = '{run}' cannot work")
    assert "a finished run" in message
    assert "run.overwrite=true" in message
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_overwriting_starts_over(tmp_path: Path) -> None:
    """A run that overwrites a folder leaves the same results as in a new folder."""
    assert tiny_cli.fit(tmp_path / "used", "--schedule.rounds_per_task", "4", "--methods.fot", "FOT") == 0
    assert (tmp_path / "used" / "fot.csv").exists()
    assert tiny_cli.fit(tmp_path / "used", "--seed_everything", "1", "--run.overwrite", "true") == 0
    assert tiny_cli.fit(tmp_path / "fresh", "--seed_everything", "1") == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "used"), tiny_cli.results(tmp_path / "fresh"))


def test_a_refused_run_overwrites_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is refused overwrites nothing, also if it is refused after the network is built."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for wrong in (("--model.optimizer", "LBFGS"), ("--trainer.accumulate_grad_batches", "2")):
        assert tiny_cli.fit(folder, "--run.overwrite", "true", *wrong) == 2
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_goes_on_in_its_own_folder_or_in_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        with tiny_cli.die_at("training", 1, 15):
            assert tiny_cli.fit(tmp_path / name) == 143
    checkpoint = str(tmp_path / "a" / "last.ckpt")
    before = {path: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert tiny_cli.fit(tmp_path / "b", "--ckpt_path", checkpoint) == 2
    assert "run.dir" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before
    assert tiny_cli.fit(tmp_path / "c", "--ckpt_path", checkpoint) == 0


def test_a_record_of_a_finished_fit_does_not_overwrite_it(tmp_path: Path) -> None:
    record, folder = RunRecord(str(tmp_path / "a")), tmp_path / "a"
    data = tiny_data(schedule={"rounds_per_task": 1})
    fit(tiny_client(data), data, callbacks=[record])
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    data = tiny_data(seed=1, schedule={"rounds_per_task": 1})
    with pytest.raises(ConfigError, match=r"run\.dir .*holds a finished run"):
        fit(tiny_client(data), data, callbacks=[record])
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    record.overwrite = True
    fit(tiny_client(data), data, callbacks=[record])
    assert json.loads((folder / "summary.json").read_text())["seed"] == 1


def test_interrupted_run_is_not_overwritten_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path) == 143
    assert tiny_cli.fit(tmp_path) == 2
    assert "an interrupted run (--ckpt_path last resumes it)" in capsys.readouterr().err
    assert len(tiny_cli.rows(tmp_path / "rounds.csv")) == 2


def test_resuming_drops_rows_of_rounds_that_run_again(tmp_path: Path) -> None:
    """Rows after the checkpoint's round are removed on resuming, so that each round is in the table once."""
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path / "run") == 143
    table = tmp_path / "run" / "rounds.csv"
    last = table.read_text().splitlines()[-1]
    with table.open("a") as file:
        file.write(f"2{last[1:]}\n3{last[1:]}\n")
    assert tiny_cli.fit(tmp_path / "run", "--ckpt_path", "last") == 0
    assert tiny_cli.fit(tmp_path / "whole") == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "run"), tiny_cli.results(tmp_path / "whole"))


def test_a_run_that_goes_on_elsewhere_takes_its_rows_along(tmp_path: Path) -> None:
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path / "run") == 143
    assert tiny_cli.fit(tmp_path / "on", "--ckpt_path", str(tmp_path / "run" / "last.ckpt")) == 0
    assert tiny_cli.fit(tmp_path / "whole") == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "on"), tiny_cli.results(tmp_path / "whole"))


def test_overwriting_and_going_on_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path) == 143
    assert tiny_cli.fit(tmp_path, "--ckpt_path", "last", "--run.overwrite", "true") == 2
    assert "run.overwrite = True cannot work; valid: false with ckpt_path" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--run.overwrite", "true"), ("--ckpt_path", "last")])
def test_a_folder_is_one_processs_at_a_time(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in which a process is at work is refused to others. Its lock is free once that process is killed."""
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path) == 143
    capsys.readouterr()
    before = (tmp_path / "rounds.csv").read_text()
    context = multiprocessing.get_context("fork")
    taken = context.Event()

    def hold() -> None:
        assert folder_lock.take(tmp_path)
        taken.set()
        time.sleep(600)

    other = context.Process(target=hold)
    other.start()
    try:
        assert taken.wait(60)
        assert tiny_cli.fit(tmp_path, *options) == 2
        assert "a folder in which no other process is at work" in capsys.readouterr().err
        assert (tmp_path / "rounds.csv").read_text() == before
    finally:
        other.kill()
        other.join()
    if options:
        assert tiny_cli.fit(tmp_path, *options) == 0
        assert not (tmp_path / folder_lock.LOCK).exists()


@pytest.mark.parametrize("refused", [("--trainer.max_steps", "3"), ("--model.optimizer.lr", "1e30")])
def test_a_run_that_fails_leaves_its_folder_to_others(refused: tuple[str, ...], tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path, *refused) == 2
    assert not (tmp_path / folder_lock.LOCK).exists()


def test_a_start_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    """A run that fails at its start removes the folder that it made. A folder that existed, or has files, stays."""
    there, made = tmp_path / "there", tmp_path / "made"
    there.mkdir()
    for folder in (there, made):
        assert tiny_cli.fit(folder, "--trainer.max_steps", "3") == 2
    assert there.is_dir()
    assert not made.exists()
    assert tiny_cli.fit(made, "--model.optimizer.lr", "1e30") == 2
    assert (made / "config.yaml").is_file()


@pytest.mark.parametrize("options", [(), ("--ckpt_path", "last")])
def test_rows_of_a_run_without_checkpoint_do_not_mix_with_new_ones(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Rows of a killed run without a checkpoint are removed by the next run, which begins with round 0."""
    assert tiny_cli.fit(tmp_path, "--checkpoint.enabled", "false") == 0
    (tmp_path / "summary.json").unlink()
    assert tiny_cli.fit(tmp_path, *options) == 0
    assert [row["round"] for row in tiny_cli.rows(tmp_path / "rounds.csv")] == [str(r) for r in range(ROUNDS)]


def test_nothing_of_a_run_without_checkpoint_is_found_in_the_next_one(tmp_path: Path) -> None:
    """The next run removes all tables and pictures of a killed run without a checkpoint, and keeps other files."""
    own = ("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']")
    options = ("--data.stream", "ClassSplit", "--data.stream.num_tasks", "2", "--data.scenario", "class")
    source = ("--data.stream.source", "Synthetic", "--data.stream.source.num_classes", "4")
    used, kept = tmp_path / "used", ("log.txt", ".lock", "notes.csv", "plot.png", "clients/mine.csv")
    assert tiny_cli.fit(used, *options, *source, *own, "--checkpoint.enabled", "false") == 0
    (used / "summary.json").unlink()
    stale = {"clients/accuracy_matrix_000.csv", "accuracy_matrix_task_il.csv", "accuracy_curve.png"}
    for name in ("own.csv", "nll_matrix.csv", "clients/nll_matrix_007.csv", "samples.png", "wandb-id.txt", *kept):
        (used / name).write_text(name)
    assert all((used / name).is_file() for name in stale)
    assert tiny_cli.fit(used) == 0
    assert tiny_cli.fit(tmp_path / "fresh") == 0
    files = {path.relative_to(used).as_posix() for path in used.rglob("*") if path.is_file()}
    assert files == {path.name for path in (tmp_path / "fresh").iterdir()} | set(kept)
    assert all((used / name).read_text() == name for name in kept)


def test_finished_run_without_checkpoint_is_not_lost_to_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--ckpt_path last`` without a checkpoint starts anew, but not in the folder of a finished run."""
    assert tiny_cli.fit(tmp_path, "--checkpoint.enabled", "false") == 0
    assert tiny_cli.fit(tmp_path, "--ckpt_path", "last") == 2
    assert "a finished run" in capsys.readouterr().err
    assert len(tiny_cli.rows(tmp_path / "rounds.csv")) == ROUNDS


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its fourth round, with that round's row written and its checkpoint not."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    assert tiny_cli.killed("closed", 3, "fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder)) == -9
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.replace(b"0,0,0,2", b"0,0,0,1"), "its rows of rounds 0 to {last} have changed since"),
        (lambda rows: rows[: rows.index(b"\n") + 5], "its rows of rounds 0 to {last} have changed since"),
        (lambda rows: b"", "its rows of rounds 0 to {last} have changed since"),
        (lambda rows: rows[:100] + b"\xff" + rows[101:], "its rows of rounds 0 to {last} have changed since"),
        (lambda rows: rows + b"4,1,", None),
        (lambda rows: rows + b"\xff\xff", None),
    ],
)
@pytest.mark.parametrize("digest", [True, False])
def test_a_run_is_not_resumed_with_rows_that_have_changed(
    change: Callable[[bytes], bytes],
    said: str | None,
    digest: bool,
    stopped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run is not resumed if rows up to the checkpoint have changed. Later rows do not matter.

    Older checkpoints have no digest of the rows.
    """
    folder = shutil.copytree(stopped, tmp_path / "run")
    table, saved = folder / "rounds.csv", tiny_cli.checkpoint(folder)
    if not digest:
        saved["callbacks"] = {}
        write_checkpoint(saved, folder / "last.ckpt")
    before = table.read_bytes()
    table.write_bytes(change(before))
    status = tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt"))
    told = capsys.readouterr().err
    if digest and said is not None:
        assert status == 2
        assert f"error: {table}: {said.format(last=saved['federation']['round'] - 1)}" in told
        table.unlink()
        assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt")) == 0, "as the message says"
    elif status == 0:
        rounds = [row["round"] for row in tiny_cli.rows(table)]
        assert rounds[-1] == str(ROUNDS - 1)
        assert said is not None or rounds == [str(round) for round in range(ROUNDS)]
    else:
        assert said is not None, told
        assert f"error: {table} is damaged: it lacks a row of numbers for each round" in told


def test_table_is_rewritten_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process dies while it rewrites rounds.csv on resuming, the former table stays."""
    path = tmp_path / "rounds.csv"
    path.write_text("round,loss\n0,1.0\n")

    class Dies(csv.DictWriter):  # type: ignore[type-arg]
        def writerows(self, rows: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(csv, "DictWriter", Dies)
    with pytest.raises(KeyboardInterrupt):
        RoundsTable(path).begin(1, path)
    assert path.read_text() == "round,loss\n0,1.0\n"


@pytest.mark.parametrize("personal", [True, False])
def test_acc_is_one_figure_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], personal: bool
) -> None:
    """ACC is the same in summary, table, printed matrix, pictures, comparison and page.

    That also holds if it is a mean over clients with different tasks, which does not follow from the mean matrix.
    """
    drawn: list[list[float]] = []

    def curve_of(*given: Any, **options: Any) -> Any:
        figure = accuracy_curve(*given, **options)
        drawn.append(figure.axes[0].lines[1].get_ydata())
        return figure

    for module in (cfl.callbacks.run_pictures, cfl.reporting.compare.pictures):
        monkeypatch.setattr(module, "accuracy_curve", curve_of)
    options = [
        "--data.participation",
        "Joining",
        "--data.participation.initial",
        "2",
        "--data.participation.per_task",
        "2",
    ]
    if personal:
        options += ["--methods.personal", "PersonalLayers", "--methods.personal.layers", "[head.*]"]
    runs = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(runs):
        assert tiny_cli.fit(folder, *options, "--seed_everything", str(seed), pictures=True) == 0
    printed = re.findall(r"^│ +[01] │.*│([\d.]+)│$", capsys.readouterr().out, re.M)
    acc = [[float(row["acc"]) for row in tiny_cli.rows(folder / "rounds.csv")[2::3]] for folder in runs]
    assert [tiny_cli.summary(folder)["acc"] for folder in runs] == [values[-1] for values in acc]
    assert printed == [f"{value:.2f}" for values in acc for value in values]
    read = [read_run(folder) for folder in runs]
    assert [run.means for run in read] == (acc if personal else [[], []])
    of_mean_matrix = [average_accuracy(run.matrix).item() for run in read]
    assert all(
        (one != pytest.approx(other[-1], abs=1e-6)) == personal for one, other in zip(of_mean_matrix, acc, strict=True)
    )
    found = compare([read_whole(folder, []) for folder in runs])
    assert [list(means) for means in found[0].rows[0].means_over_tasks_seen("accuracy")] == [
        pytest.approx(values) for values in acc
    ]
    together = [sum(values) / 2 for values in zip(*acc, strict=True)]
    on_page = page_data([(found[0], None)])["tables"][0]["rows"][0]["measures"]["accuracy"]
    assert on_page["seen"] == pytest.approx(together, rel=1e-4)
    (tmp_path / "out").mkdir()
    write_pictures(tmp_path / "out", found)
    assert len(drawn) == 3
    for line, expected in zip(drawn, [*acc, together], strict=True):
        assert list(line) == pytest.approx(expected, abs=1e-9)
    # If the table of rounds lacks its first task, the matrix is used for it.
    for folder in runs:
        (folder / "SHA256SUMS").unlink()
        lines = (folder / "rounds.csv").read_text().splitlines(keepends=True)
        (folder / "rounds.csv").write_text("".join([lines[0], *lines[4:]]))
    again = compare([read_whole(folder, []) for folder in runs])[0].rows[0].means_over_tasks_seen("accuracy")
    of_matrix = [average_accuracy(run.matrix, 0).item() for run in read]
    assert [list(means) for means in again] == [
        pytest.approx([first, values[1]]) for first, values in zip(of_matrix, acc, strict=True)
    ]


class FilesOfClients(Callback):
    """After every round: name -> inode and text of each file in the folder ``clients``."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.found: list[dict[str, tuple[int, str]]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.record.record_round(pl_module)
        paths = sorted((self.record.folder / "clients").glob("*"))
        self.found.append({path.name: (path.stat().st_ino, path.read_text()) for path in paths})
        for name in self.found[-1]:
            stored = read_matrix_csv(self.record.folder / "clients" / name)[0]
            own = pl_module.federation.measured.compute()[int(name.removesuffix(".csv").rpartition("_")[2])]
            assert torch.equal(stored.nan_to_num(-1), own.nan_to_num(-1))


def test_with_clocks_of_their_own_only_evaluated_clients_matrices_are_written_anew(tmp_path: Path) -> None:
    """A file is replaced only if its text changes, and is always that of its client's matrix, also after resuming."""

    def trained(folder: Path, **options: Any) -> list[dict[str, tuple[int, str]]]:
        data = tiny_data(num_clients=6, schedule={"rounds_per_task": 4, "clients_per_round": 3, "clock_spread": 0.5})
        record = RunRecord(dir=str(folder))
        files = FilesOfClients(record)
        fit(tiny_client(data), data, callbacks=[record, files, *options.pop("callbacks", ())], **options)
        return files.found

    whole = trained(tmp_path / "whole", callbacks=[SaveAfter(4, tmp_path / "5.ckpt")])
    changes = [
        (now[name][0] != before[name][0], now[name][1] != before[name][1])
        for before, now in itertools.pairwise(whole)
        for name in before
    ]
    assert set(changes) == {(False, False), (True, True)}
    resumed = trained(tmp_path / "elsewhere", ckpt_path=tmp_path / "5.ckpt")
    texts = [{name: text for name, (_, text) in files.items()} for files in (whole[-1], resumed[-1])]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
