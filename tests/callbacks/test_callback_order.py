"""The order in which callbacks are given does not change a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from PIL import Image
from support import tiny_cli
from support.tiny import permuted, source, tiny_client, tiny_data, tiny_trainer, weights

from cfl.callbacks import (
    AccuracyTargets,
    DashboardLog,
    FederatedOrchestrator,
    LocalModels,
    RoundCheckpoint,
    RoundProgress,
    RunRecord,
)
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.methods import GPM
from cfl.models import MADE
from cfl.training.client import Client


class Shown(TensorBoardLogger):
    """A logger that records its metrics and pictures without times, and writes nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[Any] = []

    @property
    def experiment(self) -> Any:
        def shown(name: str, _: Any, **place: Any) -> None:
            self.seen.append((name, place))

        return SimpleNamespace(add_figure=shown, add_image=shown)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append((step, {name: value for name, value in metrics.items() if name != "time/seconds"}))

    def save(self) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


class Sees(Callback):
    """A user's callback that records the federation's state at the end of every epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        federation = pl_module.federation
        self.seen.append((federation.round, list(federation.curve), federation.stopped, federation.finished))

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": len(self.seen)}


def two_tasks() -> tuple[Client, Any]:
    """Return a federation that is evaluated every second round, with a method that writes a table."""
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 3, "evaluate_every": 2, "cohort_width": 2})
    return tiny_client(data, methods={"gpm": GPM(0.9)}), data


def until_the_target() -> tuple[Client, Any]:
    """Return a federation whose run ends early."""
    data = tiny_data(permuted(1), schedule={"rounds_per_task": 12, "evaluate_every": 1})
    return tiny_client(data), data


def a_density() -> tuple[Client, Any]:
    """Return a federation whose clients' models are scored before they are averaged."""
    stream = Permuted(Binarised(source()), 2)
    data = tiny_data(stream, scenario="density", schedule={"rounds_per_task": 2, "cohort_width": 2}, eval_batch_size=7)
    return tiny_client(data, partial(MADE, hidden=[7])), data


def left_by(folder: Path, build: Callable[[], tuple[Client, Any]], order: list[int]) -> dict[str, Any]:
    """Train with the callbacks in this order; return files, checkpoint, model, and what a logger and a callback see."""
    client, data = build()
    density = data.scenario == "density"
    sees, shown = Sees(), Shown(folder)
    callbacks: list[Callback] = [
        FederatedOrchestrator(client_state_memory_mb=0),
        LocalModels(evaluate=density),
        AccuracyTargets([30] if build is until_the_target else []),
        RunRecord(str(folder), samples=4),
        DashboardLog(),
        RoundProgress(enabled=False),
        RoundCheckpoint(share=1.0),
        sees,
    ]
    trainer = tiny_trainer(data, logger=shown)
    trainer.callbacks[:] = [callbacks[place] for place in order]  # type: ignore[attr-defined]
    trainer.fit(client, datamodule=data)
    assert client.federation is not None
    saved = tiny_cli.checkpoint(folder)
    files: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "last.ckpt"):
        name = str(path.relative_to(folder))
        files[name] = tiny_cli.rows(path) if path.suffix == ".csv" else path.read_bytes()
    files["summary.json"] = {**tiny_cli.summary(folder), "finished_at": None}
    files["SHA256SUMS"] = [line.split()[1] for line in files["SHA256SUMS"].splitlines()]  # tables have clock readings
    states = {key: dict(saved["callbacks"][key]) for key in sorted(saved["callbacks"])}
    for measured in ("bytes", "sha256"):
        states["RunRecord"].pop(measured)
    # Not global_step: it counts blocks of local steps, whose size follows the measured time of a step.
    kept = {key: saved[key] for key in ("epoch", "state_dict", "federation", "experiment")}
    return {
        "files": files,
        "saved": {**kept, "callbacks": states},
        "model": weights(client.federation),
        "shown": shown.seen,
        "seen": sees.seen,
    }


ORDERS = [list(range(8))[::-1], [4, 3, 6, 2, 1, 7, 5, 0], *(random.Random(seed).sample(range(8), 8) for seed in (0, 1))]


@pytest.mark.parametrize("build", [two_tasks, until_the_target, a_density])
def test_the_order_of_callbacks_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], tuple[Client, Any]]
) -> None:
    """Results are the same for any order of callbacks, also for one that Lightning would change.

    All pictures are replaced by one small picture, because drawing takes most of the time.
    """
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Image.new("RGB", (4, 4)).save(path, "PNG"))
    expected = left_by(tmp_path / "run", build, list(range(8)))
    names = set(expected["files"])
    assert {"rounds.csv", "summary.json", "partition.png"} < names
    assert any(isinstance(entry[0], str) and entry[0] == "data/partition" for entry in expected["shown"])
    if build is until_the_target:
        assert expected["files"]["summary.json"]["stopped_early"]
    if build is a_density:
        assert {"samples.png"} < names
        assert expected["files"]["summary.json"]["nll_of_clients"] > 0
    for number, order in enumerate(ORDERS):
        tiny_cli.assert_same(left_by(tmp_path / str(number), build, order), expected)
