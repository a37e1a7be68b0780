"""Promises about the project's own texts and structure."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import tiny_cli

from cfl.cli.main import main
from cfl.runtime.source_digest import source_files

ROOT = Path(__file__).parents[1]


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def sources(*folders: str) -> list[Path]:
    """Python files below folders of the repository; ``cfl/callbacks`` is a link and counts as ``callbacks``."""
    return [
        path for folder in folders for path in source_files(ROOT / folder) if "cfl/callbacks" not in path.as_posix()
    ]


def test_the_package_is_made_of_rooms() -> None:
    """The package's top level has only two modules, and links to the folders ``callbacks`` and ``configs``."""
    assert {path.name for path in (ROOT / "cfl").glob("*.py")} == {"__init__.py", "__main__.py"}
    for name in ("callbacks", "configs"):
        link = ROOT / "cfl" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / name


def test_an_installation_adds_one_name() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    setuptools = pytest.importorskip("setuptools")
    found = setuptools.find_namespace_packages(str(ROOT), include=setup["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {"cfl"}
    assert {"cfl.callbacks", "cfl.configs", "cfl.configs.methods", "cfl.methods.components"} <= set(found)
    carried = {
        path.relative_to(ROOT) for pattern in setup["package-data"]["cfl"] for path in (ROOT / "cfl").glob(pattern)
    }
    for file in ("py.typed", "configs/default.yaml", "reporting/compare/assets/page.js", "papers/fot/paper.yaml"):
        assert Path("cfl", file) in carried


def test_each_extra_is_named_where_its_packages_are_missing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra for path in sources("cfl") for extra in re.findall(r"""install\(["'](\w+)["']\)""", path.read_text())
    }
    assert named == set(extras) - {"dev", "docs"}


def test_files_beside_a_run_are_not_taken_for_parts_of_the_program(tmp_path: Path) -> None:
    for name in ("callbacks", "configs", "metrics", "runtime"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('somebody else's')")
    command = [sys.executable, "-m", "cfl", "fit", "--config", str(tiny_cli.TINY), "--run.dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()


def test_only_the_command_line_and_the_checks_know_the_callbacks() -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in sources("cfl")
        if any(name.startswith(("callbacks", "cfl.callbacks")) for name in imports(path))
    }
    assert knowing == {
        "cfl/api/parts.py",
        "cfl/cli/checkpoints.py",
        "cfl/cli/federated_cli.py",
        "cfl/cli/main.py",
        "cfl/cli/trainer_settings.py",
        "cfl/testing/tiny_runs.py",
    }


def test_the_other_lightning_package_is_never_imported() -> None:
    """No file imports ``pytorch_lightning``, whose classes do not work with those of ``lightning.pytorch``."""
    files = sources("cfl", "callbacks", "tests")
    assert len(files) > 50
    assert not [path for path in files if any(name.split(".")[0] == "pytorch_lightning" for name in imports(path))]


def test_the_server_knows_neither_lightning_nor_data() -> None:
    server = ROOT / "cfl" / "federation" / "server.py"
    assert not {name for name in imports(server) if "lightning" in name or "data" in name}


def test_modules_that_docstrings_refer_to_are_there() -> None:
    names = {name for path in sources("cfl", "callbacks") for name in re.findall(r":mod:`([\w.]+)`", path.read_text())}
    assert len(names) > 10
    assert not [name for name in names if importlib.util.find_spec(name) is None]


def documented_commands() -> list[str]:
    """The ``cfl fit`` command lines of README and docs that start a run from files of the project."""
    found = []
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs/results").glob("*.md")),
    ]:
        text = path.read_text().replace("\\\n", " ")
        lines = [line.split("#")[0].strip() for line in text.splitlines() if re.match("(    )?cfl fit ", line)]
        found += [line for line in lines if "--config configs/" in line and "$" not in line]
    return list(dict.fromkeys(found))


def test_commands_are_found_in_every_part_of_the_documents() -> None:
    assert len(documented_commands()) > 15


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_parse(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in shlex.split(command)[1:] if word != "--print_config"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--print_config"])
    assert caught.value.code in (0, None)
    assert "rounds_per_task" in capsys.readouterr().out


def test_the_tests_that_hold_the_contracts_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 15
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
