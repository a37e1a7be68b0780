"""Training, loading and using runs from Python."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from support.tiny import tiny_client, tiny_data
from support.tiny_cli import TINY
from support.tiny_cli import fit as fit_by_command
from support.tiny_cli import run as command

import cfl
from cfl.api.fitting import _as_options
from cfl.callbacks import OF_SECTIONS, FederatedOrchestrator, RunRecord
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Shards
from cfl.data.schedule import Schedule
from cfl.data.sources import Features, Synthetic
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.methods import EWC
from cfl.models import MLP
from cfl.reporting.csv_file import RunFolderError
from cfl.runtime.errors import ConfigError, NotUnderstood
from cfl.runtime.yaml_file import parse_yaml
from cfl.training.client import Client

IMAGES = Synthetic(num_classes=4, shape=(1, 4, 4), train_size=96, test_size=40, noise=60.0)


class Seen(Callback):
    """Keeps what callbacks see after each round."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cfl.Run:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return cfl.fit(TINY, {"run.dir": folder, "methods": {"ewc": {"class_path": "EWC"}}})


class Own(EWC):
    """A method from outside the package."""


def test_a_run_with_an_own_class_has_its_model(tmp_path: Path) -> None:
    own = cfl.fit(TINY, {"run.dir": tmp_path / "own", "methods": {"own": {"class_path": f"{__name__}.Own"}}})
    images = torch.zeros(2, 1, 4, 4)
    assert own.model(images).shape[0] == 2
    with pytest.raises((ConfigError, NotUnderstood), match=r"--allow PACKAGE, or allow=\[\.\.\.\] in Python,"):
        _ = cfl.load(own.folder).model
    for allow in (__name__, [__name__]):
        assert torch.equal(cfl.load(own.folder, allow).model(images), own.model(images))


