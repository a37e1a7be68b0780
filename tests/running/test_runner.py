"""The runner of many runs: processes at a time, failures, signals, missing data, and a run that is interrupted."""

from __future__ import annotations

import errno
import io
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support import tiny_cli
from support.paper_tables import every_table, fot, point, resolver, write_run
from support.when import when

from cfl.metrics.detection import DetectionMatrix
from cfl.metrics.likelihood import NLLMatrix
from cfl.metrics.regression import ErrorMatrix
from cfl.papers.cells import each_recipe
from cfl.papers.results import read_result
from cfl.running.jobs import Job
from cfl.running.launcher import Launcher
from cfl.running.missing_data import MissingData, needs_of
from cfl.running.run_log import has_diverged
from cfl.running.runner import Runner, Start, exit_status, rounds_done
from cfl.runtime.cpu_cores import usable_cores
from cfl.runtime.errors import BadUpdate, ConfigError

TINY_DATA = {
    "class_path": "cfl.data.streams.Permuted",
    "init_args": {"num_tasks": 2, "source": {"class_path": "cfl.data.sources.Synthetic", "init_args": {}}},
}
CONFIG: dict[str, Any] = {"schedule": {"rounds_per_task": 3}, "data": {"stream": TINY_DATA}}


@dataclass(frozen=True)
class Scripted(Job):
    """A job whose process runs a few lines of Python. The run folder is their first argument."""

    script: str = ""

    @property
    def words(self) -> list[str]:
        return ["-S", "-c", f"import os, pathlib, signal, sys, time\n{self.script}", str(self.folder)]


def start(words: Sequence[str], environment: Mapping[str, str], log: int, lock: int) -> subprocess.Popen[bytes]:
    """Start Python with the words as arguments, in place of the launcher."""
    command, nothing = [sys.executable, *words], subprocess.DEVNULL
    return subprocess.Popen(
        command, env=environment, stdin=nothing, stdout=log, stderr=log, pass_fds=[lock], start_new_session=True
    )


HEAD = "folder = pathlib.Path(sys.argv[1])\n"
FINISH = HEAD + "(folder / 'summary.json').write_text('{}')\n"


def job(folder: Path, script: str, experiment: dict[str, Any] | None = None) -> Scripted:
    return Scripted(folder.name, (), folder, CONFIG, experiment or CONFIG, script)


def runner(tmp_path: Path, jobs: int = 1, start: Start = start) -> tuple[Runner, io.StringIO]:
    out = io.StringIO()
    missing, console = MissingData(tmp_path / "missing.json"), Console(file=out, width=300)
    return Runner(jobs, missing, start, console, lambda folder: None), out


def test_a_failed_run_does_not_stop_the_rest(tmp_path: Path) -> None:
    """A failed run is reported with the last lines of its log, makes the exit status 1, and the others still run."""
    noise = "print('\\n'.join(f'line {i}' for i in range(20)))\nsys.exit(3)"
    jobs = [job(tmp_path / "a", FINISH), job(tmp_path / "b", noise), job(tmp_path / "c", FINISH)]
    used, out = runner(tmp_path)
    outcomes = used.run(jobs)
    assert [(o.job.name, o.state) for o in outcomes] == [("a", "finished"), ("b", "failed"), ("c", "finished")]
    assert "exit status 3" in outcomes[1].reason
    assert outcomes[1].reason.endswith("\n".join(f"    line {i}" for i in range(14, 20)))
    assert "line 19" in out.getvalue()
    assert "line 13" not in out.getvalue()
    assert exit_status(outcomes, None) == 1
    assert exit_status(outcomes[:1], None) == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_in_names_are_shown(terminal: bool, tmp_path: Path) -> None:
    """Names of runs hold values of options, such as lists of layers or of paths."""
    used, _ = runner(tmp_path)
    out = io.StringIO()
    used.console = Console(file=out, width=300, force_terminal=terminal, color_system=None)
    names = ["local [head.*]", "images [/data/a.npz]"]
    folders = [tmp_path / str(number) for number in range(2)]
    slow = "time.sleep(0.5)\n" + FINISH
    jobs = [Scripted(name, (), folder, CONFIG, CONFIG, slow) for name, folder in zip(names, folders, strict=True)]
    assert [o.state for o in used.run(jobs)] == ["finished"] * 2
    assert all(name in out.getvalue() for name in names)


