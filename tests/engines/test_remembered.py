"""The result of a trial is kept for later runs with the same setting. Runs also work without the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import dropping, fit, mlp, tiny_client, tiny_data

from cfl.engines import EngineChoice, EngineOptions, remembered
from cfl.engines.probe import Measured
from cfl.training import engine_of_run
from cfl.training.client import Client

FOUND = EngineChoice("vmap", 4)
PLAIN = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CFL_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "engines.json"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of choices of each trial. A fake probe always finds ``FOUND``."""
    asked: list[int] = []

    def probe(choices: Any, *_: Any, **__: Any) -> list[Measured]:
        asked.append(len(choices))
        assert FOUND in choices
        return [Measured(FOUND, 0.001)]

    monkeypatch.setattr(engine_of_run, "probe", probe)
    return asked


def run(network: Any = mlp, optimizer: Any = PLAIN, resumed: Any = None, engine: Any = None, **schedule: Any) -> Client:
    data = tiny_data(schedule={"cohort_width": "auto", "rounds_per_task": 1, **schedule})
    client = tiny_client(data, network, optimizer, engine=EngineOptions(**(engine or {})))
    client._resumed_choice = resumed
    fit(client, data)
    return client


def test_the_second_run_makes_no_trial(cache: Path, trials: list[int]) -> None:
    for count in (1, 1, 1):
        client = run()
        assert len(trials) == count
        assert client.engine_choice == FOUND
        engine = client.require_federation().engine
        assert engine is not None
        assert engine["seconds_per_client_step_in_trials"] == {str(FOUND): 0.001}
    assert len(json.loads(cache.read_text())) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"network": dropping},
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},  # the engine cannot take this optimizer's step
        {"batch_size": 5},
        {"local_epochs": 2},
        {"engine": {"matmul_precision": "medium"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_question_is_another_trial(cache: Path, trials: list[int], other: dict[str, Any]) -> None:
    run()
    run(**other)
    assert len(trials) == 2
    assert len(json.loads(cache.read_text())) == 2


def test_a_resumed_run_keeps_its_own(cache: Path, trials: list[int]) -> None:
    run()
    own = EngineChoice("vmap", 1)
    assert run(resumed=own.to_dict()).engine_choice == own


def test_a_resumed_run_says_that_it_takes_another(
    cache: Path, trials: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run(resumed=FOUND.to_dict())
    assert not caplog.text
    elsewhere = EngineChoice("workers", 999, 7)
    assert run(resumed=elsewhere.to_dict()).engine_choice == FOUND
    assert "the checkpoint's engine (kind workers, width 999, threads 7" in caplog.text


BROKEN: list[Callable[[str], str]] = [
    lambda text: "",
    lambda text: text[: len(text) // 2],
    lambda text: "[1, 2]",
    lambda text: text.replace("0.001", '"fast"'),
    lambda text: text.replace('"kind"', '"sort"'),
    lambda text: text.replace('"choice"', '"thought"'),
    lambda text: text.replace("4", "1234"),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_says_nothing_is_replaced(cache: Path, trials: list[int], broken: Callable[[str], str]) -> None:
    run()
    cache.write_text(broken(cache.read_text()))
    assert run().engine_choice == FOUND
    assert len(trials) == 2
    run()
    assert len(trials) == 2


def test_a_place_where_nothing_can_be_written_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[int]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CFL_CACHE", str(tmp_path / "file" / "folder"))
    assert run().engine_choice == run().engine_choice == FOUND
    assert len(trials) == 2


def test_it_can_be_switched_off_and_is_in_the_users_cache_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run()
    assert not list(tmp_path.iterdir())  # the test suite switches the cache off
    monkeypatch.setenv("CFL_CACHE", "")
    run()
    assert (tmp_path / "cfl" / "engines.json").is_file()


def test_only_the_latest_are_kept(cache: Path) -> None:
    for number in range(remembered.MOST + 3):
        remembered.remember(str(number), Measured(FOUND, 0.5))
    assert list(json.loads(cache.read_text())) == [str(n) for n in range(3, remembered.MOST + 3)]
