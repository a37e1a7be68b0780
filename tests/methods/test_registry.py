"""Properties of every method, for example that it changes training, and that neutral options change nothing.

Every method belongs into ``ENTRIES``. A test fails if one is missing.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from support.local_work import counted_steps
from support.tiny import NetworkFactory, mlp, norm_net, prompted_net
from torch import Tensor

import cfl.methods
from cfl.data.scenarios import Scenario
from cfl.data.schedule import BoundSchedule
from cfl.data.sources import Synthetic
from cfl.methods import Method
from cfl.methods.context import Context
from cfl.models import ACGAN
from cfl.runtime.errors import ConfigError
from cfl.testing import PROPERTIES
from cfl.testing.comparing import difference, distance
from cfl.testing.method_case import MethodCase
from cfl.testing.method_declarations import scenario_is_as_declared
from cfl.testing.method_numbers import blocks_agree, devices_agree
from cfl.testing.processes import Crew, processes_do_not_matter

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "methods"
DATA_PAGE = CONFIGS.parents[1] / "docs" / "data.md"


@dataclass(frozen=True)
class Entry:
    """Settings of a method for the generic tests.

    Attributes:
        active: options with which two tasks must give another model than federated averaging.
        config: its file in ``configs/methods``.
        neutral: options under which it is federated averaging, bit for bit, or None if there are none.
        plain_in_first_task: whether it is federated averaging, bit for bit, until the first task is over.
        network: the network of its runs.
        data: options of the data that it needs.
        rounds: number of rounds of each task.
        device_tolerance: see :class:`MethodCase`.
        process_tolerance: greatest difference between results of one process and of two.
    """

    active: Mapping[str, Any]
    config: str
    neutral: Mapping[str, Any] | None = None
    plain_in_first_task: bool = True
    network: NetworkFactory = norm_net
    data: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 2
    device_tolerance: float = 1e-6
    process_tolerance: float = 1e-8

    def case(self, method: type[Method]) -> MethodCase:
        """The method as a case for the checks of ``cfl.testing``."""
        layers = {"layers": ["layers.*"]} if "layers" in self.active else {}
        return MethodCase(
            partial(method, **self.active),
            reduces_to_fedavg=None if self.neutral is None else partial(method, **self.neutral),
            network=self.network,
            data=self.data,
            rounds=self.rounds,
            for_densities=partial(method, **{**self.active, **layers}),
            fedavg_in_first_task=self.plain_in_first_task,
            device_tolerance=self.device_tolerance,
        )


adversarial_net = partial(ACGAN, classifier=norm_net, widths=[6], noise_dim=4)

ENTRIES: dict[str, Entry] = {
    "AGEM": Entry(active={"batch_size": 8}, config="agem.yaml", plain_in_first_task=False),
    "AnalyticHead": Entry(active={"ridge": 0.5}, config="analytic-head.yaml"),
    "APD": Entry(active={"consolidation": 1.0}, config="apd.yaml", plain_in_first_task=False),
    "CFeD": Entry(
        active={"surrogate": Synthetic(3, [1, 4, 4], 40, 3)},
        config="cfed.yaml",
        neutral={"surrogate": Synthetic(3, [1, 4, 4], 40, 3), "share": 0.0},
    ),
    "CONFEDMADE": Entry(
        active={"consolidation": 1.0, "cut_off": 0.4}, config="confedmade.yaml", plain_in_first_task=False
    ),
    "DER": Entry(
        active={"batch_size": 4}, config="der.yaml", neutral={"alpha": 0.0, "beta": 0.0}, plain_in_first_task=False
    ),
    "DPFedAvg": Entry(
        active={"clip": 0.2, "noise_multiplier": 0.1, "quantile": 0.5, "per_layer": True},
        config="dp-fedavg.yaml",
        neutral={"clip": 1e9, "noise_multiplier": 0.0},
        plain_in_first_task=False,
        network=mlp,  # BatchNorm's running statistics would have no noise
    ),
    "ICaRL": Entry(active={"size": 8}, config="icarl.yaml", plain_in_first_task=False),
    "FedAGEM": Entry(active={"samples": 8, "when": "always"}, config="fed-agem.yaml", plain_in_first_task=False),
    "ER": Entry(active={"size": 2}, config="er.yaml", neutral={"weight": 0.0}),
    "GLFC": Entry(
        active={"size": 8, "threshold": 0.05, "perturbation_steps": 2, "inversion_steps": 2, "images": 1},
        config="glfc.yaml",
        plain_in_first_task=False,
        device_tolerance=1e-2,  # L-BFGS in float32 amplifies rounding
        process_tolerance=1e-3,
    ),
    "GradientCompensation": Entry(active={"size": 2}, config="gradient-compensation.yaml", neutral={"weight": 0.0}),
    "SingleTask": Entry(active={}, config="single-task.yaml"),
    "GPM": Entry(active={"threshold": 0.9}, config="gpm.yaml", neutral={"layers": []}),
    "RGO": Entry(
        active={"share": 1.0, "feature_encoding": False},
        config="rgo.yaml",
        neutral={"share": 0.0, "feature_encoding": False},
    ),
    "L2P": Entry(
        active={"strength": 5.0},
        config="l2p.yaml",
        neutral={"strength": 0.0, "mask_logits": False},
        plain_in_first_task=False,
        network=prompted_net,
    ),
    "LearningRateDecay": Entry(
        active={"factor": 10.0, "patience": 1, "threshold": 0.9},
        config="learning-rate-decay.yaml",
        neutral={"factor": 1.0},
        plain_in_first_task=False,
        data={"validation": 0.25},
        rounds=3,
    ),
    "EWC": Entry(active={"strength": 20.0}, config="ewc.yaml", neutral={"strength": 0.0}),
    # No setting is neutral: its critic always learns from generated images. tests/methods/test_fedcil.py compares it,
    # without replay and consolidation, with federated averaging of its own loss.
    "FedCIL": Entry(
        active={"consolidation_steps": 2},
        config="fedcil.yaml",
        plain_in_first_task=False,
        network=adversarial_net,
    ),
    "FedCurv": Entry(
        active={"strength": 5.0}, config="fedcurv.yaml", neutral={"strength": 0.0}, plain_in_first_task=False
    ),
    "FedProx": Entry(active={"mu": 1.0}, config="fedprox.yaml", neutral={"mu": 0.0}, plain_in_first_task=False),
    "FedWeIT": Entry(active={"consolidation": 1.0, "keep": 0.6}, config="fedweit.yaml", plain_in_first_task=False),
    "SCAFFOLD": Entry(active={}, config="scaffold.yaml", plain_in_first_task=False),
    "FOT": Entry(active={"threshold": 0.9}, config="fot.yaml", neutral={"layers": []}),
    "InferringFOT": Entry(
        active={"threshold": 0.9},
        config="inferring-fot.yaml",
        process_tolerance=1e-5,  # messages are float32, added up in another order
    ),
    "PersonalLayers": Entry(
        active={"layers": ["head.*"]}, config="local.yaml", neutral={"layers": []}, plain_in_first_task=False
    ),
}


WATCHING = {"FoundBoundaries"}
"""Methods that change no training themselves, with tests of their own."""


def concrete_methods() -> dict[str, type[Method]]:
    """Every method that the package defines, by class name."""
    for module in pkgutil.walk_packages(cfl.methods.__path__, "cfl.methods."):
        importlib.import_module(module.name)

    def below(parent: type[Method]) -> Iterator[type[Method]]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    own = (m for m in below(Method) if m.__module__.startswith("cfl.methods.") and not inspect.isabstract(m))
    return {method.__name__: method for method in own if not method.__name__.startswith("_")}


METHODS = {name: method for name, method in concrete_methods().items() if name in ENTRIES}
each_method = pytest.mark.parametrize("name", METHODS)


CASES = {name: ENTRIES[name].case(method) for name, method in METHODS.items()}


def test_every_method_is_known_here_and_by_its_short_name() -> None:
    found = concrete_methods()
    unknown = sorted(set(found) - set(ENTRIES) - WATCHING)
    assert not unknown, f"add {unknown} to ENTRIES in {__file__}: what it is, and where it must equal FedAvg"
    gone = sorted(set(ENTRIES) - set(found))
    assert not gone, f"ENTRIES has {gone}, which no module of cfl.methods defines"
    hidden = sorted(name for name in found if name not in cfl.methods.__all__)
    assert not hidden, f"import {hidden} in cfl/methods/__init__.py, or configs cannot name it without its module"


@each_method
@pytest.mark.parametrize("prop", [name for name in PROPERTIES if name != "scenarios"])
def test_what_holds_for_every_method(name: str, prop: str) -> None:
    """Width, engines, resuming, effect, reduction, declarations, reports, ...: :func:`cfl.testing.check_method`."""
    PROPERTIES[prop](CASES[name])


@each_method
def test_two_processes_compute_what_one_does(name: str, crew: Crew) -> None:
    case = CASES[name]
    processes_do_not_matter(replace(case, tolerance=ENTRIES[name].process_tolerance), crew=crew)


@each_method
def test_blocks_of_local_steps_change_no_bit(name: str) -> None:
    blocks_agree(CASES[name])


@each_method
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_computes_the_same_on_a_gpu(name: str) -> None:
    devices_agree(CASES[name])


@each_method
def test_clients_without_samples_of_a_task_stay_away(name: str) -> None:
    """Each task is missing at some client. The model still differs from that of federated averaging."""
    case = CASES[name]
    data = case.data_of(3, shares="missing")
    assert all(len(members) < data.num_clients for members in data.members)
    if name != "LearningRateDecay":  # the losses it watches fall all the time here
        found, plain = (case.run(which, tasks=3, shares="missing").models[-1] for which in ("tried", "fedavg"))
        assert distance(found, plain) > 1e-4


@each_method
def test_rounds_that_no_client_joins_close(name: str) -> None:
    """The third and the fourth of five rounds of the first task have no client."""
    case = CASES[name]
    schedule = {"sampling": "poisson", "clients_per_round": 0.3, "rounds_per_task": 5}
    data = case.data_of(num_clients=4, schedule=schedule)
    assert [bool(data.rounds.round(r).clients) for r in range(5)] == [True, True, False, False, True]
    assert case.start(data, case.methods("tried")).finished


# Their server gets what a task has learned only from the clients of its last round.
IN_THE_LAST_ROUND = {"FedWeIT", "CONFEDMADE"}


@each_method
def test_a_task_may_end_without_clients_unless_they_are_asked_for_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method without an extra round after a task accepts a last round without clients."""
    case, asked, plain = CASES[name], set[int](), Context.extra_round

    def extra_round(self: Context, task: int, clients: Sequence[int]) -> list[int]:
        asked.add(task)
        return plain(self, task, clients)

    monkeypatch.setattr(Context, "extra_round", extra_round)
    case.run("tried", tasks=2)
    schedule = {"sampling": "poisson", "clients_per_round": 0.3, "rounds_per_task": 3}
    data = case.data_of(num_clients=4, schedule=schedule)
    assert [bool(data.rounds.round(number).clients) for number in range(3)] == [True, True, False]
    if asked or name in IN_THE_LAST_ROUND:
        with pytest.raises(ConfigError, match=r"schedule\.sampling.*nobody joins round 2, the last of task 0"):
            case.start(data, case.methods("tried"))
    else:
        assert case.start(data, case.methods("tried")).finished


