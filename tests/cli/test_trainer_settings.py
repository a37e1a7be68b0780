"""Every argument of Lightning's Trainer works as its name says, or is refused before training."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from support import tiny_cli

from cfl.callbacks.trainer_checks import check_evaluation
from cfl.cli.trainer_settings import WITHOUT_CHOICE
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client
from cfl.training.strategy import ClientParallel

REFUSED: dict[str, tuple[str, str]] = {
    "devices": ("5000", "at most 4096"),
    "num_nodes": ("5000", "at most 4096"),
    "strategy": ("ddp", "trainer.strategy = 'DDPStrategy' cannot work; valid: auto for one process"),
    "precision": ("64-true", "trainer.precision = '64-true'"),
    "fast_dev_run": (
        "3",
        "valid: false; a short run has --schedule.rounds_per_task 1 --data.stream.num_tasks 2",
    ),
    "max_epochs": ("3", "follows from schedule"),
    "min_epochs": ("3", "schedule and targets"),
    "max_steps": ("3", "schedule says"),
    "min_steps": ("3", "schedule and targets"),
    "max_time": ("00:00:10:00", "timeout -s TERM"),
    "limit_train_batches": ("0.5", "a shorter schedule or max_train"),
    "limit_val_batches": ("0.5", "max_test of the source"),
    "limit_test_batches": ("0.5", "max_test of the source"),
    "limit_predict_batches": ("0.5", "no command calls the Trainer's predict"),
    "overfit_batches": ("0.5", "max_train of the source"),
    "val_check_interval": ("0.5", "schedule.evaluate_every"),
    "check_val_every_n_epoch": ("2", "schedule.evaluate_every"),
    "num_sanity_val_steps": ("2", "-1, or 0"),
    "log_every_n_steps": ("10", "figures are logged after every round"),
    "enable_checkpointing": ("false", "checkpoint.enabled=false"),
    "enable_progress_bar": ("true", "progress.enabled=false"),
    "accumulate_grad_batches": ("2", "schedule.batch_size"),
    "gradient_clip_algorithm": ("value", "trainer.gradient_clip_algorithm = 'value' cannot work; valid: null, or"),
    "barebones": ("true", "trainer.barebones = True"),
    "plugins": ("lightning.pytorch.plugins.io.AsyncCheckpointIO", "trainer.plugins = 'AsyncCheckpointIO'"),
    "sync_batchnorm": ("true", "batch statistics of clients never mix"),
    "reload_dataloaders_every_n_epochs": ("2", "a loader per round"),
    "default_root_dir": ("elsewhere", "run.dir"),
    "enable_autolog_hparams": ("false", "loggers get the configuration of a run"),
    "model_registry": ("mine", "cfl export"),
}
"""Argument -> a value that is refused, and a text of the message."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_apples_gpu_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for asked in ("gpu", "mps"):
        assert tiny_cli.fit(tmp_path, "--trainer.accelerator", asked) == 2
        assert f"trainer.accelerator = '{asked}' cannot work; valid: auto or cpu" in capsys.readouterr().err
    assert tiny_cli.fit(tmp_path, "--trainer.accelerator", "auto") == 0
    assert "device cpu" in capsys.readouterr().out


def test_help_leaves_out_what_has_one_valid_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(REFUSED) >= WITHOUT_CHOICE  # so that each is tested to be refused
    assert tiny_cli.run("fit", "--help") == 0
    listed = set(re.findall(r"--trainer\.(\w+)", capsys.readouterr().out))
    every = set(inspect.signature(Trainer).parameters)
    assert listed - {"help"} == every - WITHOUT_CHOICE


