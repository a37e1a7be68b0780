"""The examples of the page about Python run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

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
