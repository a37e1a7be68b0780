"""Other simulators in the benchmarks: each does the bare loop's work. No test here measures speed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.bench import Bench
from benchmarks.engines import LOOP, SIMULATORS, Engine
from benchmarks.fingerprint import fingerprint
from benchmarks.memory import descendants, memory_of_tree
from benchmarks.running import NotRun
from benchmarks.simulators.environments import environment
from benchmarks.works import W2, W3, Work

TINY = Work(
    name="W0",
    title="tiny",
    network="MLP",
    options={"hidden": [6, 5], "dropout": 0.0},
    shape=(1, 8, 8),
    clients=4,
    sampled=4,
    samples=7,
    batch_size=7,
    lr=0.5,
    classes=2,
)
# All clients in every round, all samples in one batch, no dropout: nothing is drawn at random.
WORKS = {
    "MLP": TINY,
    "AlexNet": replace(W2, clients=2, sampled=2, samples=8, batch_size=8, options={"dropout": [0.0] * 5}),
    "DropoutCNN": replace(W3, clients=2, sampled=2, samples=8, batch_size=8, options={"dropout": [0.0, 0.0]}),
}
INSTALLED = Path(__file__).parents[1] / "runs" / "bench" / "environments"


def bench(folder: Path) -> Bench:
    """Measurements of three rounds after one, which say nothing and measure no peak."""
    peak: Any = SimpleNamespace(measure=lambda: None)
    return Bench(folder, 3, 1, [], peak, lambda line: None)


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("engine", SIMULATORS.values(), ids=SIMULATORS)
def test_a_simulator_does_the_work_of_the_loop(engine: Engine, work: Work, tmp_path: Path) -> None:
    if not (INSTALLED / engine.name / "made").exists():
        pytest.skip(f"{engine.name} is not installed; make bench-simulators installs it")
    (tmp_path / "environments").symlink_to(INSTALLED)
    measured = bench(tmp_path)
    found = measured.interleave({each.name: measured.loop(work, each) for each in (LOOP, engine)})
    assert found[engine.name].failure is None
    rounds = {name: [r["fingerprint"] for r in (*one.warmup, *one.rounds)] for name, one in found.items()}
    assert rounds[engine.name] == pytest.approx(rounds["loop"], rel=1e-5)
    assert len(set(rounds["loop"])) == 4  # every round moves the weights
    assert min(abs(a - b) for a, b in zip(rounds["loop"], rounds["loop"][1:], strict=False)) > 1e-3


def test_a_fingerprint_changes_with_any_weight() -> None:
    weights = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    before = fingerprint(weights)
    assert before == fingerprint([w.numpy() for w in weights])
    flat = torch.cat([w.flatten() for w in weights])
    assert before == pytest.approx(float((flat * torch.arange(17, dtype=torch.float64).cos()).sum()))
    for weight in weights:
        for position in range(weight.numel()):
            changed = [w.clone() for w in weights]
            changed[[w is weight for w in weights].index(True)].flatten()[position] += 1e-6
            assert fingerprint(changed) != before


def test_memory_and_processes_of_a_tree() -> None:
    """A child that holds 200 MB and has a child of its own."""
    child = "import subprocess, sys; held = bytearray(200_000_000); subprocess.run([sys.executable, '-c', %r])"
    grandchild = "import time; print('ready', flush=True); time.sleep(60)"
    alone = memory_of_tree()["rss_mb"]
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", child % grandchild], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            started = descendants() - before
            assert process.pid in started
            assert len(started) == 2
            both = memory_of_tree()
            assert both["rss_mb"] > alone + 200
            assert both["peak_rss_mb"] >= both["rss_mb"]
        finally:
            for one in descendants() - before:
                os.kill(one, signal.SIGKILL)
    assert process.pid not in descendants()


def test_what_cannot_be_installed_is_not_run(tmp_path: Path) -> None:
    engine = Engine("nowhere", bare=True, module="flower", requires="./no-such-package")
    with pytest.raises(NotRun, match=r"pip install ./no-such-package: "):
        environment(tmp_path / "direct", engine.requires)
    measured = bench(tmp_path)
    found = measured.interleave({each.name: measured.loop(TINY, each) for each in (engine, LOOP)})
    assert str(found["nowhere"].failure).startswith("pip install ./no-such-package: ")
    assert len(found["loop"].rounds) == 3


def test_an_environment_is_made_once_and_again_for_another_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "only_here").mkdir(parents=True)
    (package / "only_here" / "__init__.py").touch()
    (package / "pyproject.toml").write_text(
        '[project]\nname = "only-here"\nversion = "1"\n[tool.setuptools]\npackages = ["only_here"]\n'
    )
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip reads "0" as: no isolation
    python = environment(tmp_path / "made", str(package))
    found = subprocess.run(
        [python, "-c", "import only_here, torch; print(torch.__file__)"], capture_output=True, text=True
    )
    assert found.stdout.strip() == torch.__file__
    marked = tmp_path / "made" / "marked"
    marked.touch()
    assert environment(tmp_path / "made", str(package)) == python
    assert marked.exists()
    with pytest.raises(NotRun):
        environment(tmp_path / "made", "./no-such-package")
    assert not marked.exists()
