"""Panels at wandb: they name figures that runs log, and a second call updates what the first has made."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import tiny_cli
from support.logged_runs import LOGGERS, OPTIONS, history, records_of

from cfl.__main__ import main
from cfl.reporting.dashboard.panels import GROUPING, SECTIONS

pytest.importorskip(
    "wandb_workspaces", reason="needs the optional package wandb-workspaces: pip install wandb-workspaces"
)

PREFIXES = r"(?:cl|final|train|comm|time|data)/\w+"


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_ENTITY", "WANDB_PROJECT", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def specification(tmp_path: Path, *options: str) -> Any:
    """Return what ``--dry-run`` writes, and require that no server is contacted."""
    path = tmp_path / "new" / "spec.json"
    with (
        mock.patch("socket.socket.connect", side_effect=AssertionError("a connection")),
        mock.patch("wandb.Api") as api,
    ):
        assert main(["dashboard", "--dry-run", str(path), *options]) == 0
    assert not api.called
    return json.loads(path.read_text())


def panels(specification: Any) -> list[Any]:
    """Return every panel of workspace and report, which is a dictionary with a viewType."""
    if isinstance(specification, dict):
        found = [specification] if "viewType" in specification and "config" in specification else []
        return found + [panel for value in specification.values() for panel in panels(value)]
    return [panel for value in specification for panel in panels(value)] if isinstance(specification, list) else []


def named_keys(specification: Any) -> set[str]:
    """Return the names of figures in panels and columns of the JSON."""
    return set(re.findall(rf'"(?:summary:)?({PREFIXES})"', json.dumps(specification)))


DENSITY = (
    *("--data.scenario", "density", "--data.stream.source", "Binarised"),
    *("--data.stream.source.source", "Synthetic", "--data.stream.source.source.shape", "[1, 4, 4]"),
    *("--model.network", "MADE", "--model.network.hidden", "[7]"),
)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], dict[str, Any]]:
    """The keys that offline runs have logged, of every measure, and the first one's configuration."""
    accuracies, config = logged_by(tmp_path_factory.mktemp("dashboard") / "run", *OPTIONS)
    density = logged_by(tmp_path_factory.mktemp("density") / "run", *DENSITY)[0]
    folder = tmp_path_factory.mktemp("regression")
    return accuracies | density | logged_by(folder / "run", *regression(folder))[0], config


def regression(folder: Path) -> list[str]:
    """Options of a run that predicts a number, from arrays in a folder."""
    arrays = {
        f"{part}_{kind}": np.linspace(0, 1, 96).reshape(shape) for part in ("train", "test") for kind, shape in _SHAPES
    }
    np.savez(folder / "numbers.npz", **arrays)
    source = {"path": str(folder / "numbers.npz"), "numbers": True}
    source = {"class_path": "Features", "init_args": {**source, "num_classes": None}}
    stream = {"class_path": "Permuted", "init_args": {"num_tasks": 2, "source": source}}
    return ["--data.stream", json.dumps(stream), "--data.partition", "IID"]


_SHAPES = (("features", (96, 1)), ("labels", (96,)))


