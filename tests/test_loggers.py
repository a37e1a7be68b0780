"""What loggers receive: the figures of the run folder under the agreed names, over the agreed axes."""

from __future__ import annotations

import io
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_cli
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import fit, split, tiny_client, tiny_data
from wandb.proto.wandb_internal_pb2 import Record

from callbacks.dashboards import evaluation_figures
from cfl.methods import APD, FedWeIT, Method

LOGGERS = Path(__file__).parent.parent / "configs" / "loggers"
PICTURES = ("cl/accuracy_matrix", "cl/accuracy_heatmap", "cl/accuracy_curve", "cl/learning_curve", "data/partition")
OPTIONS = ("--methods.fot", "FOT", "--schedule.evaluate_every", "2")


def expected_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> round -> value, from the CSV files; ACC and FGT by their formulas for two tasks."""
    names = {"train/loss": "loss", "comm/uplink_bytes": "uplink_bytes", "comm/downlink_bytes": "downlink_bytes"}
    found: dict[str, dict[int, float]] = {}

    def add(name: str, round: int, value: str | float) -> None:
        found.setdefault(name, {})[round] = float(value)

    learned = None  # task 0's accuracy after task 0
    for row in tiny_cli.rows(folder / "rounds.csv"):
        round, task = int(row["round"]), int(row["task"])
        add("task", round, task)
        add("round", round, round)
        for name, column in names.items():
            add(name, round, row[column])
        if not row["acc"]:
            continue
        accuracies = [float(row["acc_task_0"]), float(row["acc_task_1"])]
        for i, accuracy in enumerate(accuracies):
            add(f"task_0{i}/acc", round, accuracy)
        add("cl/acc", round, sum(accuracies[: task + 1]) / (task + 1))
        if task == 0:
            learned, ahead = accuracies
        else:
            assert learned is not None
            add("cl/fgt", round, learned - accuracies[0])
            add("cl/fgt_max", round, learned - accuracies[0])
            add("cl/fgt_max_last", round, max(learned - accuracies[0], 0.0))
            add("cl/bwt", round, accuracies[0] - learned)
            untrained = float(tiny_cli.rows(folder / "accuracy_matrix.csv")[0]["task_1"])
            add("cl/fwt", round, ahead - untrained)
            if round == 5:  # the last one
                for name in ("acc", "fgt", "bwt"):
                    add(f"final/{name}", round, found[f"cl/{name}"][round])
    for row in tiny_cli.rows(folder / "fot.csv"):
        for column in ("basis_size", "used_space"):
            add(f"fot/{row['layer']}/{column}", 3 * int(row["task"]) + 2, row[column])
    return found


def assert_scalars(found: dict[str, dict[int, float]], folder: Path, exact: bool) -> None:
    """Every expected name is there, at the same rounds and with the same values, and nothing of cl/ besides."""
    expected = expected_scalars(folder)
    for name, points in expected.items():
        assert found[name] == (points if exact else pytest.approx(points, rel=1e-6)), name
    assert {name for name in found if name.startswith(("cl/", "final/", "task_"))} == {
        name for name in expected if name.startswith(("cl/", "final/", "task_"))
    }
    assert len(found["cl/acc"]) == 4
    assert len(found["cl/fgt"]) == 2


# TensorBoard.


def test_tensorboard_has_the_figures_of_the_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert tiny_cli.fit(folder, *OPTIONS, "--config", str(LOGGERS / "tensorboard.yaml"), pictures=True) == 0
    (events,) = (folder / "tensorboard").glob("events.*")  # nowhere else, and one file
    board = EventAccumulator(str(events), size_guidance={"images": 0, "scalars": 0}).Reload()
    found = {
        tag: {event.step: event.value for event in board.Scalars(tag)}
        for tag in board.Tags()["scalars"]
        if tag != "epoch"
    }
    assert_scalars(found, folder, exact=False)  # TensorBoard keeps float32
    steps = {"cl/accuracy_matrix": [2, 5], "cl/accuracy_curve": [2, 5], "cl/learning_curve": [5], "data/partition": [0]}
    assert set(board.Tags()["images"]) == set(steps)
    for name, expected in steps.items():
        pictures = board.Images(name)
        assert [picture.step for picture in pictures] == expected, name
        for picture in pictures:
            assert min(picture.width, picture.height) > 100
            # A figure with something in it.
            with Image.open(io.BytesIO(picture.encoded_image_string)) as image:
                assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10, name
    with Image.open(folder / "partition.png") as written:
        shown = board.Images("data/partition")[0]
        assert (shown.width, shown.height) == written.size
    assert "config_hash" in tiny_cli.summary(folder)
    assert "schedule.batch_size: 8" in (folder / "tensorboard" / "hparams.yaml").read_text()


@pytest.mark.parametrize("method", [FedWeIT, APD])
def test_a_methods_rows_of_clients_are_averaged(method: type[Method]) -> None:
    """None of them is the run's, and which client it is, is no figure."""
    data = tiny_data(split(), scenario="task")
    federation = fit(tiny_client(data, methods={"mine": method()}), data)
    rows = [row for row in federation.methods["mine"].task_rows() if row["task"] == 1]
    names = {f"mine/{row['layer']}/{key}" for row in rows for key in ("adaptive_share", "mean_gate")}
    figures = evaluation_figures(federation, 1)
    assert {name for name in figures if name.startswith("mine/")} == names
    for layer in {row["layer"] for row in rows}:
        gates = [row["mean_gate"] for row in rows if row["layer"] == layer]
        assert len(set(gates)) > 1
        assert figures[f"mine/{layer}/mean_gate"] == pytest.approx(sum(gates) / len(gates))


