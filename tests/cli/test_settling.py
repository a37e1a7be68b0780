"""``settle`` completes a copy of a parsed configuration: run folder, places and names of loggers, id at wandb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from cfl.cli.settling import settle
from cfl.runtime.run_files import CHECKPOINT, WANDB_ID

WANDB = "lightning.pytorch.loggers.WandbLogger"


def parsed(logger: Any = False, **run: Any) -> tuple[Namespace, dict[str, Any]]:
    """Return a fit's configuration as parsed, and as plain values."""
    place = {"dir": None, "benchmark": None, "overwrite": False, **run}
    plain = {
        "seed_everything": 3,
        "methods": {"fedprox": {"class_path": "cfl.methods.FedProx", "init_args": {"mu": 0.1}}},
        "data": {"stream": {"class_path": "cfl.data.streams.Permuted", "init_args": {}}},
        "run": place,
        "trainer": {"logger": logger},
        "ckpt_path": None,
    }
    own = Namespace(class_path=WANDB, init_args=Namespace(save_dir=".", id=None)) if logger else False
    config = Namespace(run=Namespace(**place), trainer=Namespace(logger=own), ckpt_path=None)
    return config, plain


@pytest.mark.parametrize("trains", [True, False])
def test_what_was_parsed_stays_as_it_was(trains: bool) -> None:
    config, plain = parsed(logger=True)
    before = config.clone()
    settled = settle(config, plain, trains)
    assert config == before
    assert settled.config != before
    assert settled.config.run.dir.startswith("runs/")


def test_a_run_folder_may_be_below_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert settle(*parsed(dir="~/runs/x"), trains=True).config.run.dir == "/home/somebody/runs/x"


def test_loggers_go_into_the_run_folder_and_scoring_has_none() -> None:
    config, plain = parsed(logger=True, dir="here", benchmark="digits")
    own = settle(config, plain, trains=True).config.trainer.logger.init_args
    assert (own.save_dir, own.group, own.name) == ("here", "digits/fedprox", "fedprox-seed3")
    assert own.id
    assert settle(config, plain, trains=False).config.trainer.logger is False


@pytest.mark.parametrize("given", ["last", "file"])
def test_a_run_that_goes_on_is_the_same_at_wandb(given: str, tmp_path: Path) -> None:
    """A run that continues from a checkpoint keeps its id at wandb. Without a checkpoint it gets a new id."""
    (tmp_path / WANDB_ID).write_text("known123")
    config, plain = parsed(logger=True, dir=str(tmp_path), benchmark="digits")
    config.ckpt_path = "last" if given == "last" else str(tmp_path / CHECKPOINT)
    assert settle(config, plain, trains=True).wandb_id != "known123"
    (tmp_path / CHECKPOINT).touch()
    assert settle(config, plain, trains=True).wandb_id == "known123"