def test_a_bar_without_an_end(tmp_path: Path) -> None:
    """If the number of rounds is unknown, the bar shows how many are done."""
    config = {**CONFIG, "schedule": {"rounds_per_task": 3, "clock_spread": 0.5}}
    script = HEAD + "(folder / 'rounds.csv').write_text('round\\n0\\n1\\n')\ntime.sleep(1)\n" + FINISH
    used, _ = runner(tmp_path)
    out = io.StringIO()
    used.console = Console(file=out, width=300, force_terminal=True, color_system=None)
    outcomes = used.run([Scripted("a", (), tmp_path / "a", config, config, script)])
    assert [o.state for o in outcomes] == ["finished"]
    assert "2/?" in out.getvalue()


def test_a_folder_that_cannot_be_made_is_one_failed_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    used, out = runner(tmp_path)
    outcomes = used.run([job(tmp_path / "file" / "a", FINISH), job(tmp_path / "b", FINISH)])
    assert [(o.job.name, o.state) for o in outcomes] == [("a", "failed"), ("b", "finished")]
    assert outcomes[0].reason.startswith("not started: ")
    assert str(tmp_path / "file" / "a") in out.getvalue()
    assert exit_status(outcomes, None) == 1


def test_a_process_that_cannot_be_made_is_one_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subprocess.Popen

    def scarce(command: list[str], **options: Any) -> Any:
        if command[-1].endswith("/a"):
            raise OSError("too many processes")
        return made(command, **options)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    used, _ = runner(tmp_path)
    outcomes = used.run([job(tmp_path / "a", FINISH), job(tmp_path / "b", FINISH)])
    assert [(o.job.name, o.state) for o in outcomes] == [("a", "failed"), ("b", "finished")]
    assert outcomes[0].reason == "not started: too many processes"


def test_a_run_whose_end_cannot_be_looked_at_is_one_failed_run(tmp_path: Path) -> None:
    """A run whose folder cannot be read at its end counts as failed, and the others still run."""

    def read(folder: Path) -> None:
        if folder.name == "a":
            raise OSError("input/output error")

    used = Runner(1, MissingData(tmp_path / "missing.json"), start, Console(file=io.StringIO()), read)
    outcomes = used.run([job(tmp_path / "a", FINISH), job(tmp_path / "b", FINISH)])
    assert [(o.job.name, o.state) for o in outcomes] == [("a", "failed"), ("b", "finished")]
    assert outcomes[0].reason == "its end could not be seen to: input/output error"


def test_a_process_that_ends_well_without_a_summary_has_failed(tmp_path: Path) -> None:
    used, _ = runner(tmp_path)
    assert [o.state for o in used.run([job(tmp_path / "a", "")])] == ["failed"]


def test_a_summary_that_cannot_be_read_is_no_end(tmp_path: Path) -> None:
    """A run with a damaged summary counts as failed. The report names its folder and how to run it again."""
    out = io.StringIO()
    missing, console = MissingData(tmp_path / "missing.json"), Console(file=out, width=300)
    used = Runner(1, missing, start, console, read_result)
    (outcome,) = used.run([job(tmp_path / "a", FINISH)])
    assert outcome.state == "failed"
    assert str(tmp_path / "a") in outcome.reason
    assert "without this folder the same command makes the run anew" in out.getvalue()
    folder = write_run(tmp_path / "b", fot()["table1"].recipe(point("smoke")).arguments)
    (outcome,) = used.run([job(folder, "sys.exit(3)")])  # its folder has been finished by another process
    assert (outcome.state, outcome.reason) == ("finished", "by another process")


