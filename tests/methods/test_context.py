"""The context that methods get of a run, and that they reach the federation in no other way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from support.tiny import fit, permuted, tiny_client, tiny_data, unequal

import cfl.methods
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import BoundSchedule, RoundPlan, Schedule
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.federation.server import Server
from cfl.methods import Method
from cfl.methods.context import Context

FOLDER = Path(cfl.methods.__file__).parent
THEIR_OWN = ("context.py", "composition.py", "combinations.py", "member_names.py", "task_free.py")
METHODS = [path for path in FOLDER.rglob("*.py") if path.name not in THEIR_OWN]
BEHIND = (Federation, FederatedDataModule, BoundSchedule, Schedule, Server)


class Sees(Method):
    """A method with a buffer, so that its context has every part."""

    replays_logits: ClassVar[bool] = False

    def __init__(self, free: bool = False) -> None:
        self.task_free = free


def contexts() -> tuple[Context, Context]:
    """Contexts of a method that is told tasks and of a task-free method, after a run."""
    methods = {"sees": Sees(), "free": Sees(True)}
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    fit(tiny_client(data, methods=methods), data)
    return methods["sees"].context, methods["free"].context


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_no_method_asks_for_the_federation_or_what_is_behind_it(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"(?<!``)\b(context|federation)\.(data|schedule|server|federation|_\w+)\b", text)
    assert not re.search(r"\bself\.federation\b|\bdata\.schedule\.|\bimport Federation\b|FederatedDataModule", text)


def _public(of: Any) -> dict[str, Any]:
    """Public attributes of an object and its class that are no functions, by name.

    ``dir`` does not list what a view of an object shows of it.
    """
    names = [name for name in sorted({*dir(of), *getattr(of, "_SHOWN", ())}) if not name.startswith("_")]
    found = {}
    for name in names:
        try:
            found[name] = getattr(of, name)
        except Exception:
            continue  # hidden from the method, or not available at this time
    return {name: value for name, value in found.items() if not inspect.isroutine(value)}


@pytest.mark.parametrize("which", [0, 1], ids=["told tasks", "task-free"])
def test_nothing_public_leads_to_the_federation(which: int) -> None:
    """No chain of public attributes of the package's objects ends at the federation."""
    start = contexts()[which]
    seen, waiting = set[int](), [("context", start)]
    while waiting:
        way, of = waiting.pop()
        assert not isinstance(of, BEHIND), way
        if id(of) in seen:
            continue
        seen.add(id(of))
        if isinstance(of, dict):
            waiting += [(f"{way}[{key!r}]", value) for key, value in of.items()]
        elif isinstance(of, list | tuple | set | frozenset):
            waiting += [(f"{way}[...]", value) for value in of]
        elif type(of).__module__.partition(".")[0] in ("cfl", __name__.partition(".")[0]):
            waiting += [(f"{way}.{name}", value) for name, value in _public(of).items()]
    assert {id(part) for part in (start.network, start.channel, start.buffer, start.clients)} <= seen


def test_what_hides_is_found() -> None:
    """The search above sees a public attribute that holds the federation."""
    context, free = contexts()
    context.federation = context._federation  # type: ignore[attr-defined]
    assert isinstance(_public(context)["federation"], Federation)
    with mock.patch.object(type(free), "_SHOWN", type(free)._SHOWN | {"federation"}):
        free._behind.federation = context._federation
        assert isinstance(_public(free)["federation"], Federation)


def test_a_context_says_what_it_is_made_of() -> None:
    """Every attribute is in its docstring, every function has one."""
    context, _ = contexts()
    said = set(re.findall(r"^ {4,8}(\w+): ", Context.__doc__ or "", re.MULTILINE)) - {"federation"}
    assert said == {name for name in vars(context) if not name.startswith("_")}
    for name, value in vars(Context).items():
        assert name.startswith("_") or value.__doc__


def test_every_method_has_a_context_of_its_own() -> None:
    methods = {"one": Sees(), "other": Sees()}
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    fit(tiny_client(data, methods=methods), data)
    assert methods["one"].context is not methods["other"].context
    assert methods["one"].context.network is methods["other"].context.network
    assert list(methods["one"].context.methods) == ["one", "other"]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_messages_can_be_weighted_as_updates_are(weighting: str) -> None:
    """The mean of what a method sends with ``client_weighting``'s weights is the step of the global model."""

    class Sends(Method):
        task_free = True

        def start_clients(self, cohort: Cohort) -> None:
            self.before = {n: v.detach().clone() for n, v in cohort.global_parameters.items()}

        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            clients = [cohort.clients[p] for p in positions]
            by_samples = self.context.client_weighting == "samples"
            sent = cohort.rows(positions, {n: v.detach() - self.before[n] for n, v in cohort.parameters.items()})
            weights = [float(cohort.sizes[p]) if by_samples else 1.0 for p in positions]
            self.context.channel.uplink(self.name, sent, weights, clients)

        def end_round(self, plan: RoundPlan) -> None:
            now = self.context.state_tensors()
            for name, step in self.context.channel.mean(self.name).items():
                torch.testing.assert_close(now[name].detach() - self.before[name], step, rtol=0, atol=1e-6)

    data = unequal(3)
    fit(tiny_client(data, methods={"mine": Sends()}), data, {"client_weighting": weighting})