def test_a_logger_without_a_place_of_its_own_writes_into_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the message for one without ``save_dir`` says; one with a place keeps to it."""
    monkeypatch.chdir(tmp_path)
    for place, found in ((".", tmp_path / "run"), (str(tmp_path / "elsewhere"), tmp_path / "elsewhere")):
        options = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", place)
        assert tiny_cli.fit(tmp_path / "run", *options, "--run.overwrite", "true") == 0
        (written,) = found.rglob("metrics.csv")
        assert "cl/acc" in tiny_cli.rows(written)[0]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}


def test_a_run_that_overwrites_has_a_curve_of_its_own(tmp_path: Path) -> None:
    """The first run's file is gone, and not the one that was opened for the second."""
    options = (*OPTIONS, "--config", str(LOGGERS / "tensorboard.yaml"))
    assert tiny_cli.fit(tmp_path, *options, pictures=True) == 0
    (first,) = (tmp_path / "tensorboard").glob("events.*")
    again = ("--seed_everything", "1", "--run.overwrite", "true")
    assert tiny_cli.fit(tmp_path, *options, *again, pictures=True) == 0
    (second,) = (tmp_path / "tensorboard").glob("events.*")
    assert second != first
    losses = EventAccumulator(str(second)).Reload().Scalars("train/loss")
    written = [float(row["loss"]) for row in tiny_cli.rows(tmp_path / "rounds.csv")]
    assert [loss.value for loss in losses] == pytest.approx(written, rel=1e-6)


def test_resumed_run_goes_on_in_the_same_tensorboard_folder(tmp_path: Path) -> None:
    """One curve per run: the rounds after the interruption continue those before it."""
    folder = tmp_path / "run"
    options = ("--config", str(LOGGERS / "tensorboard.yaml"))
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(folder, *options) == 143
    assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt")) == 0
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt")) == 0  # adds no curve of its own
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"tensorboard"}
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(6))


# wandb, offline, with the real library.


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of a ``.wandb`` file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    data, position, collected = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            return  # still being written
        collected += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(collected)
            collected = b""


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A run with configs/loggers/wandb.yaml, and what it wrote."""
    folder = tmp_path_factory.mktemp("wandb") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
            patch.setenv(name, value)
        patch.chdir(folder.parent)
        assert tiny_cli.fit(folder, *OPTIONS, "--config", str(LOGGERS / "wandb.yaml"), pictures=True) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # nothing beside the run folder
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    # wandb's own process writes the file and, on a busy machine, may still be at it.
    deadline = time.monotonic() + 60
    while True:
        records = list(wandb_records(written))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            return folder, records
        time.sleep(0.2)


def history(records: list[Record]) -> list[dict[str, Any]]:
    """The logged steps as key -> value."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_has_the_figures_of_the_run_folder(wandb_run: tuple[Path, list[Record]]) -> None:
    folder, records = wandb_run
    found: dict[str, dict[int, float]] = {}
    for step in history(records):
        for name, value in step.items():
            if isinstance(value, int | float) and not name.startswith(("_", *PICTURES)):
                found.setdefault(name, {})[step["round"]] = value
    assert_scalars(found, folder, exact=True)