def logged_by(folder: Path, *options: str) -> tuple[set[str], dict[str, Any]]:
    """The keys that an offline run has logged, and its configuration, from the file that ``wandb sync`` sends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
            patch.setenv(name, value)
        patch.chdir(folder.parent)
        assert tiny_cli.fit(folder, *options, "--config", str(LOGGERS / "wandb.yaml"), pictures=True) == 0
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = records_of(written)
    config = {
        "/".join(update.nested_key) or update.key: json.loads(update.value_json)
        for record in records
        if record.WhichOneof("record_type") == "config"
        for update in record.config.update
    }
    return {name for step in history(records) for name in step}, config


def test_offline_runs_land_in_the_panels(logged: tuple[set[str], dict[str, Any]], tmp_path: Path) -> None:
    """Every figure in a panel, and every key by which panels group runs, is logged by offline runs."""
    keys, config = logged
    found = specification(tmp_path)
    named = named_keys(found)
    assert {"final/acc", "final/fgt", "final/bwt", "cl/acc", "cl/accuracy_matrix", "comm/uplink_bytes"} <= named
    assert {"final/nll", "cl/nll", "cl/nll_matrix", "cl/nll_heatmap"} <= named
    # A picture or table is logged under its key, or as several items with the key as prefix.
    named = {key for key in named if not re.search("/map(_|$)", key)}  # of detection, whose library may be missing
    assert [key for key in named if not any(name == key or name.startswith(f"{key}/") for name in keys)] == []
    patterns = {panel["config"]["metricRegex"] for panel in panels(found) if "metricRegex" in panel["config"]}
    assert len(patterns) == 4
    assert {name for name in keys for pattern in patterns if re.fullmatch(pattern, name)} == {
        "task_00/acc",
        "task_01/acc",
        "task_00/nll",
        "task_01/nll",
        "task_00/rmse",
        "task_01/rmse",
    }
    assert "round" in keys
    assert {"benchmark", "partition", "method", "setting"} <= set(config)


def test_every_panel_of_ours_is_in_workspace_and_report(tmp_path: Path) -> None:
    found = specification(tmp_path)
    ours = [panel for section in SECTIONS for panel in section.panels]
    for view in ("workspace", "report"):
        there = panels(found[view])
        assert len(there) == len(ours)
        for panel, made in zip(ours, there, strict=True):
            assert all(key in json.dumps(made) for key in panel.keys), panel
        lines = [made["config"] for made in there if made["viewType"] == "Run History Line Plot"]
        assert len(lines) == sum(panel.kind == "lines" for panel in ours)
        assert {(line["xAxis"], line["groupAgg"], line["groupArea"]) for line in lines} == {("round", "mean", "stddev")}
        identifiers = [made["__id__"] for made in there]
        assert len(set(identifiers)) == len(identifiers)


def run_sets(specification: Any) -> list[Any]:
    found = specification["workspace"]["spec"]["section"]["runSets"]
    blocks = specification["report"]["spec"]["blocks"]
    return found + [runs for block in blocks if block["type"] == "panel-grid" for runs in block["metadata"]["runSets"]]


def test_runs_are_grouped_by_all_but_their_seed(tmp_path: Path) -> None:
    sets = run_sets(specification(tmp_path))
    assert len(sets) == 1 + len(SECTIONS)
    for runs in sets:
        assert [key["name"] for key in runs["grouping"]] == [f"{key}.value" for key in GROUPING]
        assert {key["section"] for key in runs["grouping"]} == {"config"}


def test_benchmarks_have_run_sets_of_their_own(tmp_path: Path) -> None:
    found = specification(tmp_path, "--benchmark", "permuted-digits", "--benchmark", "cifar100")
    whole, *of_report = run_sets(found)
    assert all(name in json.dumps(whole["filters"]) for name in ("permuted-digits", "cifar100"))
    assert [runs["name"] for runs in of_report] == ["permuted-digits", "cifar100"] * len(SECTIONS)
    for runs in of_report:
        filters = json.dumps(runs["filters"])
        assert runs["name"] in filters
        assert ("cifar100" in filters) != ("permuted-digits" in filters)
    assert len({panel["__id__"] for panel in panels(found["report"])}) == len(panels(found["report"]))


def test_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options override wandb's environment variables, which override defaults. A second call writes the same file."""
    found = specification(tmp_path)
    assert (found["entity"], found["project"]) == ("", "cfl")
    assert specification(tmp_path) == found
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_PROJECT", "others")
    found = specification(tmp_path)
    assert (found["entity"], found["project"]) == ("team", "others")
    found = specification(tmp_path, "--entity", "me", "--project", "mine", "--title", "Mine")
    assert (found["entity"], found["project"]) == ("me", "mine")
    assert (found["workspace"]["title"], found["report"]["title"]) == ("Mine", "Mine")
    assert not any("project" in runs for runs in run_sets(found))  # run sets use that of workspace and report


