"""Loggers receive the figures of the run folder under documented names, over rounds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot  # noqa: F401  importing it fails while Figure's functions are replaced
import pytest
from lightning.pytorch.loggers import WandbLogger
from PIL import Image
from support import tiny_cli
from support.logged_runs import LOGGERS, OPTIONS, history, records_of
from support.tiny import fit, split, tiny_client, tiny_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from cfl.callbacks.metric_logging import DashboardLog, evaluation_figures
from cfl.methods import APD, FedWeIT, Method
from cfl.methods.base import Report
from cfl.reporting.files_of_run import wandb_id_in

PICTURES = ("cl/accuracy_matrix", "cl/accuracy_heatmap", "cl/accuracy_curve", "cl/learning_curve", "data/partition")


def expected_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return name -> round -> value from the CSV files, with ACC, FGT, ... by their formulas for two tasks."""
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
    """Require every expected name with its rounds and values, and no further name of cl/, final/ or task_."""
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
            # The picture is not blank.
            with Image.open(io.BytesIO(picture.encoded_image_string)) as image:
                assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10, name
    with Image.open(folder / "partition.png") as written:
        shown = board.Images("data/partition")[0]
        assert (shown.width, shown.height) == written.size
    assert "config_hash" in tiny_cli.summary(folder)
    assert "schedule.batch_size: 8" in (folder / "tensorboard" / "hparams.yaml").read_text()


@pytest.mark.parametrize("method", [FedWeIT, APD])
def test_a_methods_rows_of_clients_are_averaged(method: type[Method]) -> None:
    """A method's rows of single clients are logged as means over clients, and client numbers are not logged."""
    data = tiny_data(split(), scenario="task")
    federation = fit(tiny_client(data, methods={"mine": method()}), data)
    rows = [row for row in federation.methods["mine"].report().rows if row["task"] == 1]
    names = {f"mine/{row['layer']}/{key}" for row in rows for key in ("adaptive_share", "mean_gate")}
    figures = evaluation_figures(federation, 1)
    assert {name for name in figures if name.startswith("mine/")} == names
    for layer in {row["layer"] for row in rows}:
        gates = [row["mean_gate"] for row in rows if row["layer"] == layer]
        assert len(set(gates)) > 1
        assert figures[f"mine/{layer}/mean_gate"] == pytest.approx(sum(gates) / len(gates))


def test_accuracy_with_known_tasks_is_logged_beside_that_of_all_classes() -> None:
    data = tiny_data(split(), scenario="class")
    federation = fit(tiny_client(data), data)
    assert federation.known is not None
    matrix = federation.known.compute()
    for task in (0, 1):
        figures = evaluation_figures(federation, task)
        assert figures["cl/acc_task_il"] == pytest.approx(matrix[task, : task + 1].mean().item())
        assert figures["cl/acc_task_il"] >= figures["cl/acc"]  # fewer classes compete
    assert figures["cl/acc_task_il"] > figures["cl/acc"]


class Rows(Method):
    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def report(self) -> Report:
        return Report({}, [self.row])


def test_rows_of_no_task_and_no_round_are_figures_of_none() -> None:
    methods: dict[str, Method] = {"mine": Rows({"x": 1.0}), "timed": Rows({"round": 1, "x": 2.0})}
    federation = fit(tiny_client(data := tiny_data(), methods=methods), data)
    first, second = (evaluation_figures(federation, task) for task in (0, 1))
    assert first["timed/x"] == 2.0
    assert not any(name.startswith("mine/") for name in (*first, *second))
    assert not any(name.startswith("timed/") for name in second)