def test_data_sets_made_after_loading_a_run_are_read_from_their_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the same name under another root has its own moments, sizes and names."""

    def write(folder: Path, shift: float, names: list[str]) -> None:
        folder.mkdir()
        values, labels = np.random.default_rng(0).normal(shift, size=(24, 3)), np.arange(24) % len(names)
        parts = {f"{part}_features": values for part in ("train", "test")}
        np.savez(folder / "f.npz", train_labels=labels, test_labels=labels, class_names=names, **parts)

    write(tmp_path / "a", 0, ["x", "y"])
    write(tmp_path / "b", 100, ["one", "two", "three"])
    sources = json.dumps([{"class_path": "Features", "init_args": {"path": "f.npz"}}])
    own = ["--data.stream=Sequence", f"--data.stream.sources={sources}", f"--data.root={tmp_path / 'a'}"]
    assert fit_by_command(tmp_path / "run", *own, "--data.partition=IID", "--schedule.rounds_per_task=1") == 0
    assert command("validate", "--ckpt_path", str(tmp_path / "run")) == 0
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "b"))
    source = Features("f.npz")
    images = source.load(tmp_path / "b")[0].images
    assert (source.num_classes, source.names(tmp_path / "b")) == (3, ("one", "two", "three"))
    torch.testing.assert_close(images.mean(dim=0), torch.zeros(1, 1, 3), rtol=0, atol=1e-5)


def test_a_fit_is_that_of_the_command(run: cfl.Run, tmp_path: Path) -> None:
    assert fit_by_command(tmp_path / "run", "--methods.ewc=EWC") == 0
    other = cfl.load(tmp_path / "run")
    assert torch.equal(run.accuracy_matrix, other.accuracy_matrix)
    assert (run.acc, run.fgt, run.bwt, run.figures.config_hash) == (
        other.acc,
        other.fgt,
        other.bwt,
        other.figures.config_hash,
    )
    assert run.accuracy_matrix.shape == (2, 2)
    assert f"ACC {run.acc:.2f}" in repr(run)
    assert run.folder.name == "tiny"


def test_later_settings_are_laid_over_earlier_ones(tmp_path: Path) -> None:
    first = {"schedule": {"rounds_per_task": 2, "clients_per_round": 1}, "run": {"dir": str(tmp_path / "run")}}
    run = cfl.fit(TINY, first, {"schedule.rounds_per_task": 1})
    assert run.figures.rounds == 2
    assert "clients_per_round: 1" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"schedule.clients_per_round": 0}, ConfigError, "schedule.clients_per_round = 0"),
        ({"model.optimizer.lrr": 0.1}, NotUnderstood, "model.optimizer.lrr is no option of SGD; valid: lr"),
        ({"schedule": {"batch_size": "many"}}, NotUnderstood, "schedule.batch_size"),
        ({"model.network": torch.zeros(1)}, ConfigError, "model.network"),
    ],
)
def test_bad_settings_raise_their_sentence_and_print_nothing(
    settings: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind) as caught:
        cfl.fit(TINY, {"run.dir": tmp_path / "run"}, settings)
    assert said in str(caught.value)
    assert "error" not in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("callbacks", "shown"), [([1], "'int'"), ([Seen], "'type'"), (Seen(), "'Seen'")])
def test_what_is_no_callback_is_refused(callbacks: Any, shown: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"callbacks = {shown} cannot work; valid: a list of objects"):
        cfl.fit(TINY, {"run.dir": tmp_path / "run"}, callbacks=callbacks)
    with pytest.raises(ConfigError, match=f"callbacks = {shown} cannot work"):
        cfl.trainer(tiny_data(), callbacks=callbacks)
    assert not (tmp_path / "run").exists()


def test_a_run_that_a_callback_ends_says_how_to_go_on(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    settings: dict[str, Any] = {"run.dir": tmp_path / "run"}
    with pytest.raises(RunFolderError, match=r"run: a callback ended the run .*\{'ckpt_path': 'last'\} continues it"):
        cfl.fit(TINY, settings, callbacks=[Ends()])
    assert cfl.fit(TINY, {**settings, "ckpt_path": "last"}).acc is not None


def test_callbacks_see_losses_every_round_and_figures_when_they_are_new(tmp_path: Path) -> None:
    seen = Seen()
    run = cfl.fit(TINY, {"run.dir": tmp_path / "run"}, callbacks=[seen])
    assert [("cl/acc" in metrics) for metrics in seen.metrics] == [False, False, True] * 2
    assert all(metrics["train/loss"] > 0 for metrics in seen.metrics)
    assert seen.metrics[-1]["cl/acc"] == pytest.approx(run.acc)
    assert seen.metrics[-1]["cl/fgt"] == pytest.approx(run.fgt)
    assert "cl/fgt" not in seen.metrics[2]  # undefined after the first task


def test_a_run_is_loaded_by_its_checkpoint_too(run: cfl.Run) -> None:
    assert cfl.load(run.folder / "last.ckpt").folder == run.folder


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        cfl.load(tmp_path / "none")


def test_a_folder_of_runs_names_those_in_it(run: cfl.Run, tmp_path: Path) -> None:
    for name in ("a/first", "a/second", "b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text("{}")
    with pytest.raises(RunFolderError) as several:
        cfl.load(tmp_path)
    found = ", ".join(str(tmp_path / name) for name in ("a/first", "a/second", "b"))
    assert str(several.value) == f"{tmp_path} holds no finished run; runs below it: {found}"
    with pytest.raises(RunFolderError) as one:
        cfl.load(run.folder.parent)
    assert str(one.value) == f"{run.folder.parent} holds no finished run; runs below it: {run.folder}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match=r"empty holds no finished run: summary\.json is missing$"):
        cfl.load(tmp_path / "empty")


def test_predictions_have_the_accuracy_of_the_runs_tests(run: cfl.Run) -> None:
    _, test = IMAGES.load(Path())
    found = run.predict(test.images)  # the first task permutes nothing
    assert 100 * found.eq(test.labels).double().mean() == pytest.approx(run.accuracy_matrix[-1, 0].item())
    normalised = IMAGES.transform()(test.images)
    assert torch.equal(run.predict(normalised.numpy()), found)
    assert torch.equal(run.model(normalised).argmax(1), found)


def test_images_that_cannot_be_are_refused(run: cfl.Run) -> None:
    with pytest.raises(ConfigError, match=r"^images = 'str' .*an array or a tensor; cfl predict reads files"):
        run.predict("x.png")
    with pytest.raises(ConfigError, match=r"^images = 'NoneType' .*an array or a tensor"):
        run.predict(None)
    with pytest.raises(ConfigError, match=r"images = \[3, 1, 5, 4\].*\[N, 1, 4, 4\]"):
        run.predict(torch.zeros(3, 1, 5, 4))
    with pytest.raises(ConfigError, match=r"torch\.int32"):
        run.predict(torch.zeros(3, 1, 4, 4, dtype=torch.int32))
    images = torch.zeros(3, 1, 4, 4)
    images[1, 0, 2] = torch.nan
    with pytest.raises(ConfigError, match=r"^images\[1\] = .*nan.* the network's outputs for these are not finite"):
        run.predict(images)


def test_smaller_images_of_a_data_set_are_enlarged_as_in_tests(tmp_path: Path) -> None:
    small = {"class_path": "Synthetic", "init_args": {"num_classes": 2, "shape": [1, 3, 3], "max_test": 20}}
    large = {"class_path": "Synthetic", "init_args": {"num_classes": 2, "shape": [3, 4, 4]}}
    settings = {
        "data.stream": {"class_path": "Sequence", "init_args": {"sources": [small, large]}},
        "data.scenario": "task",
        "data.partition": "IID",
        "schedule.rounds_per_task": 1,
        "run.dir": tmp_path / "run",
    }
    run = cfl.fit(TINY, settings)
    _, test = Synthetic(num_classes=2, shape=(1, 3, 3), max_test=20).load(Path())
    found = run.predict(test.images, task=0)
    accuracy = 100 * found.eq(test.labels).double().mean()
    assert accuracy == pytest.approx(run.accuracy_matrix[-1, 0].item())
    with pytest.raises(ConfigError, match=r"images = \[20, 1, 3, 3\].* shape \[N, 3, 4, 4\]$"):
        run.predict(test.images, task=1)


def test_mappings_with_names_of_the_users_own_and_numbers_of_numpy(tmp_path: Path) -> None:
    secure = {"aggregation": "modelled", "codecs": {"update": {"range": 4, "bits": 20}}}
    settings = {"federated": secure, "seed_everything": np.int64(3), "model.optimizer.lr": np.float64(0.05)}
    run = cfl.fit(TINY, {"run.dir": tmp_path / "run", "schedule.rounds_per_task": 1}, settings)
    assert run.figures.seed == 3
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["federated"]["codecs"] == {"update": {"range": 4, "bits": 20}}
    assert config["model"]["optimizer"]["init_args"]["lr"] == 0.05


@pytest.mark.parametrize(
    "text", ["\U0001f600 \xe9", "a\u2028b\x85c", "\x7f", "\ufeff", "\\ud83d", "\"'{}: #", "1e-3", "null"]
)
def test_texts_within_a_class_reach_the_parser_as_they_are(text: str) -> None:
    """Words of a command line are read as YAML, in which JSON's escapes of characters beyond 16 bits are none."""
    given = {"class_path": "ImageFolder", "init_args": {"path": text, "list": [text, 1.5, True, None]}}
    (word,) = _as_options({"data": {"source": given}})
    assert word.startswith("--data.source=")
    assert parse_yaml(word.partition("=")[2]) == given


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, np.float32(np.inf), 1e-7, 0.1, 1e22])
def test_numbers_reach_the_parser_as_they_are(number: float) -> None:
    """So do infinity and NaN, which JSON and YAML write differently, and texts in which these words stand."""
    text = 'NaN and "-Infinity"'
    _, word = _as_options({"a": number, "b": [number, {"Infinity": number, "c": text}]})
    same = pytest.approx(float(number), rel=0, abs=0, nan_ok=True)
    assert parse_yaml(word.partition("=")[2]) == [same, {"Infinity": same, "c": text}]
    (word,) = _as_options({"a": number})
    assert parse_yaml(word.partition("=")[2]) == same