class Server:
    """A wandb server with the parts that are needed for views: it keeps views and finds them by name."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        self.settings = {"base_url": "https://wandb.example.org"}
        self.default_entity = "somebody"
        self.projects_made: list[tuple[str, str]] = []
        self._service_api = self
        self.app_url = "https://wandb.example.org/"

    def projects(self, entity: str) -> list[Any]:
        return [Named(name) for owner, name in self.projects_made if owner == entity]

    def create_project(self, name: str, entity: str) -> None:
        self.projects_made.append((entity, name))

    def reports(self, path: str) -> list[Any]:
        entity, project = path.split("/")
        if (entity, project) not in self.projects_made:
            raise ValueError(f"Could not find project {path}")
        return [Named(view["displayName"], view["id"]) for view in self.views.values() if view["type"] == "runs"]

    def execute_graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in query:
            place = (variables["entityName"], variables["projectName"])
            assert place in self.projects_made
            identifier = variables.get("id") or f"id{len(self.views)}"
            json.loads(variables["spec"])
            project = {"id": "p", "name": place[1], "entityName": place[0]}
            times = {"createdAt": "2026-01-01T00:00:00", "updatedAt": "2026-01-01T00:00:00"}
            self.views[identifier] = {**variables, "id": identifier, "project": project, **times}
            return {"upsertView": {"view": self.views[identifier], "inserted": True}}
        assert "allViews" in query
        if (variables["entityName"], variables["name"]) not in self.projects_made:
            return {"project": None}
        nodes = [{"node": v} for v in self.views.values() if v["name"] == variables["viewName"]]
        return {"project": {"allViews": {"edges": nodes}}}


class Named:
    def __init__(self, name: str, id: str = "") -> None:
        self.name, self.display_name, self.id = name, name, id


def test_a_second_call_updates_what_the_first_has_made(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    with mock.patch("wandb.Api", return_value=server):
        assert main(["dashboard"]) == 0
        first = capsys.readouterr().out.split()
        assert sorted(view["type"] for view in server.views.values()) == ["project-view", "runs"]
        assert server.projects_made == [("somebody", "cfl")]
        assert main(["dashboard", "--benchmark", "permuted-digits"]) == 0
    assert capsys.readouterr().out.split() == first
    assert all(address.startswith("https://wandb.example.org/somebody/cfl") for address in first)
    assert sorted(view["type"] for view in server.views.values()) == ["project-view", "runs"]
    assert all("permuted-digits" in view["spec"] for view in server.views.values())


def test_another_servers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--base-url`` is passed to wandb in its environment variable, and overrides that variable's value."""
    monkeypatch.setenv("WANDB_BASE_URL", "https://old.example.org")
    seen = []

    def api() -> Server:
        seen.append(os.environ["WANDB_BASE_URL"])
        return Server()

    with (
        mock.patch("wandb.Api", side_effect=api),
        mock.patch("cfl.reporting.dashboard.server.publish", return_value=("a", "b")),
    ):
        assert main(["dashboard", "--base-url", "http://localhost:8080/"]) == 0
    assert seen == ["http://localhost:8080"]


@pytest.mark.parametrize("failure", ["usage", "connection", "plain"])
def test_a_server_that_does_not_answer_is_one_line(failure: str, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb

    error = {
        "usage": wandb.errors.UsageError("No API key configured."),
        "connection": ConnectionRefusedError("refused"),
        "plain": Exception("not logged in"),
    }[failure]
    with mock.patch("wandb.Api", side_effect=error):
        assert main(["dashboard", "--entity", "team"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cfl dashboard = 'team/cfl at")
    assert str(error) in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--base-url", "localhost"),
        ("--base-url", "http://["),
        ("--base-url", "http://a:99999"),
        ("--base-url", "http://:80"),
        ("--project", "a/b"),
        ("--project", "a\x1b"),
        ("--entity", ""),
        ("--benchmark", ""),
        ("--benchmark", "a\0b"),
        ("--title", ""),
    ],
)
def test_bad_options_are_refused(options: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--dry-run", str(tmp_path / "spec.json"), *options]) == 2
    assert options[0] in capsys.readouterr().err
    assert not (tmp_path / "spec.json").exists()


def test_a_missing_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    absent = mock.patch(
        "cfl.reporting.dashboard.command.find_spec", lambda name: None if name == "wandb_workspaces" else find(name)
    )
    with absent:
        assert main(["dashboard", "--dry-run", str(tmp_path / "spec.json")]) == 2
    said = capsys.readouterr().err
    assert "without wandb_workspaces' cannot work; valid: after pip install 'continual-fl[dashboards]'" in said
