"""A few attacks of each kind find nothing wrong in the command line, and attacks notice what does go wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attack import children, disks, sameness, trials
from attack.__main__ import KINDS, main
from attack.configurations import Configuration
from attack.damage import WAYS, damaged
from attack.meaningless import meaningless
from attack.outcomes import FAILURES, failure, refusal
from attack.points import strike_at
from support import tiny_cli

from cfl.training.local_work import LocalWork

SOME = {"kills": 12, "configurations": 40, "corruptions": 30, "faults": 10}


@pytest.mark.parametrize("kind", SOME)
def test_nothing_comes_of_attacks(kind: str, tmp_path: Path) -> None:
    counts = [f"--{name}={count if name == kind else 0}" for name, count in SOME.items()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cfl.cli.main"])
    process = context.Process(target=main, args=([*counts, "--out", str(tmp_path / "attack")],))
    process.start()
    process.join()
    cases = json.loads((tmp_path / "attack" / "report.json").read_text())["cases"]
    wrong = [f"{case['name']}: {case['verdict']}: {case['detail']}" for case in cases if case["verdict"] in FAILURES]
    assert not wrong, "\n".join(wrong)
    assert [case["name"] for case in cases if case["verdict"] == "meaningless"] == []
    assert len(cases) == SOME[kind]


def test_some_of_each_kind_are_tried_here() -> None:
    assert set(SOME) == set(KINDS)


# Attacks notice what goes wrong.


def _raise(arguments: list[str]) -> int:
    raise RuntimeError("planted")


def _wait(arguments: list[str]) -> int:
    while True:
        time.sleep(0.01)


def _compute(arguments: list[str]) -> int:
    while True:
        pass


def _die(arguments: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _say(arguments: list[str]) -> int:
    print("error: data.num_clients = 0 cannot work; valid: an integer of at least 1", file=sys.stderr)
    return 2


@pytest.mark.parametrize(
    ("program", "verdict"), [(_raise, "traceback"), (_die, "traceback"), (_compute, "hang"), (_wait, "hang")]
)
def test_a_command_that_fails_is_noticed(program: children.Program, verdict: str) -> None:
    found = failure(children.run([], seconds=1, program=program))
    assert found is not None
    assert found[0] == verdict


def test_a_refusal_is_clear_only_if_it_names_what_was_given() -> None:
    ended = children.run([], program=_say)
    assert (ended.status, failure(ended)) == (2, None)
    assert refusal(ended, ["data.num_clients"])[0] == "refused"
    assert refusal(ended, ["schedule"])[0] == "unclear"


def test_every_way_of_damage_changes_the_content() -> None:
    content = bytes(range(256)) * 4
    assert all(damaged(content, way, random.Random(seed)) != content for way in WAYS for seed in range(20))


def test_a_run_that_went_another_way_is_noticed(tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        assert tiny_cli.fit(tmp_path / name, "--seed_everything", "1" if name == "other" else "0") == 0
    assert sameness.verdict(tmp_path / "same", tmp_path / "one") == ("equal", "")
    assert sameness.verdict(tmp_path / "other", tmp_path / "one")[0] == "different"
    (tmp_path / "same" / ".123-summary.json").touch()
    assert sameness.verdict(tmp_path / "same", tmp_path / "one")[0] == "littered"
    (tmp_path / "one" / "last.ckpt").unlink()
    assert sameness.verdict(tmp_path / "one", tmp_path / "same")[0] == "different"


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"federated.server_lr": float("inf")}, {}),
        ({"buffer.size": 10**15}, {}),
        ({"buffer.size": -1}, {}),
        ({"buffer.size": True}, {}),
        ({"buffer.size": "010"}, {}),
        ({}, {"lr": [0.0]}),
        ({}, {"steps": 0}),
        ({}, {"moved": False}),
        ({}, {"classes_per_task": [1, 1], "scenario": "task"}),
        ({}, {"classes_per_task": [1], "scenario": "class"}),
        ({}, {"absent": ["task 0 has no test sample of classes [1]"]}),
    ],
)
def test_what_can_mean_nothing_is_noticed_unless_it_is_warned_of(
    given: dict[str, float], facts: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("buffer: {size: 8}")
    usual = {"steps": 3, "rounds": 1, "moved": True, "methods": [], "lr": [0.1], "scenario": "domain"}
    assert meaningless({"buffer.size": "8"}, usual, tmp_path, "") == ""
    assert meaningless(given, usual | facts, tmp_path, "")
    words = "server_lr size lr client model class"
    assert meaningless(given, usual | facts, tmp_path, f"a warning about {words}") == ""


FIGURES = {"acc": 50.0, "rounds": 2, "tasks": 1, "clients": 3, "parameters": 10}


@pytest.mark.parametrize(
    ("loss", "summary", "reason"),
    [
        ("nan", {}, "a loss is not finite"),
        ("0.5", {"acc": None}, "the summary has no figure"),
        ("0.5", {"clients": 0}, "clients = 0 in the summary"),
        ("0.5", {}, ""),
        ("", {}, ""),
    ],
)
def test_figures_that_mean_nothing_are_noticed(loss: str, summary: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "rounds.csv").write_text(f"round,loss\n0,{loss}\n")
    (tmp_path / "summary.json").write_text(json.dumps(FIGURES | summary))
    assert meaningless({}, {"steps": 3, "rounds": 1, "moved": True, "methods": []}, tmp_path, "") == reason


@pytest.mark.parametrize("operation", ["open", "write", "replace", "fsync", "mkdir"])
def test_a_disk_fails_where_it_is_told_to(operation: str, tmp_path: Path) -> None:
    def work(folder: Path, disk: disks.Disk) -> None:
        with ExitStack() as stack:
            disks.use(disk)(stack)
            folder.mkdir()
            with (folder / "new").open("w") as file:
                file.write("text")
                file.flush()
                os.fsync(file.fileno())
            (folder / "new").replace(folder / "file")

    whole = disks.Disk(tmp_path)
    work(tmp_path / "whole", whole)
    assert [one.partition(" ")[0] for one in whole.done] == ["mkdir", "open", "write", "fsync", "replace"]
    at = next(number for number, one in enumerate(whole.done) if one.startswith(operation))
    for fault in disks.possible(operation):
        with pytest.raises(OSError, match=os.strerror(disks.FAULTS[fault])):
            work(tmp_path / fault, disks.Disk(tmp_path, at, fault))
        assert not (tmp_path / fault / "file").exists()
    assert (tmp_path / "whole" / "file").read_text() == "text"


def test_a_point_is_struck_once_when_it_is_reached_for_some_time(tmp_path: Path) -> None:
    struck: list[int] = []
    steps: list[int] = []
    step = LocalWork.losses

    def counted(work: LocalWork, batch: Any) -> Any:
        steps.append(1)
        return step(work, batch)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(LocalWork, "losses", counted))
        strike_at("before a local step", 3, lambda: struck.append(len(steps)))(stack)
        assert tiny_cli.fit(tmp_path / "run", "--engine.kind", "vmap") == 0
    assert struck == [2]
    assert len(steps) >= 3


def test_keys_and_values_of_a_configuration_are_known() -> None:
    tree = {"methods": {"a": {"class_path": "FOT", "init_args": {"threshold": 2}}}, "data": {"num_clients": 3}}
    known = {"methods.a": "FOT", "methods.a.threshold": 2, "data.num_clients": 3}
    assert Configuration("", tree, False).given == known


def test_every_method_has_a_trial() -> None:
    from methods.test_registry import ENTRIES

    assert set(ENTRIES) <= set(trials.TRIALS)
