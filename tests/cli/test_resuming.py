"""One list says which options may change when a run is resumed. Options that error messages advise are on it."""

from __future__ import annotations

import ast
import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli

import cfl
from cfl.cli.federated_cli import ADVICE
from cfl.cli.linked_defaults import BUILT_FROM, FOLLOWING
from cfl.methods.personal import PersonalLayers
from cfl.reporting.experiment import MAY_CHANGE, differences_on_resuming, experiment_of, flatten
from cfl.runtime.source_digest import source_files

PACKAGE = Path(cfl.__file__).parent
DOCS = PACKAGE.parent / "docs" / "command-line.md"


def is_listed(key: str) -> bool:
    return any(f"{key}.".startswith(f"{listed}.") for listed in MAY_CHANGE)


UNDER_CONDITIONS = {
    "trainer.precision": "except precision and clipping",
    "trainer.gradient_clip_val": "except precision and clipping",
    "trainer.gradient_clip_algorithm": "except precision and clipping",
    "engine.matmul_precision": "except a reduced matmul_precision",
    "targets.accuracies": "unless they may end the run",
    "privacy.budget": "unless its budget may end the run",
}
OTHERS = {"federated.on_bad_update": "skip", "targets.accuracies": [50], "privacy.budget": 5}


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A configuration with another value of one key."""
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    *sections, option = key.split(".")
    node = copy
    for section in sections:
        node = node[section]
    node[option] = value
    return copy


def test_every_key_is_on_the_list_or_part_of_the_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_cli.printed_config(capsys, "--config", str(tiny_cli.TINY))
    before, refused, allowed = experiment_of(config), [], []
    for key in flatten(config):
        if key in ("ckpt_path", "methods", *FOLLOWING, *BUILT_FROM):
            continue
        after = experiment_of(changed(config, key, OTHERS.get(key, "another value")))
        found = differences_on_resuming(after, before)
        (refused if found else allowed).append(key)
    assert not [key for key in refused if is_listed(key) and key not in UNDER_CONDITIONS]
    assert not [key for key in allowed if not is_listed(key)]
    assert all(MAY_CHANGE[key.partition(".")[0]] == condition for key, condition in UNDER_CONDITIONS.items())
    assert not [listed for listed in MAY_CHANGE if not any(f"{key}.".startswith(f"{listed}.") for key in allowed)]


def test_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is on the list with a condition is refused if the condition does not hold."""
    plain = tiny_cli.printed_config(capsys, "--config", str(tiny_cli.TINY))
    skipping = changed(plain, "federated.on_bad_update", "skip")
    replaying = tiny_cli.printed_config(capsys, "--config", str(tiny_cli.TINY), "--methods.agem", "AGEM")
    ending = changed(changed(plain, "targets.accuracies", [50]), "targets.stop", True)
    recording = changed(changed(plain, "targets.accuracies", [50]), "targets.stop", False)

    def refused(before: dict[str, Any], after: dict[str, Any]) -> bool:
        return bool(differences_on_resuming(experiment_of(after), experiment_of(before)))

    assert refused(skipping, plain)
    assert not refused(plain, skipping)
    assert refused(replaying, changed(replaying, "buffer.size", 3))
    assert not refused(plain, changed(plain, "buffer.size", 3))
    assert refused(plain, ending)
    assert not refused(plain, recording)
    assert refused(plain, changed(plain, "privacy.budget", 5.0))
    assert not refused(plain, changed(plain, "privacy.delta", 1e-6))
    assert refused(plain, changed(plain, "engine.matmul_precision", "medium"))
    assert not refused(plain, changed(plain, "engine.matmul_precision", "highest"))


def test_the_page_has_the_list() -> None:
    """The documentation has a table with every key of the list and its condition."""
    lines = DOCS.read_text().partition("## What may change when a run is resumed")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert {key.strip("`"): condition.replace("`", "") for key, condition in cells} == MAY_CHANGE


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module, without docstrings and without arguments of ConfigError.

    A ConfigError is raised before a run starts, so that its advice is not about resuming.
    """
    left_out: set[int] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        refuses = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigError"
        if refuses or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            left_out.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def test_every_advice_can_be_followed() -> None:
    found = {
        advice: path.relative_to(PACKAGE).as_posix()
        for path in source_files(PACKAGE)
        for text in texts(path)
        for advice in ADVICE.findall(text)
    }
    assert found[("federated.on_bad_update", "skip")] == "federation/channel.py"
    assert not [advice for advice, _ in found if not is_listed(advice)]


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one client of round 3 train to NaN."""
    finish = PersonalLayers.finish_clients

    def breaks(method: Any, cohort: Any, positions: Any) -> None:
        for position in positions:
            if cohort.round == 3 and cohort.clients[position] == min(cohort.clients):
                cohort.parameters["head.bias"].data[position] = float("nan")
        finish(method, cohort, positions)

    monkeypatch.setattr(PersonalLayers, "finish_clients", breaks)


@pytest.mark.usefixtures("breaking")
def test_a_run_that_was_stopped_goes_on_without_the_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command in the error message continues the run. Its results equal those of a run that skips throughout."""
    options = ("--methods.own", "PersonalLayers", "--methods.own.layers", "[]", "--checkpoint.share", "1")
    assert tiny_cli.fit(tmp_path / "my run", *options) == 2
    said = capsys.readouterr().err
    command = f"cfl fit --ckpt_path '{tmp_path}/my run/last.ckpt' --federated.on_bad_update skip"
    assert said.endswith(f"in this run, too; continue with: {command}\n")
    assert tiny_cli.run(*shlex.split(command)[1:]) == 0
    assert tiny_cli.summary(tmp_path / "my run")["skipped_clients"] == 1
    assert tiny_cli.fit(tmp_path / "whole", *options, "--federated.on_bad_update", "skip") == 0
    tiny_cli.assert_same(*(tiny_cli.results(tmp_path / name) for name in ("my run", "whole")))


def test_the_refusal_has_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path) == 143
    assert tiny_cli.fit(tmp_path, "--ckpt_path", "last", "--federated.server_lr", "0.5") == 2
    said = capsys.readouterr().err
    assert "they differ in federated.server_lr: 0.5, in the checkpoint 1.0; what may change is run, checkpoint" in said
    assert said.endswith("federated.on_bad_update (to skip)\n")