def test_task_incremental_predictions_are_among_the_tasks_outputs(tmp_path: Path) -> None:
    task_incremental = {
        "data.stream": {"class_path": "ClassSplit", "init_args": {"num_tasks": 2, "source": "Synthetic"}},
        "data.scenario": "task",
        "data.partition": "IID",
        "schedule.rounds_per_task": 1,
        "run.dir": tmp_path / "run",
    }
    run = cfl.fit(TINY, task_incremental)
    shape = run._client.require_federation().data.input_shape
    images = torch.zeros(2, *shape, dtype=torch.uint8)
    half = run._client.require_federation().data.num_outputs // 2
    assert int(run.predict(images, task=0).max()) < half <= int(run.predict(images, task=1).min())
    with pytest.raises(ConfigError, match="task = None"):
        run.predict(images)
    with pytest.raises(ConfigError, match="task = 2"):
        run.predict(images, task=2)


def test_pictures_are_returned(run: cfl.Run) -> None:
    printed = {text.get_text() for text in run.plot_matrix().axes[0].texts}
    assert {f"{value:.1f}" for value in run.accuracy_matrix.flatten().tolist()} <= printed
    after_each_task = [run.accuracy_matrix[0, 0].item(), run.accuracy_matrix[1].mean().item()]
    drawn = [line.get_ydata() for line in run.plot_curve().axes[0].lines]
    assert any(len(values) == 2 and values == pytest.approx(after_each_task) for values in drawn)


