"""Properties of every method, for example that it changes training, and that neutral options change nothing.

Every method belongs into ``ENTRIES``. A test fails if one is missing.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import Callback
from support.local_work import counted_steps
from support.tiny import NetworkFactory, Poison, mlp, norm_net, prompted_net

import cfl.methods
from cfl.data.datamodule import FederatedDataModule
from cfl.data.scenarios import Scenario
from cfl.data.schedule import BoundSchedule
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Synthetic
from cfl.methods import L2P, Method
from cfl.methods.context import Context
from cfl.models import ACGAN, MADE
from cfl.runtime.errors import ConfigError
from cfl.testing import PROPERTIES
from cfl.testing.comparing import difference, distance
from cfl.testing.method_case import MethodCase
from cfl.testing.method_declarations import scenario_is_as_declared
from cfl.testing.method_numbers import engines_agree, require_equal, width_does_not_matter
from cfl.testing.processes import Crew, processes_do_not_matter
from cfl.testing.tiny_data import brightness, split
from cfl.testing.tiny_networks import double
from cfl.testing.tiny_runs import OneStepAtATime, SaveRounds, everything, fit, tiny_client
from cfl.training.client import Client


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
        device_tolerance: greatest difference in float64 between a GPU and the CPU, which add up in other orders.
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
    "MaskedWeights": Entry(
        active={},
        config="masked-weights.yaml",
        plain_in_first_task=False,
        network=partial(MADE, hidden=[8], synchronised=False, mask_seed=1),
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
def test_its_page_says_what_it_sends_and_where_it_works(name: str) -> None:
    """Class docstrings become the pages of the methods."""
    said = " ".join((METHODS[name].__doc__ or "").split())
    assert "Sends" in said
    assert re.search(r"(storage|memory)( and compute)? (per client|as for)", said, re.IGNORECASE)
    assert "Scenarios" in said
    assert "Raises: ConfigError: " in said


@each_method
@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_blocks_of_local_steps_change_no_bit(name: str, engine: str) -> None:
    case = CASES[name]
    found, expected = (case.run(engine=engine, shares="unequal", one_by_one=one) for one in (False, True))
    require_equal(case, "blocks", "when Lightning runs single steps", expected, found, 0.0)


@each_method
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_computes_the_same_on_a_gpu(name: str) -> None:
    case = CASES[name]
    expected = case.run(in_double=True, shares="unequal")
    found = case.run(in_double=True, shares="unequal", accelerator="gpu")
    require_equal(case, "devices", "on a GPU instead of the CPU", found, expected, ENTRIES[name].device_tolerance)


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
    case.start(case.data_of(), case.methods("tried"))  # not ``run``, whose result may be of an earlier test
    schedule = {"sampling": "poisson", "clients_per_round": 0.3, "rounds_per_task": 3}
    data = case.data_of(num_clients=4, schedule=schedule)
    assert [bool(data.rounds.round(number).clients) for number in range(3)] == [True, True, False]
    if asked or name in IN_THE_LAST_ROUND:
        with pytest.raises(ConfigError, match=r"schedule\.sampling.*nobody joins round 2, the last of task 0"):
            case.start(data, case.methods("tried"))
    else:
        assert case.start(data, case.methods("tried")).finished


class FailsWithin(Callback):
    """Raises in a round, when its second cohort has sent its messages."""

    def __init__(self, round: int) -> None:
        self.round, self.closed = round, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.round and batch.closes:
            self.closed += 1
            if self.closed == 2:
                raise InterruptedError


def goes_on_with_the_same_client(name: str, folder: Path, federated: Mapping[str, Any] | None = None) -> None:
    """Compare a run that fails in the second round of the second task, and goes on, with one that does not fail."""
    case = CASES[name]
    done = case.rounds + 1
    start = partial(fit, federated=federated)

    def client(data: FederatedDataModule) -> Client:
        return tiny_client(data, double(case.network), case.optimizer, case.methods("tried"))

    plain = case.data_of(width=1)
    expected = everything(start(client(plain), plain, callbacks=[OneStepAtATime()]))
    data = case.data_of(width=1)
    same = client(data)
    with pytest.raises(InterruptedError):
        start(same, data, callbacks=[SaveRounds([done], folder), FailsWithin(done)])
    found = everything(start(same, data, callbacks=[OneStepAtATime()], ckpt_path=folder / f"{done}.ckpt"))
    for state in (expected, found):
        state.pop("seconds")
        state["channel"].get("integer_sums", {}).pop("seconds", None)
    assert difference(found, expected) is None


@each_method
def test_the_same_client_goes_on_after_an_error_within_a_round(name: str, tmp_path: Path) -> None:
    goes_on_with_the_same_client(name, tmp_path)


def test_the_same_client_goes_on_with_counts_of_its_own(tmp_path: Path) -> None:
    """FedWeIT counts bytes until the round ends."""
    goes_on_with_the_same_client("FedWeIT", tmp_path)


def test_the_same_client_goes_on_with_sums_of_integers(tmp_path: Path) -> None:
    """Fed-A-GEM counts steps until the round ends."""
    goes_on_with_the_same_client("FedAGEM", tmp_path, {"aggregation": "modelled"})


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


# AnalyticHead does not train in the second task. The others keep the first task's model when they begin the second.
AT_THE_BEGINNING = {"AnalyticHead", "APD", "FedWeIT", "CONFEDMADE"}


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_THEMSELVES | AT_THE_BEGINNING])
def test_a_client_that_is_skipped_keeps_what_it_had(name: str) -> None:
    """The client trains to NaN in the first round of the second task."""
    case, kept = CASES[name], Kept()
    data = case.data_of(schedule={"clients_per_round": 5})
    parameter = "output.bias" if case.of_scenario() == "density" else "head.bias"
    methods = {"poison": Poison(1, case.rounds, parameter), **case.methods("tried")}
    federation = case.start(data, methods, callbacks=[kept], federated={"on_bad_update": "skip"})
    assert federation.channel.skipped == [(case.rounds, 1, 1)]
    before, after = kept.after[case.rounds - 1], kept.after[case.rounds]
    for topic, held in after.items():
        assert difference(held.get(1), before.get(topic, {}).get(1), place=topic) is None


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


# Each of two would do its own share, or do nothing more. All others refuse a second one (`Method.refuse_twins`).
MAY_BE_TWICE = {"AnalyticHead", "DER", "FedProx", "FOT", "InferringFOT", "PersonalLayers"}


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


# Declarations


@each_method
@pytest.mark.parametrize("scenario", get_args(Scenario))
def test_its_scenarios_are_those_it_declares(name: str, scenario: Scenario) -> None:
    if scenario == "detection":
        pytest.importorskip("pycocotools")
    scenario_is_as_declared(CASES[name], scenario)


# LearningRateDecay's ``end_task`` only adds a row to its report.
LOOK_BACK = sorted(n for n in ENTRIES if METHODS[n].end_task is not Method.end_task and n != "LearningRateDecay")


FURTHER: dict[str, dict[str, Any]] = {
    "task": {"stream": lambda n: split(n, classes=2 * n), "scenario": "task"},
    "class": {"stream": lambda n: split(n, classes=2 * n), "scenario": "class", "data": {"class_loss": "seen"}},
    "regression": {"stream": brightness, "scenario": "regression"},
    "own tasks": {
        "stream": lambda n: split(n + 1, classes=2 * (n + 1)),
        "scenario": "task",
        "data": {"sequences": FixedTasks([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])},
    },
}
"""Settings beside those of the other generic tests, in which clients' losses are over other outputs."""


@each_method
@pytest.mark.parametrize("setting", FURTHER)
def test_width_and_engine_do_not_matter_in_further_settings(name: str, setting: str) -> None:
    """For clients of unlike sizes."""
    changes = FURTHER[setting]
    case = ENTRIES[name].case(METHODS[name])
    method = case.make()
    wrong = changes["scenario"] not in method.scenarios or (setting == "own tasks" and method.common_order)
    if wrong or (setting == "class" and (case.of_scenario() == "class" or isinstance(method, L2P))):
        pytest.skip("it does not work there, chooses the outputs itself, or the other tests have this setting")
    case = replace(case, **{**changes, "data": {**case.data, **changes.get("data", {})}})
    width_does_not_matter(case)
    engines_agree(case)


@pytest.mark.parametrize("name", [*LOOK_BACK, "CFeD", "SingleTask"])
def test_who_looks_back_refuses_training_in_which_no_task_ends(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ConfigError) as caught:
        case.start(case.data_of(exposure="joint"), case.methods("tried"))
    assert (caught.value.key, caught.value.value) == ("data.exposure", "joint")


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