class Kept(Callback):
    """Records what clients keep after every round: topic -> client -> tensors."""

    def __init__(self) -> None:
        self.after: list[dict[str, dict[int, Any]]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        states = pl_module.require_federation().clients
        topics = sorted(states.state_dict())
        self.after.append({t: {c: copy.deepcopy(states.get(t, c)) for c in states.holders(t)} for t in topics})


# Their clients choose samples after a task without the server, also if no round has sampled them.
BY_THEMSELVES = {"ER", "GradientCompensation"}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_THEMSELVES])
def test_a_client_that_drops_out_keeps_what_it_had(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client drops out of a task's last round, and with it of an extra round that follows."""
    case, kept = CASES[name], Kept()
    last = case.rounds - 1
    monkeypatch.setattr(BoundSchedule, "dropouts", lambda self, number: frozenset([1] if number == last else []))
    data = case.data_of(schedule={"client_dropout": 0.5, "clients_per_round": 5})
    case.start(data, case.methods("tried"), callbacks=[kept])
    before, after = kept.after[last - 1], kept.after[last]
    for topic, held in after.items():
        assert difference(held.get(1), before.get(topic, {}).get(1), place=topic) is None


# Each of two would do its own share, or do nothing more.
MAY_BE_TWICE = {"AnalyticHead", "CFeD", "DER", "ER", "FedProx", "FOT", "GradientCompensation", "InferringFOT"}
MAY_BE_TWICE |= {"PersonalLayers"}


@each_method
def test_two_of_it_are_refused_unless_they_can_work(name: str) -> None:
    case = CASES[name]
    run = partial(case.start, case.data_of(), {"a": case.make(), "b": case.make()})
    if name in MAY_BE_TWICE:
        assert run().finished
        return
    with pytest.raises(ConfigError, match=rf"^methods = .*({name}|'a', 'b')") as caught:
        run()
    assert caught.value.valid


@pytest.mark.parametrize("name", [name for name in METHODS if ENTRIES[name].neutral is not None])
def test_neutral_options_change_no_bit_of_what_workers_compute(name: str) -> None:
    """Workers choose their steps by what methods leave to them. The other engine is one of the properties above."""
    case = CASES[name]
    for network in {case.network, *([mlp] if case.network is norm_net else [])}:
        found, plain = (case.run(which, engine="workers", network=network) for which in ("neutral", "fedavg"))
        assert difference(found.models, plain.models) is None


# Checkpoints


def without_times(state: Any) -> Any:
    """State in a form that compares bit for bit, without wall-clock seconds."""
    if isinstance(state, Tensor):
        return state.dtype, state.shape, state.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(state, Mapping):
        return {str(key): without_times(value) for key, value in state.items() if "seconds" not in str(key)}
    if isinstance(state, list | tuple):
        return [without_times(value) for value in state]
    return repr(state)


MODEL = "dict[str, Tensor]"
RECORD = "{task: int, client: int, layer: str, adaptive_share: float, mean_gate: float"
APD_STATE = {
    "initial": ("_initial", MODEL),
    "rows": ("_rows", f"list[{RECORD}}}]"),
    "client_bytes": ("_client_bytes", "dict[int, int]"),
}
FEDWEIT_STATE = APD_STATE | {
    "rows": ("_rows", f"list[{RECORD}, sources: str, source_tasks: str, attention: str}}]"),
    "sent": ("_sent", MODEL),
    "knowledge": (
        "_knowledge",
        # Whole rows, because they are smaller here than rows, columns and values of entries.
        "list[{task: int, round: int, clients: list[int], bytes: list[int], "
        "layers: dict[str, {row: None, column: None, values: Tensor, size: int}]}]",
    ),
    "bytes": ("_bytes", "list[list[int]]"),
}
FOT_STATE = {
    "bases": ("bases", MODEL),
    "importance": ("importance", "dict"),
    "gpse_seconds": ("gpse_seconds", "list[float]"),
    "rows": (
        "_rows",
        "list[{task: int, layer: str, input_dim: int, basis_size: int, added: int, used_space: float, "
        "residual_share: float, threshold: float, sketch_bytes: int, basis_bytes: int, gpse_seconds: float}]",
    ),
}
STATES: dict[str, dict[str, tuple[str, str]]] = {
    "APD": APD_STATE,
    "AnalyticHead": {
        "gram": ("gram", "Tensor"),
        "class_sums": ("class_sums", "Tensor"),
        "weight": ("weight", "Tensor"),
        "statistics": ("_statistics", MODEL),
    },
    "CFeD": {
        "old": ("_old.tensors", MODEL),
        "received": ("_old.holders", "list[int]"),
        "seconds": ("server_seconds", "float"),
        "surrogate": ("_surrogate_digest", "str"),
    },
    "CONFEDMADE": FEDWEIT_STATE,
    "DPFedAvg": {"clips": ("clips", "Tensor"), "rows": ("_rows", "list[{round: int, clip: float, within: float}]")},
    "EWC": {
        "rows": (
            "_rows",
            "list[{task: int, clients: int, fisher_mean: float, fisher_max: float, fisher_seconds: float}]",
        ),
    },
    "FOT": FOT_STATE,
    "FedAGEM": {
        "reference": ("reference", MODEL),
        "have": ("_have", "list[int]"),
        "seconds": ("seconds", "float"),
        "steps": ("_steps", "int"),
        "refined": ("_refined", "int"),
    },
    "FedCIL": {
        "replay": ("_replay", MODEL),
        "receivers": ("_receivers", "list"),
    },
    "FedCurv": {
        "u": ("u", MODEL),
        "v": ("v", MODEL),
        "of_round": ("_of_round", "int"),
        "penalty_bytes": ("_penalty_bytes", "int"),
        "rows": (
            "_rows",
            "list[{round: int, clients: int, u_mean: float, u_max: float, greatest_pull: float, "
            "fisher_seconds: float}]",
        ),
    },
    "FedWeIT": FEDWEIT_STATE,
    "GLFC": {
        "proxy": (
            "proxy",
            "{images: Tensor, labels: Tensor, classes: Tensor, version: int, "
            "slots: list[None | {tensors: dict[str, Tensor], classes: Tensor, accuracy: float, version: int}]}",
        ),
        "rows": ("_rows", "list[dict[str, int]]"),
        "seconds": ("seconds", "float"),
    },
    "GPM": {
        "rows": (
            "_rows",
            "list[{task: int, layer: str, input_dim: int, clients: int, basis_size: float, smallest_basis: int, "
            "largest_basis: int, added: float, used_space: float, residual_share: float, threshold: float, "
            "memory_bytes: float}]",
        ),
        "memory_seconds": ("memory_seconds", "float"),
        "most_bytes": ("_most_bytes", "int"),
    },
    "ICaRL": {
        "means": ("means", "Tensor"),
        "known": ("known", "Tensor"),
        "old": ("_old.tensors", MODEL),
        "received": ("_old.holders", "list[int]"),
    },
    "InferringFOT": FOT_STATE
    | {
        "task_bases": ("task_bases", MODEL),
        "identified.sums": ("identified.sums", "Tensor"),
        "identified.counts": ("identified.counts", "Tensor"),
    },
    "LearningRateDecay": {
        "rows": ("_rows", "list[{task: int, clients: int, stopped: int, mean_rate: float, validation_loss: float}]")
    },
    "RGO": {
        "rows": (
            "_rows",
            "list[{task: int, layer: str, input_dim: int, clients: int, curvature: float, free_space: float}]",
        ),
        "memory_seconds": ("memory_seconds", "float"),
    },
    "SCAFFOLD": {"variate": ("variate", MODEL)},
    "SingleTask": {"initial": ("_initial", MODEL)},
}
"""A method's state in checkpoints: key -> the attribute that it restores, and its form in the file.

Users keep checkpoints of these forms, so a changed form needs code that still reads the earlier one.
"""


def form(value: Any) -> str:
    """Types of a value and of its elements. A dict whose values have several types is given with its keys, in order."""
    if type(value) is dict and value:
        held = {form(element) for element in value.values()}
        if (len(held) > 1 and held != {"Tensor"}) or "row" in value:
            return "{" + ", ".join(f"{key}: {form(element)}" for key, element in value.items()) + "}"
        return f"dict[{' | '.join({type(key).__name__ for key in value})}, {held.pop()}]"
    if type(value) is list and value:
        return f"list[{' | '.join(sorted({form(element) for element in value}))}]"
    return "None" if value is None else type(value).__name__


def contents(value: Any) -> Any:
    """An attribute in a form that compares: objects of the package as what they hold, sets as lists."""
    if isinstance(value, Mapping):
        return {key: contents(element) for key, element in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value).__name__, [contents(x) for x in (sorted(value) if isinstance(value, set) else value)]
    if type(value).__module__.startswith("cfl."):
        return type(value).__name__, contents(vars(value))
    return value


@each_method
def test_checkpoints_have_the_form_they_had(name: str) -> None:
    method = CASES[name].run(tasks=3).method
    assert method is not None
    state = method.state_dict()
    assert [(key, form(value)) for key, value in state.items()] == [
        (key, of_file) for key, (_, of_file) in STATES.get(name, {}).items()
    ]


@each_method
def test_its_attributes_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    method = CASES[name].run(tasks=3).method
    assert method is not None
    torch.save(method.state_dict(), tmp_path / "state.pt")
    other = METHODS[name](**ENTRIES[name].active)
    other.setup(method.context)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for attribute, _ in STATES.get(name, {}).values():
        found, expected = attrgetter(attribute)(other), attrgetter(attribute)(method)
        assert type(found) is type(expected)
        assert without_times({attribute: contents(found)}) == without_times({attribute: contents(expected)})
    if name == "ICaRL":
        assert other._complete  # type: ignore[attr-defined]  # computed anew from the restored state


# Reports and declarations


@each_method
@pytest.mark.parametrize("scenario", get_args(Scenario))
def test_its_scenarios_are_those_it_declares(name: str, scenario: Scenario) -> None:
    if scenario == "detection":
        pytest.importorskip("pycocotools")
    scenario_is_as_declared(CASES[name], scenario)


# LearningRateDecay's ``end_task`` only adds a row to its report.
LOOK_BACK = sorted(n for n in ENTRIES if METHODS[n].end_task is not Method.end_task and n != "LearningRateDecay")


@pytest.mark.parametrize("name", [*LOOK_BACK, "CFeD", "SingleTask"])
def test_who_looks_back_refuses_training_in_which_no_task_ends(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ConfigError) as caught:
        case.start(case.data_of(exposure="joint"), case.methods("tried"))
    assert (caught.value.key, caught.value.value) == ("data.exposure", "joint")


# Configs


def methods_of(path: Path) -> dict[str, Method]:
    """The methods that a config file makes. The file may also name the network that they need."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--methods", type=dict[str, Method])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer releases of jsonargparse rename the method
        given = parser.parse_object({"methods": yaml.safe_load(path.read_text())["methods"]})
        methods: dict[str, Method] = parser.instantiate_classes(given).methods
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
    assert all(type(method).__name__ in ENTRIES for method in named.values())


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


def test_the_documents_have_all_configs_of_methods() -> None:
    assert sorted(name for name, _ in documented()) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def setting(name: str) -> tuple[Any, ...]:
    """Everything that decides an entry's runs except the method. Entries with equal settings share plain runs."""
    entry, case = ENTRIES[name], CASES[name]
    return entry.network, type(case.tasks(2)), case.of_scenario(), entry.rounds, tuple(entry.data.items())


_PLAIN_WORK: dict[tuple[Any, ...], tuple[int, bool]] = {}


def plain_work(name: str) -> tuple[int, bool]:
    """:func:`local_work` of federated averaging, computed once for all entries with the same setting."""
    if setting(name) not in _PLAIN_WORK:
        _PLAIN_WORK[setting(name)] = local_work(name, None)
    return _PLAIN_WORK[setting(name)]


def local_work(name: str, options: Mapping[str, Any] | None) -> tuple[int, bool]:
    """The work of local steps of two tasks, and whether the run declares more than that of federated averaging."""
    data = CASES[name].data_of(schedule={"rounds_per_task": max(1, ENTRIES[name].rounds - 1)})
    methods = {} if options is None else {"tried": METHODS[name](**options)}
    with counted_steps() as work:
        federation = CASES[name].start(data, methods)
    return work.elements, federation.computes_more_locally


ALSO_COUNTED: dict[str, list[dict[str, Any]]] = {
    "ER": [{"size": 2, "per_task": False, "update": "step", "weight": 0.0}],
    "GradientCompensation": [{"size": 2, "weight": 0.0, "loss": "bce"}],
    "RGO": [{"share": 0.0}],
    "FOT": [{"threshold": 0.9, "protect_bias": True, "gpse_model": "local"}],
}
"""Other options with which a declaration could be wrong."""


@each_method
def test_what_it_makes_clients_compute_is_declared(name: str) -> None:
    """A method declares extra computation in local steps exactly if the counted operations show it."""
    entry = ENTRIES[name]
    plain, more = plain_work(name)
    assert not more
    neutral = [] if entry.neutral is None else [entry.neutral]
    for options in (entry.active, *neutral, *ALSO_COUNTED.get(name, [])):
        found, declared = local_work(name, options)
        assert declared == (found > plain), options