def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path: Path) -> None:
    """Else it would count as another seed; one that overwrites is another run."""
    options = (*OPTIONS, "--config", str(LOGGERS / "wandb.yaml"))
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(tmp_path, *options, pictures=True) == 143
    known = (tmp_path / "wandb-id.txt").read_text()
    assert tiny_cli.fit(tmp_path, *options, "--ckpt_path", "last", pictures=True) == 0
    assert (tmp_path / "wandb-id.txt").read_text() == known
    # offline-run-<second>-<id>, and a number behind that if both began in the same second.
    assert {path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*")} == {known.strip()}
    assert tiny_cli.fit(tmp_path, *options, "--run.overwrite", "true", pictures=True) == 0
    assert (tmp_path / "wandb-id.txt").read_text() != known


def test_wandb_axes_are_rounds(wandb_run: tuple[Path, list[Record]]) -> None:
    """Without these definitions wandb would plot over its own step, which pictures and tables also advance."""
    _, records = wandb_run
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in metrics}
    assert {"round", "task"} <= set(axes)
    for pattern in ("cl/*", "train/*", "comm/*", "time/*", "task_*", "fot/*"):
        assert axes[pattern] == "round", pattern


def test_wandb_steps_are_never_dropped(wandb_run: tuple[Path, list[Record]]) -> None:
    """wandb drops what is logged for an earlier step with no more than a warning: every round must have arrived."""
    steps = history(wandb_run[1])
    assert sorted(step["round"] for step in steps if "train/loss" in step) == list(range(6))
    assert [step["_step"] for step in steps] == sorted({step["_step"] for step in steps})


def test_wandb_run_is_grouped_by_benchmark_and_method(wandb_run: tuple[Path, list[Record]]) -> None:
    folder, records = wandb_run
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.job_type) == ("cfl", "permuted-synthetic/fot", "fot")
    assert run.display_name == "fot-seed0"
    config = {
        "/".join(update.nested_key) or update.key: json.loads(update.value_json)
        for record in records
        if record.WhichOneof("record_type") == "config"
        for update in record.config.update
    }
    assert config["config_hash"] == tiny_cli.summary(folder)["config_hash"]
    assert config["schedule"]["batch_size"] == 8
    assert (config["benchmark"], config["method"]) == ("permuted-synthetic", "fot")


def test_wandb_has_the_matrix_as_table_and_picture(wandb_run: tuple[Path, list[Record]]) -> None:
    """One of each per task; a row per learned task, equal to the CSV."""
    folder, records = wandb_run
    steps = [step for step in history(records) if any(name.startswith("cl/accuracy_matrix") for name in step)]
    assert [step["task"] for step in steps] == [0, 1]
    rows = [
        [float(row[key]) for key in ("after_task", "task_0", "task_1")]
        for row in tiny_cli.rows(folder / "accuracy_matrix.csv")
        if row["after_task"] != "init"
    ]
    tables = [json.loads(path.read_text()) for path in folder.glob("wandb/offline-run-*/files/media/table/cl/*.json")]
    assert all(table["columns"] == ["after_task", "task_0", "task_1"] for table in tables)
    assert sorted((table["data"] for table in tables), key=len) == [rows[:1], rows]
    assert len(list(folder.glob("wandb/offline-run-*/files/media/images/cl/accuracy_heatmap*.png"))) == 2
    for picture, count in (("cl/accuracy_curve", 2), ("cl/learning_curve", 1), ("data/partition", 1)):
        assert len(list(folder.glob(f"wandb/offline-run-*/files/media/images/{picture}*.png"))) == count, picture


def test_wandb_run_is_over_when_the_fit_is(wandb_run: tuple[Path, list[Record]]) -> None:
    """A second fit in the same process must not write into the first one's run."""
    import wandb

    assert wandb.run is None
    assert any(record.WhichOneof("record_type") == "exit" for record in wandb_run[1])


def test_without_a_logger_nothing_is_imported_or_written(tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path) == 0
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
