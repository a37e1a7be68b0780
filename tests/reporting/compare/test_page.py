"""The report's HTML page: its data are those of the runs, its size is limited, and it is a single file."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.made_up import make_density_run, readings

from cfl.metrics.transfer import average_accuracy
from cfl.reporting.compare.groups import compare
from cfl.reporting.compare.page import PLOTLY, SIZE_LIMIT, page, page_of
from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.reading import LeftOut, Reading, read
from cfl.reporting.compare.rows import Comparison, Row


def data_of(runs: list[Reading]) -> dict[str, Any]:
    return page_data([(table, table.baseline(None)) for table in compare(runs)])


class Elements(HTMLParser):
    """Collect start tags with attributes and the texts of scripts and styles; require that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.texts.append((self.open[-1], data))


def parsed(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    elements.close()
    assert elements.open == []
    return elements


def test_curves_are_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    runs = readings(tmp_path, *({"seed": seed, "tasks": 5, "rounds": 20} for seed in range(3)))
    ((row,),) = [table["rows"] for table in data_of(runs)["tables"]]
    found = row["measures"]["accuracy"]
    acc = np.array([[average_accuracy(run.run.matrix, t).item() for t in range(5)] for run in runs])
    first = np.stack([run.run.matrix[:, 0].numpy() for run in runs])
    for name, values in (("seen", acc), ("first", first)):
        np.testing.assert_allclose(found[name], values.mean(0), rtol=1e-4)
        np.testing.assert_allclose(found[f"{name}_std"], values.std(0, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(found["matrix"], np.mean([run.run.matrix.numpy() for run in runs], axis=0), rtol=1e-4)
    assert (found["tasks"], found["after"], found["places"]) == (5, list(range(5)), list(range(5)))
    assert row["seeds"] == [0, 1, 2]


def test_one_seed_has_no_band_and_what_is_not_evaluated_is_null(tmp_path: Path) -> None:
    (run,) = readings(tmp_path, {})
    matrix = run.run.matrix.clone()
    matrix[1, 0] = torch.nan
    changed = dataclasses.replace(run, matrices={"accuracy": matrix.numpy()})
    found = data_of([changed])["tables"][0]["rows"][0]["measures"]["accuracy"]
    assert found["seen_std"] is found["first_std"] is None
    assert [value is None for value in found["seen"]] == [False, True, False]
    assert found["matrix"][1][0] is None
    json.dumps(found, allow_nan=False)


def test_figures_differences_and_ranks_are_those_of_the_tables(tmp_path: Path) -> None:
    accs = {"fedavg": (70.0, 71.0), "fot": (80.0, 84.0)}
    runs = readings(
        tmp_path, *({"method": m, "seed": s, "acc": a} for m, two in accs.items() for s, a in enumerate(two))
    )
    data = data_of(runs)
    (table,) = data["tables"]
    assert data["labels"] == ["FedAvg", "FOT"]
    assert table["baseline"] == 0
    assert [row["figures"]["acc"] for row in table["rows"]] == [
        [70.5, pytest.approx(0.5**0.5, rel=1e-6), 2, 2.0],
        [82.0, pytest.approx(8**0.5, rel=1e-6), 2, 1.0],
    ]
    assert table["rows"][0]["differences"] == {}
    half = 12.7062047 * 1.5  # t(0.975, 1) = tan(0.475 pi); differences 10 and 13, deviation 3 / sqrt(2), over sqrt(2)
    expected = [11.5, pytest.approx(11.5 - half, rel=1e-6), pytest.approx(11.5 + half, rel=1e-6), 2]
    assert table["rows"][1]["differences"]["acc"] == expected
    assert [(run["row"], run["seed"], run["figures"]["acc"]) for run in table["runs"]] == [
        (0, 0, 70.0), (0, 1, 71.0), (1, 0, 80.0), (1, 1, 84.0),
    ]  # fmt: skip


def test_epsilon_is_a_figure_of_runs_with_noise(tmp_path: Path) -> None:
    runs = readings(
        tmp_path,
        {"method": "fedavg"},
        *({"method": "dp_fedavg", "seed": seed, "epsilon_all_tasks": 8.0 + seed} for seed in (0, 1)),
    )
    data = data_of(runs)
    (table,) = data["tables"]
    assert "epsilon_all_tasks" in [figure["key"] for figure in data["figures"]]
    assert table["rows"][1]["figures"]["epsilon_all_tasks"][0] == 8.5
    assert "epsilon_all_tasks" not in table["rows"][0]["figures"]
    assert [run["figures"]["epsilon_all_tasks"] for run in table["runs"]] == [None, 8.0, 9.0]
    assert "epsilon_all_tasks" not in [figure["key"] for figure in data_of(runs[:1])["figures"]]


def test_learning_curves_end_with_the_shortest_run(tmp_path: Path) -> None:
    one, two = readings(tmp_path, {"seed": 0, "evaluate_every": 1}, {"seed": 1, "evaluate_every": 1})
    curve = list(two.run.curve[:9])
    curve[3] = None
    shorter = dataclasses.replace(two, run=dataclasses.replace(two.run, curve=curve))
    found = data_of([one, shorter])["tables"][0]["rows"][0]["rounds"]
    assert found["round"] == [0, 1, 2, 4, 5, 6, 7, 8]
    expected = [(one.run.curve[r] + curve[r]) / 2 for r in found["round"]]
    np.testing.assert_allclose(found["acc"], expected, rtol=1e-4)
    np.testing.assert_allclose(found["uplink_bytes"], [2_000_000 * (r + 1) for r in found["round"]], rtol=1e-4)
    assert data_of(readings(tmp_path / "ends", {}))["tables"][0]["rows"][0]["rounds"] is None


def test_a_seed_with_several_runs_counts_once_everywhere(tmp_path: Path) -> None:
    """Curves, bytes, seconds and used space are means over seeds; a seed has the mean of its runs."""
    options = {"evaluate_every": 1, "tasks": 3, "rounds": 12}
    of_seeds = [(0, 0.8, 30.0, 85.0), (0, 0.9, 60.0, 80.0), (1, 0.8, 120.0, 75.0)]
    runs = readings(
        tmp_path,
        *(
            options | {"seed": seed, "options": {"threshold": threshold}, "seconds": seconds, "level": level}
            for seed, threshold, seconds, level in of_seeds
        ),
    )
    runs = [
        dataclasses.replace(
            run,
            run=dataclasses.replace(
                run.run, progress=run.run.progress | {"uplink_bytes": [float(k + 1) * (r + 1) for r in range(12)]}
            ),
            space={"fot.head": {0: 10.0 * (k + 1), 1: 20.0 * (k + 1)}},
        )
        for k, run in enumerate(runs)
    ]

    def mean(values: list[float]) -> float:
        return ((values[0] + values[1]) / 2 + values[2]) / 2

    ((row,),) = [table["rows"] for table in page_data([(compare(runs, ["method"])[0], None)])["tables"]]
    shown = row["rounds"]
    assert shown["round"] == list(range(12))
    np.testing.assert_allclose(shown["acc"], [mean([run.run.curve[r] or 0.0 for run in runs]) for r in range(12)])
    np.testing.assert_allclose(shown["uplink_bytes"], [mean([1.0, 2.0, 3.0]) * (r + 1) for r in range(12)])
    np.testing.assert_allclose(shown["seconds"], [mean([30.0, 60.0, 120.0]) * (r + 1) / 12 for r in range(12)])
    assert row["figures"]["seconds"][0] == shown["seconds"][-1]
    assert row["space"] == {"fot.head": {"task": [0, 1], "used": [mean([10, 20, 30]), mean([20, 40, 60])]}}


def test_settings_partition_space_and_clients_are_there(tmp_path: Path) -> None:
    runs = readings(
        tmp_path, {"method": "fot", "options": {"threshold": 0.9}}, {"method": "er", "rounds": 24, "personal": 4}
    )
    (table,) = data_of(runs)["tables"]
    settings = table["settings"]
    shown = {key: [values[k] for values in settings["values"]] for k, key in enumerate(settings["keys"])}
    assert shown["schedule.rounds_per_task"] == ["4", "8"]
    assert shown["methods.fot.threshold"] == ["0.9", ""]
    assert dict(zip(settings["keys"], settings["differ"], strict=True))["methods.fot.threshold"] is False
    assert "schedule.batch_size" not in shown
    assert table["rows"][0]["space"] == {
        "fot.layers.0": {"task": [0, 1], "used": [15.0, 30.0]},
        "fot.layers.1": {"task": [0, 1], "used": [7.5, 15.0]},
    }
    np.testing.assert_allclose(table["rows"][1]["clients"], sorted(runs[1].clients), rtol=1e-4)
    partition = table["partition"]
    assert np.array(partition["counts"]).shape == (3, 10, 10)
    assert (partition["seed"], partition["row"], partition["total_clients"]) == (0, "FOT", 10)


def test_there_is_a_measure_even_if_runs_of_a_row_differ_in_their_tasks(tmp_path: Path) -> None:
    """Without any measure the page's program would fail, and the page stay empty."""
    runs = readings(tmp_path, {"tasks": 3}, {"tasks": 4, "seed": 1})
    data = page_data([(table, None) for table in compare(runs, ["method"])])
    assert [measure["key"] for measure in data["measures"]] == ["accuracy"]
    assert data["tables"][0]["rows"][0]["measures"] == {}


def test_nll_is_a_measure_of_its_own(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"method": "fot", "nll": True}, {"method": "er", "nll": True})
    data = data_of(runs)
    assert [(m["key"], m["better"], m["percent"]) for m in data["measures"]] == [
        ("accuracy", "higher", True),
        ("nll", "lower", False),
    ]
    for row, run in zip(data["tables"][0]["rows"], runs, strict=True):
        seen = row["measures"]["nll"]["seen"]
        np.testing.assert_allclose(seen[-1], ((100 - run.run.matrix[-1]) / 40).mean(), rtol=1e-4)


def test_densities_have_figures_matrices_and_curves_with_tasks_known_and_unknown(tmp_path: Path) -> None:
    runs = [read(make_density_run(tmp_path / str(seed), seed=seed, evaluate_every=1), []) for seed in (0, 1)]
    data = data_of(runs)
    assert [(m["key"], m["better"]) for m in data["measures"]] == [("nll", "lower"), ("nll_task_aware", "lower")]
    assert [figure["key"] for figure in data["figures"]][:2] == ["nll", "nll_task_aware"]
    ((row,),) = [table["rows"] for table in data["tables"]]
    assert row["figures"]["nll_task_aware"][0] == pytest.approx(row["figures"]["nll"][0] / 2)
    expected = np.mean([run.run.curve for run in runs], axis=0)
    np.testing.assert_allclose(row["rounds"]["nll"], expected, rtol=1e-4)
    assert set(row["rounds"]) == {"round", "nll", "std", "uplink_bytes", "seconds"}


def test_accuracies_and_densities_are_never_averaged(tmp_path: Path) -> None:
    """A row with accuracy and density runs has one matrix for each measure, and the curve of the accuracies only."""
    density = read(make_density_run(tmp_path / "density", "fot", evaluate_every=1), [])
    plain = readings(tmp_path, {"evaluate_every": 1, "seed": 1})
    pooled = page_data([(table, None) for table in compare([density, *plain], ["tasks"])])
    assert pooled["tables"][0]["rows"][0]["rounds"] == data_of(plain)["tables"][0]["rows"][0]["rounds"]
    assert set(pooled["tables"][0]["rows"][0]["measures"]) == {"accuracy", "nll", "nll_task_aware"}


def test_the_page_holds_all_data_and_asks_for_nothing(tmp_path: Path) -> None:
    runs = readings(tmp_path, {"method": "fot"}, {"method": "er", "seed": 1})
    data = page_data(
        [(table, None) for table in compare(runs)], [LeftOut(tmp_path / "x", "no such folder")], ["a part"]
    )
    html = page(data)
    elements = parsed(html)
    scripts = [text for tag, text in elements.texts if tag == "script"]
    assert json.loads(scripts[0]) == data
    assert len(scripts) == 3
    for tag, attributes in elements.started:
        assert not {"src", "href", "srcset", "data"} & set(attributes), tag
    assert all("url(" not in text and "@import" not in text for tag, text in elements.texts if tag == "style")
    policy = next(a["content"] or "" for tag, a in elements.started if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "/*DATA*/" not in html


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!-- /*PROGRAM*/ \\u003c"
    data = data_of(readings(tmp_path, {"method": name}))
    elements = parsed(page(data))
    scripts = [text for tag, text in elements.texts if tag == "script"]
    assert len(scripts) == 3
    assert json.loads(scripts[0])["labels"] == [name]


def test_the_library_is_the_one_that_is_named() -> None:
    folder = Path(__file__).parents[3] / "cfl" / "reporting" / "compare" / "assets"
    version = re.search(r"plotly-cartesian-([\d.]+)\.min\.js", PLOTLY)
    assert version is not None
    assert f"v{version[1]}" in (folder / PLOTLY).read_text(encoding="utf-8")[:200]
    assert "MIT License" in (folder / "plotly-LICENSE.txt").read_text()


@pytest.mark.parametrize(("rows", "tasks"), [(200, 50), (400, 10), (4, 200)])
def test_large_comparisons_stay_below_5_mb(tmp_path: Path, rows: int, tasks: int) -> None:
    """A page of very many rows or tasks stays below 5 MB: tasks and rounds are thinned, and the last one is kept."""
    (one,) = readings(tmp_path, {"tasks": 2, "rounds": 2, "clients": 200})
    noise = np.random.default_rng(0)
    matrix = noise.uniform(0, 100, (tasks, tasks))
    curve = noise.uniform(0, 100, 3000).tolist()
    progress = {name: np.cumsum(noise.uniform(1e6, 1e7, 3000)).tolist() for name in ("uplink_bytes", "seconds")}
    run = dataclasses.replace(one.run, curve=curve, progress=progress)
    big = dataclasses.replace(
        one,
        run=run,
        matrices={"accuracy": matrix, "nll": matrix / 50},
        space={f"fot.layer{k}": {t: 100 * t / tasks for t in range(tasks)} for k in range(4)},
        clients=noise.uniform(0, 100, 200).tolist(),
    )
    members = [Row(f"method {k}", "fot", [big]) for k in range(rows)]
    html = page_of([(Comparison("t", members, []), members[0])])
    assert len(html.encode()) <= SIZE_LIMIT == 5e6
    data = json.loads(next(text for tag, text in parsed(html).texts if tag == "script"))
    found = data["tables"][0]["rows"][-1]
    shown = found["measures"]["accuracy"]
    assert shown["places"][0] == 0
    assert shown["places"][-1] == tasks - 1
    assert len(shown["places"]) >= 5
    at = shown["places"]
    np.testing.assert_allclose(shown["matrix"], matrix[np.ix_(at, at)], rtol=1e-4)
    assert found["rounds"]["round"][0] == 0
    assert found["rounds"]["round"][-1] == 2999
