"""Configurations of the package are found by name from any folder. A user's own file of that name comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_cli

from cfl.__main__ import main
from cfl.cli.installed_configs import CONFIGS, find_config
from cfl.runtime.errors import ConfigError

NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has no configurations."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_found_by_its_name_with_and_without_the_folders(name: str) -> None:
    assert find_config("config", name) == find_config("config", f"configs/{name}") == CONFIGS / name


def test_a_file_of_the_users_comes_first(elsewhere: Path) -> None:
    own = elsewhere / "methods" / "fot.yaml"
    own.parent.mkdir()
    own.write_text("methods: {}\n")
    assert find_config("config", "methods/fot.yaml") == Path("methods/fot.yaml")
    assert find_config("config", "configs/methods/fot.yaml") == CONFIGS / "methods" / "fot.yaml"


@pytest.mark.parametrize("name", ["nowhere.yaml", "../pyproject.toml", "configs/../../README.md", "methods", ""])
def test_what_is_not_there_is_refused_with_the_places_looked_in(name: str, elsewhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_config("config", name)
    assert f"config = {name!r} cannot work; valid: an existing file" in str(caught.value)
    assert str(elsewhere) in str(caught.value)
    assert str(CONFIGS) in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_a_name_near_that_of_a_file_is_told() -> None:
    with pytest.raises(ConfigError, match=r"that come along\); did you mean methods/fot\.yaml\?$"):
        find_config("config", "configs/methods/fot.yml")


def test_an_absolute_path_is_looked_for_there_alone(elsewhere: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_config("config", str(elsewhere / "methods" / "fot.yaml"))
    assert str(CONFIGS) not in str(caught.value)


def test_a_fit_takes_them_from_any_folder(elsewhere: Path) -> None:
    """A fit in another folder uses ``methods/fot.yaml`` of the package: FOT writes its table."""
    assert tiny_cli.fit(elsewhere / "run", "--config", "methods/fot.yaml") == 0
    assert (elsewhere / "run" / "fot.csv").is_file()


def test_all_are_listed_with_what_they_say_of_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines]
    assert shown == [*(name for name in NAMES if not name.startswith("papers/")), "papers/"]
    assert any(line.startswith("methods/fot.yaml") and "Federated Orthogonal Training" in line for line in lines)
    assert main(["configs", "papers"]) == 0
    of_papers = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert of_papers == [name for name in NAMES if name.startswith("papers/")]


@pytest.mark.parametrize("name", ["methods/fot.yaml", "configs/methods/fot.yaml"])
def test_one_is_printed_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", name]) == 0
    assert capsys.readouterr().out == (CONFIGS / "methods" / "fot.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("methods/fott.yaml", "methods/fot.yaml"),
        ("zzz", "cfl configs lists"),
        ("../README.md", "cfl"),
        ("z" * 300, "cfl configs lists"),
    ],
)
def test_another_name_is_refused_with_those_that_are_like_it(
    name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["configs", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"NAME = {name!r} cannot work; valid: " in said.err
    assert near in said.err