def test_code_in_checkpoints_cannot_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path / "run", "--weights_only", "false") == 2
    assert capsys.readouterr().err.startswith("error: weights_only = False cannot work; valid: true")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_help_leaves_out_what_cannot_be_set(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.run(command, "--help") == 0
    said = capsys.readouterr().out
    for option in ("--weights_only", "--model.methods", "--federated.measures", "--> "):
        assert option not in said
    assert "--methods.help" in said


@pytest.mark.parametrize("argument", REFUSED)
def test_refused_before_training(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, said = REFUSED[argument]
    assert tiny_cli.fit(tmp_path / "run", f"--trainer.{argument}", value) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: trainer.")
    assert said in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def during(monkeypatch: pytest.MonkeyPatch, step: str, look: Callable[[], Any]) -> list[Any]:
    """Return a list that gets the result of ``look`` at every later call of a method of Client."""
    seen: list[Any] = []
    original = getattr(Client, step)

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(look())
        return original(*arguments, **options)

    monkeypatch.setattr(Client, step, watched)
    return seen


def accelerator(tmp_path: Path, **_: Any) -> None:
    assert tiny_cli.fit(tmp_path, "--trainer.accelerator", "cpu") == 0
    assert tiny_cli.summary(tmp_path)["device"] == "cpu"


def logger(tmp_path: Path, **_: Any) -> None:
    """A relative ``save_dir`` is below the run folder, an absolute one is used as it is."""
    options = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir")
    assert tiny_cli.fit(tmp_path / "run", *options, "logs/csv") == 0
    assert list(tmp_path.rglob("metrics.csv")) == [tmp_path / "run/logs/csv/lightning_logs/version_0/metrics.csv"]
    (tmp_path / "run" / "mine.txt").touch()
    assert tiny_cli.fit(tmp_path / "run", *options, str(tmp_path / "far"), "--run.overwrite", "true") == 0
    assert list(tmp_path.rglob("metrics.csv")) == [tmp_path / "far/lightning_logs/version_0/metrics.csv"]
    assert (tmp_path / "run" / "mine.txt").exists()


def callbacks(tmp_path: Path, **_: Any) -> None:
    """With a callback that reads it, ``log_every_n_steps`` is accepted."""
    options = ("--trainer.callbacks", "LearningRateMonitor", "--trainer.log_every_n_steps", "1")
    to = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".")
    assert tiny_cli.fit(tmp_path, *options, *to) == 0
    (table,) = tmp_path.rglob("metrics.csv")
    assert {row["lr-SGD"] for row in tiny_cli.rows(table)} == {"", "0.2"}


def enable_model_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], **_: Any) -> None:
    assert tiny_cli.fit(tmp_path, "--trainer.enable_model_summary", "true") == 0
    out = capsys.readouterr().out
    assert "Total params: 172" in out
    assert "MLP" in out


def gradient_clip_val(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    """The gradient of each client of a cohort has the given norm if its own norm is larger."""
    seen: list[float] = []
    step = torch.optim.SGD.step

    def watched(optimizer: Any, *given: Any, **options: Any) -> Any:
        result = step(optimizer, *given, **options)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]  # [K, ...] each
        assert len(grads[0]) == 2
        seen.extend(torch.cat([grad.flatten(1) for grad in grads], 1).norm(dim=1).tolist())
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    options = ("--engine.kind", "vmap", "--schedule.cohort_width", "2")
    assert tiny_cli.fit(tmp_path, "--trainer.gradient_clip_val", "1e-4", *options) == 0
    assert seen == pytest.approx([1e-4] * len(seen), rel=0.01)


def deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    seen = during(monkeypatch, "validation_step", torch.are_deterministic_algorithms_enabled)
    try:
        assert tiny_cli.fit(tmp_path, "--trainer.deterministic", "true") == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {True}


def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    before = torch.backends.cudnn.benchmark
    seen = during(monkeypatch, "validation_step", lambda: torch.backends.cudnn.benchmark)
    try:
        for wanted in (True, False):
            folder = tmp_path / str(wanted)
            assert tiny_cli.fit(folder, "--trainer.benchmark", str(wanted).lower()) == 0
            assert set(seen) == {wanted}
            seen.clear()
    finally:
        torch.backends.cudnn.benchmark = before


def inference_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    """``validate`` evaluates in inference mode exactly if the option says so."""
    assert tiny_cli.fit(tmp_path) == 0
    for wanted in ("true", "false"):
        seen = during(monkeypatch, "validation_step", torch.is_inference_mode_enabled)
        checkpoint = str(tmp_path / "last.ckpt")
        assert tiny_cli.run("validate", "--ckpt_path", checkpoint, "--trainer.inference_mode", wanted) == 0
        assert set(seen) == {wanted == "true"}


def use_distributed_sampler(**_: Any) -> None:
    """The setting is refused with several processes, whose test sets it would divide a second time."""
    common: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    check_evaluation(Trainer(**common, devices=1, use_distributed_sampler=True))
    check_evaluation(Trainer(**common, devices=2, strategy=ClientParallel(), use_distributed_sampler=False))
    with pytest.raises(ConfigError, match=r"trainer\.use_distributed_sampler = True"):
        check_evaluation(Trainer(**common, devices=2, strategy=ClientParallel(), use_distributed_sampler=True))


def profiler(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    **_: Any,
) -> None:
    """A profiler's report is shown, or written into the run folder. Profilers that cannot work are refused."""
    monkeypatch.chdir(tmp_path)
    told = logging.getLogger("lightning.pytorch.profilers")
    told.addHandler(caplog.handler)
    try:
        for kind in ("simple", "advanced"):
            assert tiny_cli.fit(tmp_path / kind, "--trainer.profiler", kind) == 0
            assert "FIT Profiler Report" in caplog.text
            caplog.clear()
    finally:
        told.removeHandler(caplog.handler)
    for refused in ("pytorch", "PyTorchProfiler", "xla"):
        assert tiny_cli.fit(tmp_path / "run", "--trainer.profiler", refused) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: trainer.profiler = '{refused}' cannot work; valid: null, simple")
        assert message.count("\n") == 1
    without_names = ("--trainer.profiler", "PyTorchProfiler", "--trainer.profiler.record_module_names", "false")
    assert tiny_cli.fit(tmp_path / "run", *without_names) == 0
    assert list((tmp_path / "run").glob("fit-*.pt.trace.json"))
    written = ("--trainer.profiler", "SimpleProfiler", "--trainer.profiler.filename", "times")
    for options, found in (
        ((), "run/fit-times.txt"),
        (("--trainer.profiler.dirpath", "some"), "run/some/fit-times.txt"),
    ):
        assert tiny_cli.fit(tmp_path / "run", *written, *options, "--run.overwrite", "true") == 0
        assert "FIT Profiler Report" in (tmp_path / found).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"simple", "advanced", "run"}


