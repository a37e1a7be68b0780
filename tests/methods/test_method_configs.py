"""Configurations of methods, and what the documents say of them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from jsonargparse import ArgumentParser
from test_registry import ENTRIES, each_method

from cfl.data.scenarios import Scenario
from cfl.methods import Method

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "methods"
DATA_PAGE = CONFIGS.parents[1] / "docs" / "data.md"


def methods_of(path: Path) -> dict[str, Method]:
    """The methods that a config file makes. The file may also name the network that they need."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--methods", type=dict[str, Method])
    given = parser.parse_object({"methods": yaml.safe_load(path.read_text())["methods"]})
    methods: dict[str, Method] = parser.instantiate(given).methods
    return methods


@each_method
def test_it_has_a_config(name: str) -> None:
    made = methods_of(CONFIGS / ENTRIES[name].config)
    assert name in {type(method).__name__ for method in made.values()}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_a_method_can_be_read(path: Path) -> None:
    assert path.read_text().startswith("# ")
    named = methods_of(path)
    assert bool(named) != (path.stem == "fedavg")
    assert {type(method).__name__ for method in named.values()} <= {*ENTRIES}


def documented() -> Iterator[tuple[str, list[str]]]:
    """Names of the table of scenarios in the documents, with the scenarios that have a cross."""
    (table,) = re.findall(r"(?<=`configs/methods/` \|)[^\n]*\n\|[-|]+\n((?:\|.*\n)+)", DATA_PAGE.read_text())
    columns = ["task", "class", "domain", "density", "regression"]
    for line in table.splitlines():
        names, *crosses = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"[\w-]+(?=,|$| \()", names):
            yield name, [column for column, cross in zip(columns, crosses, strict=False) if cross == "x"]


@pytest.mark.parametrize(("name", "scenarios"), [*documented()])
def test_the_documents_say_in_which_scenarios_it_works(name: str, scenarios: list[str]) -> None:
    allowed = set(get_args(Scenario)).intersection(
        *(m.scenarios for m in methods_of(CONFIGS / f"{name}.yaml").values())
    )
    assert ("regression" in allowed) == ("detection" in allowed)
    assert set(scenarios) == allowed - {"detection"}


def test_the_page_of_a_method_has_all_its_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DATA_PAGE.parent)
    page = importlib.import_module("generated_pages").method_page("FedProx")
    assert f"- Scenarios: {', '.join(get_args(Scenario))}\n" in page


def test_the_documents_have_all_configs_of_methods() -> None:
    found = sorted(name for name, _ in documented())
    assert found == sorted(path.stem for path in CONFIGS.glob("*.yaml")), f"see the table of methods in {DATA_PAGE}"