def test_a_logger_without_a_place_of_its_own_writes_into_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger with ``save_dir`` "." writes into the run folder, one with another folder writes there."""
    monkeypatch.chdir(tmp_path)
    for place, found in ((".", tmp_path / "run"), (str(tmp_path / "elsewhere"), tmp_path / "elsewhere")):
        options = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", place)
        assert tiny_cli.fit(tmp_path / "run", *options, "--run.overwrite", "true") == 0
        (written,) = found.rglob("metrics.csv")
        assert "cl/acc" in tiny_cli.rows(written)[0]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "elsewhere"}


def test_a_run_that_overwrites_has_a_curve_of_its_own(tmp_path: Path) -> None:
    """Overwriting a run removes its TensorBoard file, and keeps the file of the new run."""
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


def test_a_run_that_overwrites_leaves_the_logs_of_runs_below_it(tmp_path: Path) -> None:
    """Overwriting a run removes its own CSVLogger's files, and keeps logs of runs below it and the user's files."""
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    options = (*OPTIONS, "--trainer.logger", json.dumps(logger))
    assert tiny_cli.fit(tmp_path, *options) == 0
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").is_file()
    assert tiny_cli.fit(tmp_path / "below", *OPTIONS, "--config", str(LOGGERS / "tensorboard.yaml")) == 0
    (below,) = (tmp_path / "below").glob("tensorboard/events.*")
    mine = [tmp_path / "mine" / "lightning_logs" / "version_0" / name for name in ("metrics.csv", "best.ckpt")]
    mine += [tmp_path / "board" / "events.out.tfevents.1.host.1.0", tmp_path / "lightning_logs" / "notes.txt"]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert tiny_cli.fit(tmp_path, *options, "--run.overwrite", "true") == 0
    assert below.is_file()
    assert all(file.is_file() for file in mine)
    (tmp_path / "lightning_logs" / "notes.txt").unlink()
    # The second run's folder was named before the first run's was removed.
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_1"]


def test_resumed_run_goes_on_in_the_same_tensorboard_folder(tmp_path: Path) -> None:
    """A resumed run adds its rounds to the curve of the interrupted one, and scoring adds nothing."""
    folder = tmp_path / "run"
    options = ("--config", str(LOGGERS / "tensorboard.yaml"))
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(folder, *options) == 143
    assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt")) == 0
    assert tiny_cli.run("validate", "--ckpt_path", str(folder / "last.ckpt")) == 0  # adds no curve of its own
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"tensorboard"}
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(6))


def test_rounds_that_run_again_are_once_in_tensorboard(tmp_path: Path) -> None:
    """A killed run resumes at its last checkpoint. The rounds after it, which it has logged, are not there twice."""
    folder = tmp_path / "run"
    options = ("--config", str(LOGGERS / "tensorboard.yaml"))
    with tiny_cli.die_at("training", 1, 15):
        assert tiny_cli.fit(folder, *options, pictures=True) == 143
    checkpoint = (folder / "last.ckpt").read_bytes()
    with tiny_cli.die_at("training", 4, 15):
        assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt"), pictures=True) == 143
    (folder / "last.ckpt").write_bytes(checkpoint)  # as if killed before it wrote another one
    assert tiny_cli.run("fit", "--ckpt_path", str(folder / "last.ckpt"), pictures=True) == 0
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    rows = tiny_cli.rows(folder / "rounds.csv")
    found = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert found == [(r, pytest.approx(float(row["loss"]))) for r, row in enumerate(rows)]
    assert [event.step for event in board.Scalars("cl/acc")] == [2, 5]
    assert {name: [p.step for p in board.Images(name)] for name in board.Tags()["images"]} == {
        "data/partition": [0],
        "cl/accuracy_matrix": [2, 5],
        "cl/accuracy_curve": [2, 5],
    }


# wandb, offline, with the real library.


def offline_ids(folder: Path) -> list[str]:
    """Return the ids of the runs that ``wandb sync`` would send, from ``offline-run-<second>-<id>``."""
    return [path.name.split("-")[3] for path in folder.glob("wandb/offline-run-*")]


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A run with configs/loggers/wandb.yaml, and the records in its wandb file."""
    folder = tmp_path_factory.mktemp("wandb") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
            patch.setenv(name, value)
        patch.chdir(folder.parent)
        assert tiny_cli.fit(folder, *OPTIONS, "--config", str(LOGGERS / "wandb.yaml"), pictures=True) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # nothing beside the run folder
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return folder, records_of(written)


def test_wandb_has_the_figures_of_the_run_folder(wandb_run: tuple[Path, list[Record]]) -> None:
    folder, records = wandb_run
    found: dict[str, dict[int, float]] = {}
    for step in history(records):
        for name, value in step.items():
            if isinstance(value, int | float) and not name.startswith(("_", *PICTURES)):
                found.setdefault(name, {})[step["round"]] = value
    assert_scalars(found, folder, exact=True)


def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path: Path) -> None:
    """A resumed run keeps its id at wandb, so that it does not count as another seed. Overwriting makes a new id."""
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


def test_a_run_that_goes_on_in_another_folder_is_the_same_run_at_wandb(tmp_path: Path) -> None:
    """A run that is resumed into another folder keeps its id at wandb, and replaces the id of the run there."""
    options = ("--config", str(LOGGERS / "wandb.yaml"))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        with tiny_cli.die_at("training", 1, 15):
            assert tiny_cli.fit(folder, *options) == 143
    known = (first / "wandb-id.txt").read_text()
    assert (second / "wandb-id.txt").read_text() != known
    elsewhere = ("--ckpt_path", str(first / "last.ckpt"), "--run.overwrite", "true")
    assert tiny_cli.fit(second, *options, *elsewhere, pictures=True) == 0
    assert (second / "wandb-id.txt").read_text() == known
    assert offline_ids(second) == [known.strip()]
    assert len(tiny_cli.rows(second / "rounds.csv")) == 6