def test_a_run_from_parts_is_that_of_the_same_configuration(run: cfl.Run, tmp_path: Path) -> None:
    data = FederatedDataModule(
        stream=Permuted(IMAGES, num_tasks=2),
        partition=Shards(2),
        num_clients=4,
        schedule=Schedule(rounds_per_task=3, clients_per_round=2, batch_size=8, cohort_width=10),
    )
    client = Client(
        partial(MLP, hidden=[8], dropout=0.0),
        partial(torch.optim.SGD, lr=0.2),
        {"ewc": EWC()},
        data.input_shape,
        data.num_outputs,
        engine=EngineOptions(kind="vmap"),
    )
    trainer = cfl.trainer(data, tmp_path / "run", [FederatedOrchestrator(server_lr=1.0)], accelerator="cpu")
    assert {type(callback) for callback in trainer.callbacks} >= {*OF_SECTIONS.values()}  # type: ignore[attr-defined]
    trainer.fit(client, data)
    found = cfl.load(tmp_path / "run")
    assert torch.equal(found.accuracy_matrix, run.accuracy_matrix)
    with pytest.raises(RunFolderError, match=r"config\.yaml.* made of parts, its model is client\.network$"):
        found.model  # noqa: B018


def test_a_trainer_serves_one_client(tmp_path: Path) -> None:
    """Lightning would train nothing, and the folder would lose its summary."""
    data = tiny_data()
    trainer = cfl.trainer(data, tmp_path / "run", accelerator="cpu")
    trainer.fit(tiny_client(data), data)
    acc = cfl.load(tmp_path / "run").acc
    with pytest.raises(RuntimeError, match=r"this Trainer has trained another Client for \d+ rounds; .* a new Trainer"):
        trainer.fit(tiny_client(data), data)
    assert cfl.load(tmp_path / "run").acc == acc


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_trainer_takes_the_accelerators_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPU has no float64: it is not taken by itself and refused by name."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert isinstance(cfl.trainer(tiny_data()).accelerator, CPUAccelerator)
    for asked in ("mps", "gpu"):
        with pytest.raises(ConfigError, match=f"^accelerator = '{asked}' cannot work; valid: auto or cpu: torch finds"):
            cfl.trainer(tiny_data(), accelerator=asked)


