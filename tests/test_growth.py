"""The arithmetic of the growth benchmarks. No test here measures speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.growth import (
    LINES,
    PARAMETERS,
    TASK_METHODS,
    add_slopes,
    chosen_lines,
    ends,
    fixed_engine,
    hidden_width,
    main,
    markdown,
    method_config,
    page,
    ring_seconds,
    spread,
    stacked_engine,
    task_figures,
)
from benchmarks.rounds import Measured
from support.class_options import options_of

import cfl.methods
from cfl.models import MLP
from cfl.runtime.errors import ConfigError


@pytest.mark.parametrize("wanted", PARAMETERS)
def test_networks_have_the_size_that_they_are_named_after(wanted: int) -> None:
    network = MLP((1, 8, 8), 10, hidden=[hidden_width(wanted)] * 2, dropout=0.0)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(wanted, rel=0.01)


def test_early_and_late_values() -> None:
    assert ends([1, 3, 9, 5, 7]) == (2, 6), "two at least"
    assert ends([*range(20)]) == (1.5, 17.5), "a fifth"
    assert ends([4.0]) == (4, 4)


def test_spread_is_of_the_quartiles() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)


def test_slopes_skip_what_was_not_run() -> None:
    rows: list[dict[str, Any]] = [
        {"point": 10, "mb": 5.0},
        {"point": 20, "not_run": "no memory"},
        {"point": 110, "mb": 7.0, "not_run": None},
    ]
    add_slopes(rows, "point", {"mb": "mb_per_client"})
    assert [row.get("mb_per_client") for row in rows] == [None, None, 0.02]


def test_a_sum_over_a_ring() -> None:
    """Each of two processes sends two messages of half the size; each of four sends six of a quarter."""
    assert ring_seconds(1, 80, 1.0, 20.0) == 0
    assert ring_seconds(2, 80, 1.0, 20.0) == 2 * (1 + 2)
    assert ring_seconds(4, 80, 1.0, 20.0) == 6 * (1 + 1)


def test_no_engine_is_chosen_by_a_trial() -> None:
    assert stacked_engine(10_000).options == fixed_engine(128, 64)
    assert stacked_engine(10).options == fixed_engine(10, 5)
    given = {word for word in fixed_engine(10, 5) if word.startswith("--")}
    assert given >= {"--engine.kind", "--engine.workers", "--engine.stack", "--schedule.cohort_width"}
    assert stacked_engine(10).is_settled


def test_figures_of_tasks() -> None:
    def report(seconds: float, task_end: float, checkpoint: int) -> dict[str, Any]:
        own = {"seconds": seconds, "task_end_seconds": task_end, "checkpoint_bytes": checkpoint}
        return {**own, "between_seconds": 0.5, "rss_mb": 100.0}

    warmup = [report(99, 0, 1)] * 3
    found = Measured(rounds=[*warmup, *(report(3 + n, 1, 1000 * (n + 1)) for n in range(4))], memory={"rss_mb": 1.0})
    row = task_figures(found, 3)
    assert (row["round_early"], row["round_late"], row["round_growth"]) == (2.5, 4.5, 1.8)
    assert (row["checkpoint_early"], row["checkpoint_late"]) == (1500, 3500)
    assert (row["between_growth"], row["rss_growth"], row["rss_mb"]) == (1, 1, 1)
    plain = task_figures(Measured(rounds=[report(1, 0, 1)] * 4), 1)
    assert plain["task_end_growth"] is None


@pytest.mark.parametrize("method", TASK_METHODS)
def test_methods_are_measured_with_options_that_they_have(method: str) -> None:
    config = method_config(method, TASK_METHODS[method])
    for entry in config["methods"].values():
        assert set(entry["init_args"]) <= set(options_of(getattr(cfl.methods, entry["class_path"])))
    assert set(config) <= {"methods", "model"}


def test_lines_are_chosen_by_name() -> None:
    assert chosen_lines("") == list(LINES) == ["clients", "round", "tasks", "size", "processes"]
    assert chosen_lines("size, clients") == ["clients", "size"]
    with pytest.raises(ConfigError, match="clients, round"):
        chosen_lines("client")


def test_a_misspelt_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lines", "siz", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: --lines = 'siz'")
    assert not (tmp_path / "out").exists()


def test_tables() -> None:
    rows = [
        {"point": 1000, "not_run": None, "seconds": 0.0123, "spread": 0.5, "seconds_per_client": 0.001},
        {"point": 10, "not_run": "no room"},
    ]
    table = markdown("round", rows)
    lines = table.splitlines()
    assert lines[0].startswith("| sampled | ms a round | spread % |")
    assert lines[2].startswith("| 1,000 | 12.3 | 50 | 1.000 | - |")
    assert lines[3].startswith("| 10 | not run: no room |")
    assert len({line.count("|") for line in lines}) == 1
    text = page({"machine": {"cores": 2}, "versions": {"torch": "2"}, "lines": {"round": rows}})
    assert "cores 2, torch 2" in text
    assert text.endswith(f"{table}\n")