def test_a_run_that_overwrites_takes_what_waits_for_sync_with_it(tmp_path: Path) -> None:
    """Overwriting a run removes its offline files of wandb, so that ``wandb sync`` sends one run. Other files stay."""
    options = ("--config", str(LOGGERS / "wandb.yaml"))
    assert tiny_cli.fit(tmp_path, *options, pictures=True) == 0
    old = (tmp_path / "wandb-id.txt").read_text().strip()
    again = tmp_path / "wandb" / f"offline-run-20250101_000000-{old}-1"  # the name of a second run in one second
    others = {tmp_path / "wandb" / f"{name}" for name in (f"offline-run-20250101_000000-my{old}", f"kept-{old}", old)}
    for folder in (again, *others):
        folder.mkdir()
        (folder / "file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "wandb" / f"offline-run-20250101_000001-{old}"
    link.symlink_to(elsewhere)
    assert tiny_cli.fit(tmp_path, *options, "--run.overwrite", "true", pictures=True) == 0
    new = (tmp_path / "wandb-id.txt").read_text().strip()
    left = {path for path in tmp_path.glob("wandb/*") if path.is_dir() and path.name != "latest-run"}
    (of_new,) = left - others - {link}
    assert of_new.name.split("-")[3] == new != old
    assert others <= left
    assert link.is_symlink()
    assert all((folder / "file").exists() for folder in others)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"../*"])
def test_a_damaged_id_of_wandb_is_nobodys(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "wandb-id.txt").write_bytes(content)
    assert wandb_id_in(tmp_path) is None


def test_wandb_axes_are_rounds(wandb_run: tuple[Path, list[Record]]) -> None:
    """Metrics at wandb are plotted over rounds, not over wandb's own step, which pictures and tables advance, too."""
    _, records = wandb_run
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in metrics}
    assert {"round", "task"} <= set(axes)
    for pattern in ("cl/*", "train/*", "comm/*", "time/*", "task_*", "fot/*"):
        assert axes[pattern] == "round", pattern


def test_wandb_steps_are_never_dropped(wandb_run: tuple[Path, list[Record]]) -> None:
    """Every round is in wandb's file, in increasing steps: wandb drops values of earlier steps with only a warning."""
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
    """wandb has the matrix as a table and as a picture after every task. The table has the CSV file's rows."""
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
    """The wandb run is closed after a fit, so that a second fit in the same process does not write into it."""
    import wandb

    assert wandb.run is None
    assert any(record.WhichOneof("record_type") == "exit" for record in wandb_run[1])


@pytest.mark.parametrize(
    "wrong", [("--model.optimizer.lr", "1e30"), ("--model.optimizer", "LBFGS")], ids=["in a round", "in a set-up"]
)
def test_wandb_run_is_over_when_the_fit_has_failed(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    """The wandb run of a failed fit is closed as failed, and the next fit in the process has its own run."""
    import wandb

    options = ("--config", str(LOGGERS / "wandb.yaml"))
    assert tiny_cli.fit(tmp_path / "failed", *options, *wrong) == 2
    assert wandb.run is None
    (failed,) = tmp_path.glob("failed/wandb/offline-run-*/run-*.wandb")
    assert [record.exit.exit_code for record in records_of(failed) if record.WhichOneof("record_type") == "exit"] == [1]
    assert tiny_cli.fit(tmp_path / "next", *options, pictures=True) == 0
    assert offline_ids(tmp_path / "next") == [(tmp_path / "next" / "wandb-id.txt").read_text().strip()]


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_wandb_run_is_over_after_every_stage(stage: str) -> None:
    """The wandb run is closed after every stage, as a Trainer used from Python may score with a logger."""
    trainer = mock.Mock(loggers=[mock.Mock(spec=WandbLogger)], is_global_zero=True)
    with mock.patch("wandb.finish") as finish:
        DashboardLog().teardown(trainer, mock.Mock(), stage)
    finish.assert_called_once_with(exit_code=0)


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_scoring_logs_nothing(tmp_path: Path, logger: str) -> None:
    """Scoring opens none of the loggers in a run's config.yaml, which would leave an empty curve or run."""
    assert tiny_cli.fit(tmp_path, "--config", str(LOGGERS / f"{logger}.yaml"), pictures=True) == 0
    before = set(tmp_path.rglob("*"))
    for command in ("validate", "test"):
        assert tiny_cli.run(command, "--ckpt_path", str(tmp_path / "last.ckpt")) == 0
        assert set(tmp_path.rglob("*")) == before, command
    import wandb

    assert wandb.run is None


def test_without_a_logger_no_folder_is_written(tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path) == 0
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
