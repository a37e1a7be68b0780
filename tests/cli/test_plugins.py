"""Classes that other packages register can be given by their short names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support import toy_plugin
from support.tiny_cli import TINY, fit

from cfl.cli import plugins
from cfl.cli.given import Given
from cfl.cli.own_classes import check_methods_names
from cfl.runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]
OPTIONS = [
    "--methods.toy=ToyMethod",
    "--methods.toy.step=2",
    "--model.network=ToyNetwork",
    "--data.stream.source=ToySource",
    "--data.partition=ToyPartition",
    "--schedule.rounds_per_task=1",
]


@pytest.fixture(autouse=True)
def looked_up_anew() -> Iterator[None]:
    plugins._in_group.cache_clear()
    yield
    plugins._in_group.cache_clear()
    for name in [name for name in sys.modules if name.startswith("toy_plugin")]:
        del sys.modules[name]


def test_nothing_of_a_package_is_imported_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_plugin.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    plugins.import_named_in("model.network: MLP")
    assert not [name for name in sys.modules if name.startswith("toy_plugin")]
    assert set(plugins.offered(plugins.Method)) == {"ToyMethod"}


def test_a_run_that_names_them_is_kept_with_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    toy_plugin.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fit(tmp_path / "run", *OPTIONS) == 0
    assert "toy counts 4" in capfd.readouterr().out
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["methods"]["toy"]["class_path"] == "toy_plugin.classes.ToyMethod"
    assert kept["model"]["network"]["class_path"] == "toy_plugin.classes.ToyNetwork"
    file = tmp_path / "own.yaml"
    file.write_text("methods:\n  toy: {class_path: ToyMethod, init_args: {step: 3}}\nschedule: {rounds_per_task: 1}\n")
    assert fit(tmp_path / "second", "--config", str(file)) == 0
    assert "toy counts 6" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"cfl.methods": "Other"}, "cfl.methods.Other = 'toy_plugin.classes:ToyMethod'"),
        ({"cfl.methods": "Twisted"}, "a subclass of Method with that name"),
    ],
)
def test_an_entry_with_another_name_is_refused(
    names: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy_plugin.install(tmp_path / "site", names)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fit(tmp_path / "run", f"--methods.toy={names['cfl.methods']}") == 2
    assert said in capfd.readouterr().err


def test_offered_classes_are_among_the_valid_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    toy_plugin.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fit(tmp_path / "run", "--methods.toy=Nobody") == 2
    assert "ToyMethod" in capfd.readouterr().err


def test_a_module_that_is_not_found_says_where_modules_are_looked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path / "run", "--methods.mine=nowhere_at_all.Mine") == 2
    said = capfd.readouterr().err
    assert "No module named 'nowhere_at_all'" in said
    assert "PYTHONPATH" in said


def own_module(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's own that can be imported during a test."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("key", ["data.partition", "methods.mine", "model.network"])
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("from cfl.methods import Nothing", "ImportError: cannot import name 'Nothing' from 'cfl.methods'"),
        ("def f(:", r"SyntaxError: invalid syntax \(broken_here.py, line 1\)"),
        ("\n1 / 0", r"ZeroDivisionError: division by zero \(broken_here.py, line 2\)"),
        ("import json\njson.loads('{')", r"JSONDecodeError: .* \(broken_here.py, line 2\)"),
        ("import nowhere_at_all", r"ModuleNotFoundError: No module named 'nowhere_at_all' \(broken_here.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why_and_where(
    code: str, why: str, key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module("broken_here", code, tmp_path, monkeypatch)
    assert fit(tmp_path / "run", f"--{key}=broken_here.Mine") == 2
    said = rf"^error: {key} = 'broken_here.Mine' cannot work; .* can be imported; {why}"
    assert re.search(said, capfd.readouterr().err, re.MULTILINE)


def test_a_class_with_the_name_of_one_that_configurations_use_is_told_so(tmp_path: Path) -> None:
    """In a process of its own: the name stays ambiguous for as long as the class lives."""
    (tmp_path / "my_nets.py").write_text("from cfl import models\n\n\nclass MLP(models.MLP):\n    pass\n")
    command = [sys.executable, "-m", "cfl", "fit", "--model.network", "my_nets.MLP"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    valid = "a class of yours with another name; MLP is the name of cfl.models.MLP and my_nets.MLP"
    assert done.stderr == f"error: model.network = 'my_nets.MLP' cannot work; valid: {valid}\n"
    assert done.returncode == 2


@pytest.mark.parametrize("names", [("er", "mine"), ("mine", "er")])
def test_a_method_with_the_name_of_another_is_told_so_in_any_order(names: tuple[str, str]) -> None:
    paths = {"er": "cfl.methods.ER", "mine": "my_methods.ER"}
    config = {"methods": {name: {"class_path": paths[name]} for name in names}}
    valid = "a class of yours with another name; ER is the name of cfl.methods.ER and my_methods.ER"
    with pytest.raises(ConfigError, match=rf"^methods\.mine = 'my_methods.ER' cannot work; valid: {valid}$"):
        check_methods_names(config, [Given("methods.er", "ER"), Given("methods.mine", "my_methods.ER")])
    check_methods_names(config, [Given(f"methods.{name}", path) for name, path in paths.items()])
    both = {"methods": {name: {"class_path": "cfl.methods.ER"} for name in names}}
    check_methods_names(both, [Given(f"methods.{name}", "ER") for name in names])


def test_a_plugin_works_beside_the_built_wheel(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a build leaves files in the folder of the source
    for name in ("cfl", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    toy_plugin.install(site)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = ["fit", "--config", str(TINY), "--run.dir", "run", *OPTIONS]
    done = subprocess.run(
        [sys.executable, "-m", "cfl", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "toy counts 4" in done.stdout
    code = f"import cfl; assert cfl.__file__.startswith({str(site)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


UNTYPED = """
from torch import nn
from cfl.methods import Method
from cfl.models.base import Network

