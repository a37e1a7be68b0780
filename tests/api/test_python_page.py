"""The page about Python says what works."""

from __future__ import annotations

import re
from pathlib import Path

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