@pytest.mark.parametrize(("logger", "shown"), [(True, "True"), (CSVLogger("logs"), "'CSVLogger'")])
def test_a_logger_without_a_run_folder_is_refused(logger: Any, shown: str, tmp_path: Path) -> None:
    """It would get no figures."""
    with pytest.raises(ConfigError, match=f"logger = {shown} cannot work; valid: false without run_dir"):
        cfl.trainer(tiny_data(), logger=logger, accelerator="cpu")
    assert cfl.trainer(tiny_data(), tmp_path, logger=CSVLogger(tmp_path), accelerator="cpu").loggers


def test_a_tilde_is_the_home_folder(run: cfl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run.folder.parent))
    assert cfl.load(f"~/{run.folder.name}").acc == run.acc
    trainer: Any = cfl.trainer(tiny_data(), "~/another", accelerator="cpu")
    (record,) = [one for one in trainer.callbacks if isinstance(one, RunRecord)]
    assert record.folder == run.folder.parent / "another"


class Stop(Callback):
    """Ends a fit after two rounds."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_a_run_from_parts_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Without its checkpoint the folder is refused, and nothing in it changes."""
    data = tiny_data()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cfl.trainer(data, whole, accelerator="cpu").fit(tiny_client(data), data)
    cfl.trainer(data, parts, [Stop()], accelerator="cpu").fit(tiny_client(data), data)
    rows = (parts / "rounds.csv").read_text()
    assert rows.count("\n") == 3
    with pytest.raises(ConfigError, match=r"run\.dir = .* this one holds an interrupted run"):
        cfl.trainer(data, parts, accelerator="cpu").fit(tiny_client(data), data)
    assert (parts / "rounds.csv").read_text() == rows
    trainer = cfl.trainer(data, parts, accelerator="cpu")
    trainer.fit(tiny_client(data), data, ckpt_path=parts / "last.ckpt", weights_only=True)
    assert torch.equal(cfl.load(parts).accuracy_matrix, cfl.load(whole).accuracy_matrix)
    rounds = (parts / "rounds.csv").read_text().splitlines()
    assert len(rounds) == 1 + data.num_rounds
    assert rounds[:2] == rows.splitlines()[:2]  # of the checkpoint's round, which was not run again
    assert not list(parts.glob(".fit-lock"))


def test_a_run_from_parts_leaves_no_configuration_of_a_run_that_it_overwrites(tmp_path: Path) -> None:
    assert fit_by_command(tmp_path) == 0
    assert (tmp_path / "config.yaml").exists()
    record = RunRecord(str(tmp_path), overwrite=True)
    trainer = cfl.trainer(data := tiny_data(), tmp_path, [record], accelerator="cpu")
    trainer.fit(tiny_client(data), data)
    assert cfl.load(tmp_path).acc is not None
    assert not (tmp_path / "config.yaml").exists()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, cfl; dir(cfl); assert 'torch' not in sys.modules; cfl.fit; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trainer_leaves_out_what_lightning_says_of_every_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"), caplog.at_level(logging.INFO, "lightning.fabric"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        assert "GPU available" in caplog.text
        caplog.clear()
        cfl.trainer(tiny_data(), accelerator="cpu")
        assert caplog.text == ""


@pytest.mark.parametrize("silenced", [False, True])
def test_a_trainer_leaves_out_that_torch_computes_attention_client_by_client(silenced: bool) -> None:
    """Torch warns of it in the forward and in the backward pass, and says to file an issue."""
    clients = torch.randn(2, 3, 1, 4, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if silenced:
            cfl.trainer(tiny_data(), accelerator="cpu")
        said.clear()
        torch.func.vmap(torch.func.grad(loss))(clients)
    assert (sum("_scaled_dot_product_flash_attention_for_cpu" in str(one.message) for one in said) >= 2) is not silenced
    assert bool(said) is not silenced
