"""The page "Writing a method": its code, run as printed, and its tables against the package."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support import tiny_cli
from support.tiny import double, fit, mlp, tiny_client, tiny_data, weights
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import cfl.methods
from cfl.data.cohorts import CohortBatch
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.replay_buffer import Replayed
from cfl.methods import DER, FedProx, Method, capabilities
from cfl.models.functional import call_with
from cfl.testing import PROPERTIES, check_method

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-method.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
FILES = {"my_methods": "class Mine", "my_checks": "def test_mine", "sparse": "class Sparse", "habit": "class Habit"}
FILES |= {"anchor": "class Anchor", "rehearsal": "class Rehearsal", "reminder": "class Reminder", "near": "class Near"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with every block of code as a module."""
    where = tmp_path_factory.mktemp("page")
    assert len(PYTHON) == len(FILES)
    for name, mark in FILES.items():
        (code,) = (block for block in PYTHON if mark in block)
        (where / f"{name}.py").write_text(code)
    (where / "mine.yaml").write_text(YAML[0])
    sys.path.insert(0, str(where))
    yield where
    sys.path.remove(str(where))
    for name in FILES:
        sys.modules.pop(name, None)


def test_the_printed_check_passes(folder: Path) -> None:
    importlib.import_module("my_checks").test_mine()


def test_the_printed_method_is_fedprox_to_the_bit(folder: Path) -> None:
    mine = importlib.import_module("my_methods").Mine
    for engine in (EngineOptions("vmap"), EngineOptions("workers", 1, stack=1)):
        runs = []
        for kind in (mine, FedProx):
            data = tiny_data()
            client = tiny_client(data, mlp, methods={"prox": kind(0.5)}, engine=engine)
            runs.append(weights(fit(client, data)))
        assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


def test_the_printed_configuration_and_command_run_it(folder: Path, tmp_path: Path) -> None:
    command = re.search(r"cfl fit (--methods\.mine \S+ --methods\.mine\.mu [\d.]+)`", PAGE)
    assert command is not None
    ways = {
        "yaml": ["--config", str(folder / "mine.yaml")],
        "command": command[1].split(),
        "builtin": ["--methods.mine", "FedProx", "--methods.mine.mu", "0.1"],
    }
    models = []
    for name, options in ways.items():
        assert tiny_cli.fit(tmp_path / name, *options) == 0
        models.append(tiny_cli.checkpoint(tmp_path / name)["state_dict"])
    for model in models[:2]:
        assert all(torch.equal(model[name], value) for name, value in models[2].items())


@pytest.mark.parametrize(
    ("name", "kind", "options", "plain_first"),
    [
        ("sparse", "Sparse", {"strength": 0.02}, False),
        ("habit", "Habit", {}, False),
        ("anchor", "Anchor", {}, True),
        ("rehearsal", "Rehearsal", {"count": 8}, False),
        ("reminder", "Reminder", {"count": 8}, False),
        ("near", "Near", {"strength": 0.5}, False),
    ],
)
def test_the_other_methods_of_the_page_pass_the_check(
    folder: Path, name: str, kind: str, options: dict[str, float], plain_first: bool
) -> None:
    check_method(partial(getattr(importlib.import_module(name), kind), **options), fedavg_in_first_task=plain_first)


def test_the_printed_penalty_is_that_of_l1(folder: Path) -> None:
    """The penalty adds ``strength * sign(w)`` to the gradients."""

    class Plain(Method):
        def adjust_gradients(self, cohort: Cohort) -> None:
            for name, gradient in cohort.gradients.items():
                gradient += 0.02 * cohort.parameters[name].detach().sign()

    sparse = importlib.import_module("sparse").Sparse
    ways: list[dict[str, Method]] = [{"sparse": sparse(0.02)}, {"plain": Plain()}, {}]
    runs = [fit(tiny_client(tiny_data(), double(mlp), methods=methods), tiny_data()) for methods in ways]
    found, by_hand, without = map(weights, runs)
    for name, value in found.items():
        torch.testing.assert_close(value, by_hand[name], rtol=0, atol=1e-12)
        assert float((value - without[name]).abs().max()) > 1e-3


def test_the_printed_replay_is_that_of_der_with_labels_alone(folder: Path) -> None:
    """The printed replay trains as DER with labels alone, if its name makes it draw the same samples."""
    rehearsal = importlib.import_module("rehearsal").Rehearsal
    ways: list[dict[str, Method]] = [{"er labels": rehearsal(8, 0.5)}, {"er": DER(0.0, 0.5, 8)}, {}]
    found, expected, without = (weights(fit(tiny_client(tiny_data(), mlp, methods=one), tiny_data())) for one in ways)
    for name, value in found.items():
        assert torch.equal(value, expected[name])
        assert not torch.equal(value, without[name])


