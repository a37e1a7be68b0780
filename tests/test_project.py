"""Promises about the project's own texts and structure."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import double, fit, mlp, tiny_client, tiny_data, weights
from torch import Tensor

from cfl.cli.main import main
from cfl.engines.cohort import Cohort
from cfl.methods import Method

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


def test_only_the_command_line_knows_the_callbacks() -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cfl").rglob("*.py")
        if any(name.split(".")[0] == "callbacks" for name in imports(path))
    }
    assert knowing == {"cfl/cli/main.py"}


def test_the_other_lightning_package_is_never_imported() -> None:
    """Its classes are not interchangeable with lightning.pytorch's, and the error does not say so."""
    files = [path for folder in ("cfl", "callbacks", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    assert not [path for path in files if any(name.split(".")[0] == "pytorch_lightning" for name in imports(path))]


def test_the_server_knows_neither_lightning_nor_data() -> None:
    assert not {name for name in imports(ROOT / "cfl" / "server.py") if "lightning" in name or "data" in name}


def test_modules_that_docstrings_refer_to_are_there() -> None:
    files = [path for folder in ("cfl", "callbacks") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in files for name in re.findall(r":mod:`([\w.]+)`", path.read_text())}
    assert len(names) > 10
    assert not [name for name in names if importlib.util.find_spec(name) is None]


def test_the_documented_method_is_an_l1_penalty() -> None:
    """The example of the architecture page, run as printed: its gradient adds strength * sign(w)."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    code = re.search(r"```python\n(class Sparse.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"Method": Method, "Cohort": Cohort, "Tensor": Tensor, "torch": torch}
    exec(code[1], names)

    class Plain(Method):
        def adjust_gradients(self, cohort: Cohort) -> None:
            for name, gradient in cohort.gradients.items():
                gradient += 0.02 * cohort.parameters[name].detach().sign()

    ways: list[dict[str, Method]] = [{"sparse": names["Sparse"](0.02)}, {"plain": Plain()}, {}]
    runs = [fit(tiny_client(tiny_data(), double(mlp), methods=methods), tiny_data()) for methods in ways]
    found, by_hand, without = map(weights, runs)
    for name, value in found.items():
        torch.testing.assert_close(value, by_hand[name], rtol=0, atol=1e-12)
        assert float((value - without[name]).abs().max()) > 1e-3


def readme_commands() -> list[str]:
    """The README's ``cfl fit`` command lines that start a run from files of the project."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = [line.split("#")[0].strip() for line in text.splitlines() if line.startswith("    cfl fit")]
    return [line for line in lines if "--config" in line]


@pytest.mark.parametrize("command", readme_commands())
def test_commands_of_the_readme_parse(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in shlex.split(command)[1:] if word != "--print_config"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--print_config"])
    assert caught.value.code in (0, None)
    assert "rounds_per_task" in capsys.readouterr().out
