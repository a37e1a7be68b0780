"""The launcher: commands run in processes that are forked from one that has imported the program."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import tiny_cli

import cfl
from cfl.running.launcher import Launched, Launcher
from cfl.running.runner import rounds_done

LONG = ("fit", f"--config={tiny_cli.TINY}", "--schedule.rounds_per_task=2000")


def start(launcher: Launcher, folder: Path, *words: str, **environment: str) -> Launched:
    with (folder / "log.txt").open("ab") as log, (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return launcher.start(words, {**os.environ, **environment}, log.fileno(), lock.fileno())


def wait(process: Launched) -> int:
    deadline = time.monotonic() + 120
    while (status := process.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return status


def is_locked(folder: Path) -> bool:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, f"cfl {cfl.__version__}\n"),
        (["fit", "--nothing=1"], 2, "error: nothing is no"),
        (["fti"], 2, "error: "),
    ],
)
def test_output_and_exit_status_are_the_commands(
    words: list[str], status: int, said: str, launcher: Launcher, tmp_path: Path
) -> None:
    assert wait(start(launcher, tmp_path, *words)) == status
    assert said in (tmp_path / "log.txt").read_text()


def test_a_run_is_that_of_the_shell_to_the_bit(launcher: Launcher, tmp_path: Path) -> None:
    """A launched run equals the same run from a shell, bit for bit, also beside another launched run."""
    words = ["fit", f"--config={tiny_cli.TINY}", "--methods.fot", "FOT", "--schedule.rounds_per_task=1"]
    (tmp_path / "of another").mkdir()
    other = start(launcher, tmp_path / "of another", *words, f"--run.dir={tmp_path / 'other'}", "--seed_everything=1")
    forked = start(launcher, tmp_path, *words, f"--run.dir={tmp_path / 'forked'}", OMP_NUM_THREADS="1")
    shell = [sys.executable, "-m", "cfl", *words, f"--run.dir={tmp_path / 'shell'}"]
    subprocess.run(shell, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    assert [wait(forked), wait(other)] == [0, 0]
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "forked"), tiny_cli.results(tmp_path / "shell"))
    assert (tmp_path / "other" / "accuracy_matrix.csv").read_text() != (
        tmp_path / "shell" / "accuracy_matrix.csv"
    ).read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_signal_ends_one_command_which_frees_its_lock(
    number: int, status: int, launcher: Launcher, tmp_path: Path
) -> None:
    process = start(launcher, tmp_path, *LONG, f"--run.dir={tmp_path / 'run'}")
    while rounds_done(tmp_path / "run") < 2:
        assert process.poll() is None
        time.sleep(0.02)
    assert is_locked(tmp_path)
    assert process.pid is not None
    if number == signal.SIGTERM:
        process.terminate()
    else:
        os.kill(process.pid, number)
    assert wait(process) == status
    assert not is_locked(tmp_path)
    process.terminate()  # without effect, because the process has ended
    assert wait(start(launcher, tmp_path, "--version")) == 0


def test_a_command_goes_on_without_its_starter_and_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "of another").mkdir()
    own = Launcher({**os.environ, "OMP_NUM_THREADS": "1"})
    process = start(own, tmp_path, *LONG, f"--run.dir={tmp_path / 'run'}")
    assert own._server is not None
    os.kill(own._server.pid, signal.SIGKILL)
    own._server.wait()
    with pytest.raises(OSError, match=r"pipe|reset"):
        start(own, tmp_path / "of another", "--version")
    own.close()
    while rounds_done(tmp_path / "run") < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert wait(process) == 143


def test_the_environment_is_the_commands_own(launcher: Launcher, tmp_path: Path) -> None:
    """A command gets its own environment variables, here the folder of its data."""
    words = ("fit", "--data.stream.source", "MNIST", f"--run.dir={tmp_path / 'run'}")
    process = start(launcher, tmp_path, *words, CFL_DATA_ROOT=str(tmp_path / "nothing"), http_proxy="http://0.0.0.0:1")
    assert wait(process) == 2
    assert str(tmp_path / "nothing") in (tmp_path / "log.txt").read_text()