def test_the_printed_gradient_on_other_samples_is_that_of_replay(folder: Path) -> None:
    """A gradient of the buffer's samples, added to the step's, is that of a loss with these samples."""
    kinds = [getattr(importlib.import_module(name), name.capitalize()) for name in ("reminder", "rehearsal")]
    ways: list[dict[str, Method]] = [{"same": kind(8, 0.5)} for kind in kinds]
    found, expected, without = (
        weights(fit(tiny_client(tiny_data(), double(mlp), methods=one), tiny_data())) for one in (*ways, {})
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        assert float((value - without[name]).abs().max()) > 1e-3


def test_the_printed_term_of_features_is_that_of_autograd(folder: Path) -> None:
    """The term adds the gradient of the features' mean squared distance, computed client by client."""

    class Plain(Method):
        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            self.batch = batch
            return batch

        def adjust_gradients(self, cohort: Cohort) -> None:
            network = self.context.network
            for row in range(len(cohort.clients)):
                model = {name: value[row].detach().requires_grad_() for name, value in cohort.parameters.items()}
                x = self.batch.x[row][self.batch.mask[row]]
                with torch.enable_grad():
                    now = call_with(network, model, network.features, x)
                    before = call_with(network, cohort.global_parameters, network.features, x)
                    term = 0.5 * (now - before.detach()).square().sum(1).mean()
                found = torch.autograd.grad(term, list(model.values()), allow_unused=True)
                for name, gradient in zip(model, found, strict=True):
                    if gradient is not None:
                        cohort.gradients[name][row] += gradient

    ways: list[dict[str, Method]] = [{"near": importlib.import_module("near").Near(0.5)}, {"near": Plain()}, {}]
    runs = [fit(tiny_client(tiny_data(), double(mlp), methods=methods), tiny_data()) for methods in ways]
    found, by_hand, without = map(weights, runs)
    for name, value in found.items():
        torch.testing.assert_close(value, by_hand[name], rtol=0, atol=1e-12)
        assert float((value - without[name]).abs().max()) > 1e-4


def test_the_named_ways_to_a_batch_for_gradients_agree() -> None:
    """A part of the step's samples, the same samples as tensors of a method's own, and autograd."""
    compared: list[int] = []

    class Looks(Method):
        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            mask = batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0)
            own = Replayed(batch.x, batch.y, batch.task_ids, mask, None, True).as_step_of(batch)
            ways = [replace(batch, mask=mask, padded=True), own]
            first, second = ({n: g.clone() for n, g in cohort.gradients_on(way, "look").items()} for way in ways)
            for row in range(len(cohort.clients)):
                used = mask[row]
                model = {
                    name: value[row].detach().clone().requires_grad_() for name, value in cohort.parameters.items()
                }
                with torch.enable_grad():
                    logits = functional_call(self.context.network, model, (batch.x[row][used],))
                    loss = cross_entropy(logits, batch.y[row][used])
                for name, value in zip(model, torch.autograd.grad(loss, list(model.values())), strict=True):
                    torch.testing.assert_close(first[name][row], value, rtol=0, atol=1e-12)
                    torch.testing.assert_close(second[name][row], value, rtol=0, atol=1e-12)
                compared.append(row)
            return batch

    data = tiny_data()
    fit(tiny_client(data, double(mlp), methods={"looks": Looks()}), data)
    assert len(compared) > 10


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose first heading is ``first``."""
    lines = PAGE[PAGE.index(f"| {first} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_capabilities_is_complete_and_true() -> None:
    protocols = {
        name: kind
        for name, kind in vars(capabilities).items()
        if inspect.isclass(kind) and getattr(kind, "_is_protocol", False) and kind.__module__ == capabilities.__name__
    }
    table = {row[0].strip("`"): row for row in rows("capability")}
    assert set(table) == set(protocols)
    for name, (_, members, _, built_in) in table.items():
        declared = set(capabilities.members(protocols[name]))
        assert set(re.findall(r"`(\w+)`", members)) == declared, name
        for method in [] if built_in == "none" else built_in.split(", "):
            assert capabilities.has(getattr(cfl.methods, method), protocols[name]), (name, method)


def test_the_table_of_declarations_is_true() -> None:
    for name, default, _ in rows("attribute"):
        value = getattr(Method, name.strip("`"))
        shown = ", ".join(part for part in ("task", "class", "domain") if part in value) if default[0] != "`" else None
        assert default in (shown, f"`{value}`", f"`{value}` (any)"), name


def test_the_table_of_moments_is_complete() -> None:
    """The table has every function that a run calls, with its parameters."""
    named = [re.fullmatch(r"`(\w+)\((.*)\)`", row[0]) for row in rows("moment")]
    printed = {match[1]: match[2] for match in named if match is not None}
    text = inspect.getsource(Method)
    moments = re.findall(r"def (\w+)\(self, (?=context|optimizer|plan|cohort)", text.partition("# For its own")[0])
    assert set(printed) == set(moments)
    for name, parameters in printed.items():
        assert ", ".join(list(inspect.signature(getattr(Method, name)).parameters)[1:]) == parameters


def test_the_checks_docstring_names_all_properties() -> None:
    text = inspect.getdoc(check_method) or ""
    assert [name for name in PROPERTIES if f"``{name}``" not in text] == []