def detect_anomaly(tmp_path: Path, capsys: pytest.CaptureFixture[str], **_: Any) -> None:
    """With the vmap engine the error names the operation. An engine that may not use autograd is refused."""
    options = ("--trainer.detect_anomaly", "true", "--model.optimizer.lr", "1e30")
    with pytest.raises(RuntimeError, match="returned nan values"):
        tiny_cli.fit(tmp_path / "run", *options)
    capsys.readouterr()
    assert tiny_cli.fit(tmp_path / "other", *options, "--engine.kind", "auto") == 2
    assert "trainer.detect_anomaly = True cannot work; valid: false, or engine.kind=vmap" in capsys.readouterr().err


WORKS = (
    *(accelerator, logger, callbacks, enable_model_summary, gradient_clip_val, deterministic, benchmark),
    *(inference_mode, use_distributed_sampler, profiler, detect_anomaly),
)


@pytest.mark.parametrize("argument", WORKS, ids=lambda works: works.__name__)
def test_works_as_its_name_says(
    argument: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    argument(tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys, caplog=caplog)


def test_every_argument_is_judged() -> None:
    """Every argument of the Trainer is in REFUSED or WORKS, also one that a new version of Lightning adds."""
    arguments = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert {*REFUSED, *(works.__name__ for works in WORKS)} == arguments


def test_lightnings_bar_in_place_of_the_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trainer.enable_progress_bar", "true", "--progress.enabled", "false")
    assert tiny_cli.fit(tmp_path, *options) == 0
    assert tiny_cli.summary(tmp_path)["rounds"] == 6


@pytest.mark.parametrize(
    ("name", "package"), [("CometLogger", "comet-ml"), ("MLFlowLogger", "mlflow"), ("NeptuneLogger", "WandbLogger")]
)
def test_a_logger_without_its_package(
    name: str, package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logger whose package is missing is refused with the package to install.

    Lightning has no NeptuneLogger any more; for it the message names the loggers there are.
    """
    assert tiny_cli.fit(tmp_path / "run", "--trainer.logger", name) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: trainer.logger = '{name}' cannot work; valid: ")
    assert package in message
    assert ("pip install" in message) == (name != "NeptuneLogger")
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", ["tensorboard", "wandb"])
def test_a_logger_of_a_configuration_without_its_package(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = type("Lacking", (), {"__bool__": lambda _: False, "__str__": lambda _: f"pip install {config}"})()
    for module in ("lightning.fabric.loggers.tensorboard", "lightning.pytorch.loggers.wandb"):
        for known in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE", "_WANDB_AVAILABLE"):
            monkeypatch.setattr(f"{module}.{known}", lacking, raising=False)
    assert tiny_cli.fit(tmp_path / "run", "--config", f"loggers/{config}.yaml") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: trainer.logger = '")
    assert f"pip install {config}" in message
    assert message.count("\n") == 1


def test_a_class_of_lightnings_with_an_option_that_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finder = "lightning.pytorch.callbacks.LearningRateFinder"
    assert tiny_cli.fit(tmp_path / "run", f"--trainer.callbacks+={finder}", "--trainer.callbacks.mode", "round") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: trainer.callbacks = 'LearningRateFinder' cannot work; valid: options that it acc")
    assert "`mode` should be either of ('linear', 'exponential')" in message
    assert message.count("\n") == 1


def test_a_logger_that_fails_in_a_method_that_it_inherits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trainer.logger.save_dir", ".", "--trainer.logger.flush_logs_every_n_steps", "0")
    assert tiny_cli.fit(tmp_path / "run", "--trainer.logger", "CSVLogger", *options) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: trainer.logger = 'CSVLogger' cannot work; valid: options that it accepts (")
    assert "modulo by zero)\n" in message


def test_a_logger_that_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(**_: Any) -> None:
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr("wandb.init", refuses)
    assert tiny_cli.fit(tmp_path / "run", "--trainer.logger", "WandbLogger") == 2
    message = capsys.readouterr().err
    assert message.endswith(
        "error: trainer.logger = 'WandbLogger' cannot work; valid: options that it accepts (No API key configured.)\n"
    )
