"""The examples of the page about Python run."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback

from cfl.testing import check_method

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_example_from_parts_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Client" in block
    )
    assert len([line for line in example.split("schedule = ")[1].splitlines() if line]) <= 15
    exec(compile(example, str(PAGE), "exec"), {})
    assert (tmp_path / "runs" / "from-parts" / "summary.json").is_file()


def test_the_first_example_runs_with_short_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cfl
    from cfl.data.sources import Digits

    lines = [line for line in EXAMPLES[0].splitlines() if line and "cfl.load" not in line]
    short = {"schedule.rounds_per_task": 1, "data.stream.num_tasks": 2, "run.dir": tmp_path / "run"}
    wanted = cfl.fit
    monkeypatch.setattr(cfl, "fit", lambda *settings: wanted(*settings, short), raising=False)
    monkeypatch.chdir(PAGE.parents[1])
    names = {"images": Digits().load(tmp_path)[1].images}
    exec("\n".join(lines), names)
    assert names["run"].figures.method == "fot"
    assert names["run"].accuracy_matrix.shape == (2, 2)


def test_the_objective_of_the_search_runs_with_short_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective runs for one trial of a made-up study, because Optuna is not a dependency."""
    import cfl

    class Study:
        best_params: ClassVar[dict[str, float]] = {}

        def optimize(self, objective: Callable[[Any], float], n_trials: int) -> None:
            middle = lambda name, low, high, log: (low * high) ** 0.5  # noqa: E731
            self.value = objective(SimpleNamespace(number=7, suggest_float=middle))

    study = Study()
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=lambda direction: study))
    short = {"schedule.rounds_per_task": 1, "data.stream.num_tasks": 2}
    wanted = cfl.fit
    monkeypatch.setattr(cfl, "fit", lambda *settings: wanted(*settings, short), raising=False)
    monkeypatch.chdir(tmp_path)
    (example,) = (block for block in EXAMPLES if "optuna" in block)
    exec(compile(example, str(PAGE), "exec"), {})
    assert study.value == cfl.load(tmp_path / "runs" / "search" / "7").acc
    assert "evaluate_on: validation" in (tmp_path / "runs" / "search" / "7" / "config.yaml").read_text()


def test_the_watching_method_draws_the_distances_of_the_trained_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one client a round, its distance is that of the global model after the round from the one before."""
    import cfl

    (method,) = (block for block in EXAMPLES if "class Drift" in block)
    (cells,) = (block for block in EXAMPLES if "drift.csv" in block)
    (tmp_path / "drift.py").write_text(method)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    runs, drawn = list[list[float]](), list[tuple[list[float], str]]()
    short = {"schedule.rounds_per_task": 2, "data.stream.num_tasks": 2, "schedule.clients_per_round": 1}

    class Watch(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            runs.append([])
            self.before = self.weights(pl_module)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            after = self.weights(pl_module)
            runs[-1].append(float((after - self.before).norm()))
            self.before = after

        def weights(self, pl_module: Any) -> torch.Tensor:
            return torch.cat([w.detach().double().flatten() for w in pl_module.network.parameters()])

    wanted = cfl.fit
    monkeypatch.setattr(cfl, "fit", lambda *given: wanted(*given, short, callbacks=[Watch()]), raising=False)
    monkeypatch.setattr("matplotlib.pyplot.plot", lambda x, y, label: drawn.append((y.tolist(), label)))
    monkeypatch.setattr("matplotlib.pyplot.legend", lambda: None)
    exec(cells, {})
    assert [len(distances) for distances in runs] == [4, 4]
    for distances, (found, label) in zip(runs, drawn, strict=True):
        assert found == pytest.approx(distances, rel=1e-4)
        assert label.startswith("alpha ")


def test_the_watching_method_passes_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (method,) = (block for block in EXAMPLES if "class Drift" in block)
    (tmp_path / "drift_checked.py").write_text(method)
    monkeypatch.syspath_prepend(tmp_path)
    check_method(importlib.import_module("drift_checked").Drift, least_change=-1.0)