def test_two_at_a_time(tmp_path: Path) -> None:
    """Two runs are made at a time, and a third starts when one has ended. The first run waits for the second."""
    wait = HEAD + "while not (folder.parent / 'b' / 'here').exists(): time.sleep(0.02)\n" + FINISH
    here = HEAD + "(folder / 'here').touch()\n" + FINISH
    used, _ = runner(tmp_path, jobs=2)
    jobs = [job(tmp_path / "a", wait), job(tmp_path / "b", here), job(tmp_path / "c", here)]
    assert sorted((o.job.name, o.state) for o in used.run(jobs)) == [(name, "finished") for name in "abc"]


@pytest.mark.parametrize(("jobs", "given", "expected"), [(1, None, None), (2, None, None), (2, "5", "5")])
def test_math_threads_are_shared_out(
    jobs: int, given: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    script = HEAD + "(folder / 'threads').write_text(os.environ['OMP_NUM_THREADS'])\n" + FINISH
    used, _ = runner(tmp_path, jobs)
    used.run([job(tmp_path / "a", script)])
    cores = len(usable_cores())
    assert (tmp_path / "a" / "threads").read_text() == (expected or str(max(1, cores // jobs)))


def test_all_cores_count_where_the_system_binds_no_process_to_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``sched_getaffinity``, as on macOS, all cores of the machine are divided among the runs."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    script = HEAD + "(folder / 'threads').write_text(os.environ['OMP_NUM_THREADS'])\n" + FINISH
    used, _ = runner(tmp_path, jobs=2)
    assert [o.state for o in used.run([job(tmp_path / "a", script)])] == ["finished"]
    assert (tmp_path / "a" / "threads").read_text() == "3"


@pytest.mark.parametrize(
    ("jobs", "count", "visible", "expected"),
    [
        (1, 2, None, {None}),  # with one run at a time, each may use all devices
        (2, 1, None, {None}),
        (2, 2, None, {"0", "1"}),
        (2, 2, "5, 7", {"5", "7"}),
    ],
)
def test_cuda_devices_are_dealt_out(
    jobs: int,
    count: int,
    visible: str | None,
    expected: set[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two runs at a time gets its own GPU, if there are several. Each run waits until the other has begun."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    say = "(folder / 'device').write_text(os.environ.get('CUDA_VISIBLE_DEVICES', ''))\n"
    both = "while not all((folder.parent / name / 'device').exists() for name in 'ab'): time.sleep(0.02)\n"
    used, _ = runner(tmp_path, jobs)
    used.run([job(tmp_path / name, HEAD + say + (both if jobs > 1 else "") + FINISH) for name in "ab"])
    assert {(tmp_path / name / "device").read_text() or None for name in "ab"} == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_runs(number: int, tmp_path: Path) -> None:
    """A signal to the runner is passed on as SIGTERM to both running runs, and the third is not started."""
    script = (
        HEAD + "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'last.ckpt').touch(), sys.exit(143)))\n"
        "(folder / 'here').touch()\ntime.sleep(100)"
    )
    jobs = [job(tmp_path / name, script) for name in "abc"]
    used, _ = runner(tmp_path, jobs=2)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    both = lambda: all((tmp_path / name / "here").exists() for name in "ab")  # noqa: E731
    thread = when(both, lambda: os.kill(os.getpid(), number))
    outcomes = used.run(jobs)
    thread.join()
    assert {o.job.name: o.state for o in outcomes} == dict.fromkeys("abc", "interrupted")
    assert (tmp_path / "a" / "last.ckpt").exists()
    assert (tmp_path / "b" / "last.ckpt").exists()
    assert not (tmp_path / "c").exists()
    assert exit_status(outcomes, used.interrupted_by) == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_folder_in_which_another_process_is_at_work_is_left_alone(tmp_path: Path) -> None:
    """A folder in which another process is at work is left alone, and used once that process has ended."""
    slow = HEAD + "(folder / 'here').touch()\nwhile not (folder / 'go').exists(): time.sleep(0.02)\n" + FINISH
    first, _ = runner(tmp_path)
    second, out = runner(tmp_path)
    found: list[str] = []

    def try_it() -> None:
        outcomes = second.run([job(tmp_path / "a", FINISH)])
        found.extend(o.state for o in outcomes)
        assert exit_status(outcomes, None) == 1
        (tmp_path / "a" / "go").touch()

    thread = when((tmp_path / "a" / "here").exists, try_it)
    assert [o.state for o in first.run([job(tmp_path / "a", slow)])] == ["finished"]
    thread.join()
    assert found == ["runs elsewhere"]
    assert "another process is at work in" in out.getvalue()
    (tmp_path / "a" / "summary.json").unlink()
    assert [o.state for o in second.run([job(tmp_path / "a", FINISH)])] == ["finished"]


def test_missing_data_are_found_out_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run that lacks a data set marks it as missing, and later runs that need it are not started.

    The mark is removed once a run has read the data set.
    """
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "nothing"))
    monkeypatch.setattr("cfl.data.sources.files.NETWORK_TIMEOUT", 0.01)
    monkeypatch.setattr("socket.socket.connect", lambda *_: (_ for _ in ()).throw(OSError("no network")))
    source = {"class_path": "cfl.data.sources.USPS"}
    needs = {"data": {"stream": {"class_path": "cfl.data.streams.Sequence", "init_args": {"sources": [source]}}}}
    memory = MissingData(tmp_path / "missing.json")
    used, out = runner(tmp_path)
    fails = "sys.exit(2)"
    outcomes = used.run(
        [job(tmp_path / "a", fails, needs), job(tmp_path / "b", fails, needs), job(tmp_path / "c", fails)]
    )
    assert [(o.job.name, o.state, o.reason.partition(",")[0]) for o in outcomes] == [
        ("a", "cannot run here", "needs USPS"),
        ("b", "cannot run here", "needs USPS"),
        ("c", "failed", "exit status 2"),
    ]
    assert not (tmp_path / "b").exists()
    assert "cannot run here b, 0 s: needs USPS" in out.getvalue()
    assert exit_status(outcomes[:2], None) == 0
    memory = MissingData(tmp_path / "missing.json")
    assert memory.reason({"USPS", "MNIST"}) == "needs USPS"
    assert memory.reason({"MNIST"}) is None
    used, _ = runner(tmp_path)  # a later command tries again, and the files exist now
    assert [o.state for o in used.run([job(tmp_path / "a", FINISH, needs)])] == ["finished"]
    assert MissingData(tmp_path / "missing.json").known == {}


def test_data_sets_of_one_class_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a source class reads any file, a missing file does not mark other files as missing."""
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path))
    images, labels = np.zeros((4, 2, 2), np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "here.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)

    def needing(path: str) -> dict[str, Any]:
        source = {"class_path": "cfl.data.sources.Arrays", "init_args": {"path": path}}
        wrapped = {"class_path": "cfl.data.sources.Binarised", "init_args": {"source": source}}
        return {"data": {"stream": {"class_path": "cfl.data.streams.Permuted", "init_args": {"source": wrapped}}}}

    assert needs_of(needing("gone.npz")) == ["gone.npz"]
    used, _ = runner(tmp_path)
    jobs = [
        job(tmp_path / "a", "sys.exit(2)", needing("gone.npz")),
        job(tmp_path / "b", "sys.exit(2)", needing("gone.npz")),
        job(tmp_path / "c", FINISH, needing("here.npz")),
    ]
    assert [(o.state, o.reason) for o in used.run(jobs)] == [
        ("cannot run here", f"needs gone.npz, see {tmp_path / 'a' / 'log.txt'}"),
        ("cannot run here", "needs gone.npz"),
        ("finished", ""),
    ]
    assert set(MissingData(tmp_path / "missing.json").known) == {"gone.npz"}


def test_data_are_looked_for_where_the_run_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked for in ``data.root``, which overrides the environment variable."""
    for folder, images in (("root", "here.npz"), ("environment", "there.npz")):
        (tmp_path / folder).mkdir()
        pixels, labels = np.zeros((4, 2, 2), np.uint8), np.arange(4) % 2
        arrays = dict.fromkeys(("train_images", "test_images"), pixels)
        arrays |= dict.fromkeys(("train_labels", "test_labels"), labels)
        np.savez(tmp_path / folder / images, **arrays)
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "environment"))

    def needing(path: str) -> Scripted:
        source = {"class_path": "cfl.data.sources.Arrays", "init_args": {"path": path}}
        data = {"stream": {"class_path": "cfl.data.streams.Permuted", "init_args": {"source": source}}}
        config = {**CONFIG, "data": {**data, "root": str(tmp_path / "root")}}
        return Scripted(path, (), tmp_path / path, config, {"data": data}, "sys.exit(2)")

    used, _ = runner(tmp_path)
    outcomes = used.run([needing("here.npz"), needing("there.npz")])
    assert [(o.job.name, o.state) for o in outcomes] == [("here.npz", "failed"), ("there.npz", "cannot run here")]


def test_missing_weights_are_found_out_too(tmp_path: Path) -> None:
    file = tmp_path / "resnet18.pth"
    network = {"class_path": "cfl.models.ResNet18", "init_args": {"weights": str(file)}}
    needs = {"data": {}, "model": {"network": network}}
    used, _ = runner(tmp_path)
    (outcome,) = used.run([job(tmp_path / "a", "sys.exit(2)", needs)])
    assert (outcome.state, outcome.reason) == (
        "cannot run here",
        f"needs resnet18.pth, see {tmp_path / 'a' / 'log.txt'}",
    )
    assert MissingData(tmp_path / "missing.json").reason({"resnet18.pth"}) == "needs resnet18.pth"
    file.touch()
    used, _ = runner(tmp_path)
    assert [o.state for o in used.run([job(tmp_path / "a", FINISH, needs)])] == ["finished"]
    assert MissingData(tmp_path / "missing.json").known == {}


def test_two_that_remember_missing_data_do_not_undo_each_other(tmp_path: Path) -> None:
    path = tmp_path / "missing.json"
    first, second = MissingData(path), MissingData(path)
    first.add({"USPS": "no"})
    second.add({"SVHN": "no"})
    assert MissingData(path).known == second.known == {"USPS": "no", "SVHN": "no"}
    first.remove(["SVHN"])  # the other object has added this one
    assert MissingData(path).known == first.known == {"USPS": "no"}
    adders = [multiprocessing.Process(target=add_some, args=(path, k)) for k in range(4)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    assert set(MissingData(path).known) == {"USPS", *(f"{k} {i}" for k in range(4) for i in range(20))}
    assert [entry.name for entry in tmp_path.iterdir()] == ["missing.json"]


def test_a_finished_run_is_finished_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    reads = {"data": {"stream": {"init_args": {"source": {"class_path": "cfl.data.sources.USPS"}}}}}
    used, _ = runner(tmp_path)
    assert [(one.state, one.reason) for one in used.run([job(tmp_path / "a", FINISH, reads)])] == [("finished", "")]


def add_some(path: Path, k: int) -> None:
    memory = MissingData(path)
    for i in range(20):
        memory.add({f"{k} {i}": "no"})


def test_rounds_are_read_off_the_runs_table(tmp_path: Path) -> None:
    assert rounds_done(tmp_path) == 0
    (tmp_path / "rounds.csv").write_text("round,task\n")
    assert rounds_done(tmp_path) == 0
    (tmp_path / "rounds.csv").write_text("round,task\n" + "".join(f"{r},{'x' * 100}\n" for r in range(300)))
    assert rounds_done(tmp_path) == 300


def test_jobs_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--jobs = 0"):
        runner(tmp_path, jobs=0)


def test_the_command_is_cfl_fit(tmp_path: Path) -> None:
    recipe = fot()["table1"].recipe(point("smoke"))
    config = resolver().config(recipe.arguments)
    found = Job("x", recipe.arguments, tmp_path, config, config)
    assert found.words == ["fit", *recipe.arguments, f"--run.dir={tmp_path}", "--ckpt_path=last"]
    assert found.shown.startswith("cfl fit --config=configs/benchmarks/pmnist.yaml ")


def real(folder: Path, options: Sequence[str]) -> Job:
    arguments = [f"--config={tiny_cli.TINY}", *options]
    return Job("real", arguments, folder, resolver().config(arguments), resolver().experiment(arguments))


def test_an_interrupted_run_is_continued_to_the_same_result(tmp_path: Path, launcher: Launcher) -> None:
    """A run of ``cfl fit`` that a signal to the runner stops is continued by the next command to the same result."""
    options = ["--schedule.rounds_per_task=50", "--trainer.accelerator=cpu"]
    folder = tmp_path / "killed"
    used, _ = runner(tmp_path, start=launcher.start)
    thread = when(lambda: rounds_done(folder) >= 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    (stopped,) = used.run([real(folder, options)])
    thread.join()
    assert stopped.state == "interrupted"
    assert 5 <= rounds_done(folder) < 100
    used, out = runner(tmp_path, start=launcher.start)
    (continued,) = used.run([real(folder, options)])
    assert continued.state == "finished"
    assert "real (continued)" in out.getvalue()
    assert tiny_cli.fit(tmp_path / "straight", *options) == 0
    matrices = [(tmp_path / name / "accuracy_matrix.csv").read_text() for name in ("killed", "straight")]
    assert matrices[0] == matrices[1]
    assert len(tiny_cli.rows(folder / "rounds.csv")) == 100


def test_a_run_that_diverges_is_told_from_one_that_fails(tmp_path: Path, launcher: Launcher) -> None:
    """A run that diverged is told from other failures by the last line of ``cfl fit``."""
    either = {True: launcher.start, False: start}
    used, _ = runner(tmp_path, start=lambda words, *rest: either[words[0] == "fit"](words, *rest))
    wild = real(tmp_path / "wild", ["--model.optimizer.init_args.lr=1e30", "--trainer.accelerator=cpu"])
    outcomes = used.run([wild, job(tmp_path / "a", "sys.exit('no such file')")])
    assert [(o.state, o.diverged) for o in outcomes] == [("failed", True), ("failed", False)]


@pytest.mark.parametrize(
    "test",
    [
        lambda: DetectionMatrix(1).update(0, 0, torch.full((2, 1, 6), math.nan), torch.zeros(2, 1, 5)),
        lambda: ErrorMatrix(1).update(0, 0, torch.full((2, 1), math.inf), torch.zeros(2, 1)),
        lambda: NLLMatrix(1).update(0, 0, math.nan, 2),
    ],
)
def test_a_run_whose_tests_show_that_it_diverged_is_told_too(test: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(BadUpdate) as raised:
        test()
    (tmp_path / "log.txt").write_text(f"error: {raised.value}\n")
    assert has_diverged(tmp_path)


@pytest.mark.parametrize(
    ("name", "axes", "needs"),
    [
        ("fot-table1", {"benchmark": "five-datasets"}, {"SVHN", "CIFAR10", "MNIST", "FashionMNIST", "NotMNIST"}),
        ("fedagem-table1", {"benchmark": "cifar10", "method": "cfed"}, {"CIFAR10", "CIFAR100"}),
        ("fedagem-table1", {"benchmark": "cifar10", "method": "l2p"}, {"CIFAR10", "vit_b_16-c867db91.pth"}),
    ],
)
def test_a_run_needs_the_files_of_its_stream_its_methods_and_its_network(
    name: str, axes: dict[str, str], needs: set[str]
) -> None:
    found = (r.arguments for p, r in each_recipe(every_table()[name], "paper") if axes.items() <= p.items())
    assert set(needs_of(resolver().experiment(next(found)))) == needs


@pytest.mark.parametrize(
    ("name", "needs"),
    [("fedweit-figure6-left", {"gtsrb.npz", "facescrub100"}), ("confedmade-table3-present", {"adult"})],
)
def test_files_of_sets_that_a_class_alone_does_not_tell_are_needed(name: str, needs: set[str]) -> None:
    of_one = next(recipe.arguments for _, recipe in each_recipe(every_table()[name], "paper"))
    assert needs <= set(needs_of(resolver().experiment(of_one)))