class Net(Network):
    def __init__(self, input_shape, num_outputs, width):
        super().__init__(input_shape, num_outputs)
        self.body, self.head = nn.Linear(16, width), nn.Linear(width, num_outputs)

    def features(self, x):
        return self.body(x.flatten(1))

class Mine(Method):
    def __init__(self, width):
        self.width = width
"""


@pytest.mark.parametrize(("key", "kind"), [("model.network", "Net"), ("methods.mine", "Mine")])
def test_an_option_without_type_default_and_value_is_refused(
    key: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module("untyped_here", UNTYPED, tmp_path, monkeypatch)
    assert fit(tmp_path / "run", f"--{key}=untyped_here.{kind}") == 2
    said = (
        f"error: {key} = 'untyped_here.{kind}' cannot work; valid: a class whose options have types, as in width: float"
    )
    assert said in capfd.readouterr().err
    if key == "model.network":
        assert fit(tmp_path / "run", f"--{key}=untyped_here.{kind}", f"--{key}.width=3") == 0


@pytest.mark.parametrize(
    ("step", "said"),
    [("raise KeyError(share)", "KeyError: 2.0"), ("torch.zeros(-1)", "RuntimeError: zeros: Dimension")],
)
def test_an_error_of_an_own_class_while_it_is_made_names_its_key(
    step: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an error that a function of another package raises."""
    code = (
        "import torch\nfrom cfl.methods import Method\n\n"
        "class Mine(Method):\n    def __init__(self, share: float = 2.0) -> None:\n"
    )
    own_module("raises_here", f"{code}        {step}\n", tmp_path, monkeypatch)
    assert fit(tmp_path / "run", "--methods.mine=raises_here.Mine") == 2
    why = f"options with which it can be made; {said}"
    told = capfd.readouterr().err
    assert f"error: methods.mine = 'raises_here.Mine' cannot work; valid: {why}" in told
    assert "(raises_here.py, line 6)" in told
