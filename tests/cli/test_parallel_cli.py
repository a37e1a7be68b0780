"""``cfl`` in several processes: one run folder, output of the first only, checkpoints for any number of processes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_cli
from support.tiny_cli import VARIANTS

from cfl.testing.processes import Crew, arrays, free_port
from cfl.training import connection_watch
from cfl.training.strategy import strategy_for

STRATEGY = ("--trainer.strategy", "cfl.training.strategy.ClientParallel")
ROOT = Path(__file__).parents[2]


def cli(arguments: tuple[str, ...], moment: tuple[str, int, int] | None) -> tuple[int, str, str]:
    """Run ``cfl ...`` in one of two processes; return exit status and output. Process 1 gets a signal at ``moment``."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), ExitStack() as stack:
        if moment is not None and os.environ["LOCAL_RANK"] == "1":
            stack.enter_context(tiny_cli.die_at(*moment))
        status = tiny_cli.run(*arguments, "--trainer.devices", "2")
    return status, out.getvalue(), err.getvalue()


def fit(crew: Crew, folder: Path, *options: str, moment: tuple[str, int, int] | None = None) -> list[Any]:
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *options)
    return crew.run(cli, arguments, moment)


def numbers(tree: Any) -> Any:
    """Return nested dictionaries and lists with every number, and every text that is one, as float."""
    if isinstance(tree, dict):
        return {key: numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [numbers(value) for value in tree]
    try:
        return float(tree) if isinstance(tree, str | int | float) else tree
    except ValueError:
        return tree


def assert_same_results(folder: Path, expected: Path) -> None:
    """Require equal results up to rounding in float32, except times, machine and number of processes."""
    ours, theirs = (numbers(arrays(tiny_cli.results(f))) for f in (folder, expected))
    for found in (ours, theirs):
        found["summary"] = {k: v for k, v in found["summary"].items() if k not in ("processes", "machine")}
    tiny_cli.assert_same(ours, theirs, 2e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Variant -> its run folder, made by one process."""
    folders = {}
    for variant, options in VARIANTS.items():
        folders[variant] = tmp_path_factory.mktemp("alone") / variant
        assert tiny_cli.fit(folders[variant], *settled(options)) == 0
    return folders


def settled(options: tuple[str, ...]) -> tuple[str, ...]:
    return (*options, "--schedule.cohort_width", "2", "--engine.kind", "vmap")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_run_folder_is_that_of_one_process(
    crew: Crew, alone: dict[str, Path], variant: str, tmp_path: Path
) -> None:
    (status, out, err), (other, said, complained) = fit(crew, tmp_path / "run", *settled(VARIANTS[variant]))
    assert (status, other) == (0, 0), err + complained
    assert_same_results(tmp_path / "run", alone[variant])
    ours, theirs = (sorted(p.relative_to(f) for p in f.rglob("*")) for f in (tmp_path / "run", alone[variant]))
    assert ours == theirs
    assert tiny_cli.summary(tmp_path / "run")["processes"] == 2
    assert f"run folder: {tmp_path / 'run'}" in out
    assert said == "", "the first process speaks for all"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("before", [1, 2])
def test_another_number_of_processes_resumes(
    crew: Crew, alone: dict[str, Path], variant: str, before: int, tmp_path: Path
) -> None:
    """A run of one process, stopped by SIGTERM in round 1, is resumed by two processes, and a run of two by one."""
    folder, options = tmp_path / "run", settled(VARIANTS[variant])
    if before == 1:
        with tiny_cli.die_at("training", 1, signal.SIGTERM):
            assert tiny_cli.fit(folder, *options) == 143
    else:
        (status, out, _), (other, said, _) = fit(crew, folder, *options, moment=("training", 1, signal.SIGTERM))
        assert status == 143
        assert f"--ckpt_path {folder}/last.ckpt" in out
        assert (other, said) == (0, ""), "an exit status of its own would pass for a failure"
    assert tiny_cli.checkpoint(folder)["federation"]["round"] == 2
    assert [row["round"] for row in tiny_cli.rows(folder / "rounds.csv")] == ["0", "1"]
    if before == 1:
        assert [status for status, *_ in fit(crew, folder, *options, "--ckpt_path", "last")] == [0, 0]
    else:
        assert tiny_cli.fit(folder, *options, "--ckpt_path", "last") == 0
    assert_same_results(folder, alone[variant])


@pytest.mark.parametrize("subcommand", ["validate", "test"])
def test_a_checkpoint_is_scored_alike(
    crew: Crew, alone: dict[str, Path], subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(alone["personal"] / "last.ckpt")
    capsys.readouterr()
    assert tiny_cli.run(subcommand, "--ckpt_path", checkpoint) == 0
    expected = capsys.readouterr().out
    assert "ACC" in expected
    (status, out, _), (other, said, _) = crew.run(cli, (subcommand, "--ckpt_path", checkpoint), None)
    assert (status, other) == (0, 0)
    assert (out, said) == (expected, "")


# Refused before anything starts.


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    capsys.readouterr()
    assert tiny_cli.fit(folder, *options) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert not (folder / "rounds.csv").exists()
    return message


def test_processes_that_would_mix_clients_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, tmp_path, "--trainer.devices", "2", "--trainer.strategy", "ddp")
    assert "trainer.strategy = 'DDPStrategy' cannot work; valid: cfl.training.strategy.ClientParallel for 2" in message
    message = refused(capsys, tmp_path, "--trainer.strategy", "ddp")
    assert "trainer.strategy = 'DDPStrategy' cannot work; valid: auto for one process" in message


def test_what_the_trainer_refuses_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, tmp_path, "--trainer.strategy", "fsdp")
    assert message.startswith(
        "error: trainer.strategy = 'fsdp' cannot work; valid: settings that Lightning's Trainer acc"
    )
    message = refused(capsys, tmp_path, "--trainer.gradient_clip_val", "1", "--trainer.gradient_clip_algorithm", "max")
    assert "max" in message


def test_processes_that_know_nothing_of_each_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun the strategy is required: otherwise every process would train all into the same folder."""
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for strategy in ((), STRATEGY):
        message = refused(capsys, tmp_path, *strategy)
        assert "trainer.devices = 1 cannot work" in message
        assert "2, the number of processes that torchrun has started" in message


@pytest.mark.parametrize(
    ("settings", "cuda_devices", "several"),
    [
        ({}, 0, False),
        ({"devices": "2"}, 0, True),
        ({"devices": [0, 1]}, 2, True),
        ({"devices": "[0, 1]"}, 2, True),
        ({"devices": [1]}, 2, False),
        ({"devices": "auto"}, 2, True),
        ({"devices": "auto"}, 1, False),
        ({"devices": "auto", "accelerator": "cpu"}, 2, False),
        ({"devices": -1}, 2, True),
        ({"num_nodes": 2}, 0, True),
        ({"devices": "2", "strategy": "ddp"}, 0, False),
    ],
)
def test_processes_share_clients_unless_a_strategy_is_named(
    settings: dict[str, Any], cuda_devices: int, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's own choice for several devices, DDP, would average gradients of clients."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda_devices)
    expected = STRATEGY[1] if several else settings.get("strategy", "auto")
    assert strategy_for(**{"devices": 1, **settings}) == expected


@pytest.mark.parametrize("name", [STRATEGY[1], "cfl.parallel.ClientParallel", "ClientParallel"])
def test_other_settings_of_the_strategy_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Wrong settings of the strategy are refused, also if it is given by its former path or by its class name."""
    if "." in name:
        class_path = ("--trainer.strategy.class_path", name)
        with_timeout = (*class_path, "--trainer.strategy.init_args.timeout_seconds", "0")
        assert "trainer.strategy.timeout_seconds = 0.0" in refused(capsys, tmp_path, *with_timeout)
    strategy = ("--trainer.strategy", name)
    assert "trainer.sync_batchnorm = True" in refused(capsys, tmp_path, *strategy, "--trainer.sync_batchnorm", "true")


# Launched for real.


def launch(folder: Path, *options: str, by: tuple[str, ...] = ("-m", "cfl")) -> subprocess.Popen[str]:
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), "--trainer.devices", "2")
    clean = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "RANK")}
    return subprocess.Popen(
        [sys.executable, *by, *arguments, *options],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1]), "MPLBACKEND": "Agg"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_launched_by_lightning(alone: dict[str, Path], tmp_path: Path) -> None:
    process = launch(tmp_path / "run", *settled(VARIANTS["fedavg"]))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_same_results(tmp_path / "run", alone["fedavg"])
    assert tiny_cli.summary(tmp_path / "run")["processes"] == 2


@pytest.mark.slow
def test_a_bad_update_ends_processes_launched_by_lightning(tmp_path: Path) -> None:
    """A diverged client in process 1 ends both processes with status 2, and process 0 names process 1 in one line."""
    poison = ("--methods.poison", "support.tiny.Poison", "--methods.poison.client", "1", "--methods.poison.round", "1")
    process = launch(tmp_path / "run", "--schedule.clients_per_round", "4", *poison)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, err
    said = "client 1 trained to NaN or infinity in round 1 (task 0)"
    assert sorted(line[: line.index(said)] for line in errors) == ["error: ", "error: process 1: "]
    assert "Traceback" not in err


@pytest.mark.slow
def test_torchrun_passes_sigterm_on(tmp_path: Path) -> None:
    """At SIGTERM to torchrun every process ends after its round, and the checkpoint is of the last round."""
    folder = tmp_path / "run"
    options = ("--schedule.rounds_per_task", "400", "--checkpoint.share", "0.01", "--schedule.cohort_width", "1")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "cfl")
    process = launch(folder, *options, "--engine.kind", "vmap", by=torchrun)
    rounds = folder / "rounds.csv"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (rounds.exists() and rounds.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=180)
    assert process.returncode != 0
    assert err.count("stopping after this round") == 2, err
    done = len(tiny_cli.rows(rounds))
    assert 3 <= done < 800
    assert torch.load(folder / "last.ckpt", weights_only=True)["federation"]["round"] == done


def started_by(process: subprocess.Popen[str]) -> int:
    """Return the id of the second process, as soon as it runs its own program.

    Until then the first process waits for it and handles no signal.
    """
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        for child in tasks.read_text().split():
            with suppress(FileNotFoundError):  # this child has ended
                if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes():
                    return int(child)
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for children")
@pytest.mark.parametrize(
    ("first", "stopped", "status", "said"),
    [
        (True, False, 143, "stopped by SIGTERM\n"),
        (True, True, 143, "stopped by SIGTERM\n"),
        (False, False, 2, "error: process {child}, started by this one, has ended with status 143 before all 2 "),
    ],
)
def test_a_signal_before_all_are_connected(first: bool, stopped: bool, status: int, said: str, tmp_path: Path) -> None:
    """SIGTERM to either process, before both are connected, ends both with one line and without a run folder."""
    process = launch(tmp_path / "run")
    child = started_by(process)
    if stopped:
        os.kill(child, signal.SIGSTOP)
    time.sleep(1.0 if stopped else 0.3)
    os.kill(process.pid if first else child, signal.SIGTERM)
    _, err = process.communicate(timeout=180)
    assert process.returncode == status, err
    assert err.startswith(said.format(child=child))
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert not Path(f"/proc/{child}").exists()


def test_missing_processes_are_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection_watch, "LATE", 0.1)
    with connection_watch.ConnectionWatch([], 2, lambda: None):
        time.sleep(0.5)
    assert capsys.readouterr().err == "after 0 s not all 2 processes are connected; is one of them stopped?\n"
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_the_main_thread_handles_is_left_to_it() -> None:
    """A signal does not end the process if the main thread can handle it, because it does not wait inside torch."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        with connection_watch.ConnectionWatch([], 2, lambda: pytest.fail("the process would have ended")):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.3)  # the watching thread looks every 0.1 s
    finally:
        signal.signal(signal.SIGHUP, before)
