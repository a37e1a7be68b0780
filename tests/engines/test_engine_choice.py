"""The choice of engine and cohort width: the ways left open, the trials that time them, and the choices kept."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import tiny_cli
from support.tiny import fit, mlp, needs_onednn, tiny_client, tiny_data, unequal, weights

import cfl.training.client
from cfl.data.schedule import Schedule
from cfl.engines import EngineChoice, EngineOptions, candidates, open_choices, trials
from cfl.engines.choice import from_dict
from cfl.engines.open_choices import MEMORY_ON_CPU, PATCHES_ON_CPU
from cfl.engines.probe import TRAINER_SECONDS, Measured, probe
from cfl.engines.products import WORTH_ONEDNN
from cfl.engines.trial_pass import patch_bytes
from cfl.methods import AGEM
from cfl.models import MLP, ResNet18, SmallCNN
from cfl.models.dropout import convert_dropout
from cfl.runtime.errors import ConfigError, EngineCannot
from cfl.training.client import Client
from cfl.training.engine_of_run import Chosen, choose_engine

SMALL = MLP((1, 4, 4), 4, [8], 0.0)


def of(
    options: EngineOptions,
    width: int | None,
    clients: int = 100,
    network: Any = SMALL,
    shape: Any = (1, 4, 4),
    batch_size: int = 8,
) -> list[EngineChoice]:
    return candidates(options, width, clients, network, shape, "32-true", batch_size)


def test_nothing_is_open_when_the_user_says_everything() -> None:
    assert of(EngineOptions("vmap"), 5) == [EngineChoice("vmap", 5)]
    assert of(EngineOptions("vmap"), 5, clients=3) == [EngineChoice("vmap", 3)]
    cnn = convert_dropout(SmallCNN((1, 16, 16), 2))
    for last in (False, True):
        found = of(EngineOptions("workers", 2, batch_last=last), 6, network=cnn, shape=(1, 16, 16))
        assert found == [EngineChoice("workers", 6, 2, batch_last=last)]


def test_convolutions_are_tried_with_the_batch_first_and_last() -> None:
    cnn = convert_dropout(SmallCNN((1, 16, 16), 2))
    found = of(EngineOptions("workers", 2), 6, network=cnn, shape=(1, 16, 16))
    assert found == [EngineChoice("workers", 6, 2, batch_last=last) for last in (True, False)]
    assert [str(choice) for choice in found] == ["2 worker(s), K = 6, batch last", "2 worker(s), K = 6"]
    with pytest.raises(ConfigError, match=r"engine\.batch_last.*ungrouped convolutions"):
        of(EngineOptions("workers", 2, batch_last=True), 6)


def test_the_batch_is_not_last_where_patches_take_too_much_memory() -> None:
    cnn = convert_dropout(SmallCNN((1, 16, 16), 2))
    first, second = 25 * 12 * 12, 250 * 2 * 2
    assert patch_bytes(cnn, (1, 16, 16)) == 4 * (first + second + second)
    most = PATCHES_ON_CPU // (2 * patch_bytes(cnn, (1, 16, 16)))
    for size, layouts in ((most, [True, False]), (most + 1, [False])):
        options = EngineOptions("workers", 2, products="blas")
        found = of(options, 6, network=cnn, shape=(1, 16, 16), batch_size=size)
        assert [choice.batch_last for choice in found] == layouts
    options = EngineOptions("workers", 2, batch_last=True, products="blas")
    asked = of(options, 6, network=cnn, shape=(1, 16, 16), batch_size=most + 1)
    assert asked == [EngineChoice("workers", 6, 2, batch_last=True)]


LARGE = MLP((1, 28, 28), 10, [300], 0.0)
"""A network whose first layer has 784 inputs and 300 units. Its product is worth oneDNN with batches of 5, not of 4. It
has few enough parameters for its clients to be stacked, too."""


def of_large(products: Any = None, stack: int | None = 1, network: Any = LARGE, batch_size: int = 5) -> list[Any]:
    options = EngineOptions("workers", 2, stack=stack, products=products)
    return of(options, 6, network=network, shape=(1, 28, 28), batch_size=batch_size)


@needs_onednn
@pytest.mark.parametrize("faster", ["blas", "onednn"])
def test_large_products_are_tried_with_both_libraries(monkeypatch: pytest.MonkeyPatch, faster: Any) -> None:
    """Both libraries are tried, the one measured as faster first. A library that the user sets is the only one."""
    monkeypatch.setattr(open_choices, "faster", lambda: faster)
    assert 784 * 300 * 4 < WORTH_ONEDNN <= 784 * 300 * 5
    both = {library: EngineChoice("workers", 6, 2, products=library) for library in ("blas", "onednn")}
    first, second = of_large()
    assert (first, second) == (both[faster], next(c for library, c in both.items() if library != faster))
    assert str(both["onednn"]) == "2 worker(s), K = 6, oneDNN"
    for library, alone in both.items():
        assert of_large(library) == [alone]
    assert of_large(batch_size=4) == [both["blas"]]
    assert of_large(network=copy.deepcopy(LARGE).double()) == [both["blas"]]


@needs_onednn
def test_stacks_have_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_choices, "faster", lambda: "onednn")
    found = of_large(stack=None)
    assert {(c.stack, c.products) for c in found} == {(1, "onednn"), (1, "blas"), (3, "blas")}
    assert found[0].products == "onednn"
    assert len(found) == len(set(found))
    assert {(c.stack, c.products) for c in of_large("onednn", stack=None)} == {(1, "onednn")}
    assert {(c.stack, c.products) for c in of_large("blas", stack=None)} == {(1, "blas"), (3, "blas")}


@needs_onednn
def test_the_other_library_is_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_choices, "faster", lambda: "onednn")
    cnn = convert_dropout(SmallCNN((1, 28, 28), 10))
    found = of(EngineOptions("auto", 2), 6, network=cnn, shape=(1, 28, 28), batch_size=32)
    kinds = [(c.kind, c.batch_last, c.products) for c in found]
    # With the batch first there is no choice: torch's convolutions use oneDNN already, and the linear layers are small.
    assert kinds == [
        ("workers", True, "onednn"),
        ("workers", False, "blas"),
        ("vmap", False, "blas"),
        ("workers", True, "blas"),
    ]


@needs_onednn
@pytest.mark.parametrize(
    "options",
    [
        {"stack": 3},
        {"network": ResNet18((1, 28, 28), 10, width=4)},
        {"network": copy.deepcopy(LARGE).double()},
        {"batch_size": 4},
    ],
    ids=["stack", "no chain", "float64", "small"],
)
def test_onednn_is_refused_where_nothing_would_use_it(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.products.*no float32 chain of layers"):
        of_large("onednn", **{"stack": None, **options})


@needs_onednn
def test_convolutions_are_worth_a_library_with_the_batch_last() -> None:
    """A convolution is worth oneDNN if its multiplications are many enough: here the second one, from 4 samples on.

    The first has 10 x 25 x 24 x 24 multiplications for each sample, the second 20 x 250 x 8 x 8.
    """
    cnn = convert_dropout(SmallCNN((1, 28, 28), 10))
    assert 20 * 250 * 8 * 8 * 3 < WORTH_ONEDNN <= 20 * 250 * 8 * 8 * 4
    for size, gains in ((3, False), (4, True)):
        options = EngineOptions("workers", 2, products=None)
        found = of(options, 6, network=cnn, shape=(1, 28, 28), batch_size=size)
        assert any(c.products == "onednn" for c in found) is gains
        assert all(c.batch_last for c in found if c.products == "onednn")


def test_libraries_are_not_tried_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_choices, "available", lambda: False)
    assert of_large() == [EngineChoice("workers", 6, 2)]


def test_a_stack_can_be_fixed() -> None:
    """With ``engine.stack`` set nothing is left open, so a run can be repeated bit for bit."""
    assert of(EngineOptions("workers", 2, stack=5), 10) == [EngineChoice("workers", 10, 2, 5)]
    assert of(EngineOptions("workers", 2, stack=1), 10) == [EngineChoice("workers", 10, 2)]
    assert of(EngineOptions("workers", 2, stack=5), None) == [EngineChoice("workers", 10, 2, 5)]
    cnn = convert_dropout(SmallCNN((1, 16, 16), 2))
    with pytest.raises(ConfigError, match=r"engine\.stack"):
        of(EngineOptions("workers", 2, stack=5), 10, network=cnn, shape=(1, 16, 16))


def test_one_client_at_a_time_is_tried_with_one_math_thread_and_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert of(EngineOptions("workers"), 1) == [EngineChoice("workers", 1, 1), EngineChoice("workers", 1, 0)]
    assert of(EngineOptions("workers", 1), 1) == [EngineChoice("workers", 1, 1)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert of(EngineOptions("workers"), 1) == [EngineChoice("workers", 1, 1)]


def test_auto_offers_both_engines_several_widths_and_no_more_clients_than_a_round_has() -> None:
    found = of(EngineOptions("auto", 2), None, clients=12)
    assert {choice.kind for choice in found} == {"vmap", "workers"}
    assert len(found) == len(set(found))
    assert max(choice.width for choice in found) == 12
    assert {choice.stack for choice in found} > {1, 4}
    assert all(choice.threads <= choice.width for choice in found)


def test_a_width_chosen_for_the_user_fits_the_memory_set_aside() -> None:
    large = MLP((1, 28, 28), 10, [2000, 2000])
    size = sum(p.numel() * 4 for p in large.parameters())
    found = of(EngineOptions("auto", 2), None, network=large, shape=(1, 28, 28))
    assert all(choice.width <= 2 or choice.width * size <= MEMORY_ON_CPU for choice in found)
    assert of(EngineOptions("vmap"), 64, network=large, shape=(1, 28, 28)) == [EngineChoice("vmap", 64)]


class Clock:
    """A clock that advances only when a simulated trial adds to it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulated(
    seconds_per_step: dict[EngineChoice, float], client_steps: int, building: float = 0.0
) -> tuple[list[Any], Clock]:
    clock = Clock()

    def trial_of(choice: EngineChoice) -> Any:
        clock.now += building

        def trial(steps: int) -> float:
            clock.now += steps * seconds_per_step[choice]
            return seconds_per_step[choice]

        return trial

    return probe(list(seconds_per_step), trial_of, client_steps, clock), clock


def test_the_cheapest_per_client_wins_with_the_trainers_share_counted() -> None:
    narrow, wide = EngineChoice("vmap", 1), EngineChoice("vmap", 10)
    found, _ = simulated({narrow: 1e-4, wide: 1.1e-3}, 10**6)
    assert found[0].choice == wide
    assert found[0].seconds_per_client_step == pytest.approx((1.1e-3 + TRAINER_SECONDS) / 10)
    found, _ = simulated({narrow: 1e-2, wide: 0.2}, 10**6)
    assert found[0].choice == narrow


def test_a_probe_holds_few_choices_at_a_time() -> None:
    """At most four trials exist at a time, in any order of speed, because each holds the models of a cohort."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Trial:
        def __init__(self, seconds: float) -> None:
            nonlocal most
            self.seconds = seconds
            alive.add(self)
            most = max(most, len(alive))

        def __call__(self, steps: int) -> float:
            return self.seconds

    seconds = {EngineChoice("workers", k): float((k * 7) % 20 + 1) for k in range(1, 20)}
    clock = Clock()
    found = probe(list(seconds), lambda choice: Trial(seconds[choice] * choice.width), 10**6, clock)
    assert len(found) == len(seconds)
    expected = {c: s + TRAINER_SECONDS / c.width for c, s in seconds.items()}
    assert {f.choice: f.seconds_per_client_step for f in found} == pytest.approx(expected)
    assert most == 4


def test_what_fails_is_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    """A choice whose trial fails is left out. If all fail, the first failure is raised; a ConfigError always is."""
    choices = [EngineChoice("vmap", 2), EngineChoice("workers", 2, 1), EngineChoice("vmap", 1)]

    def trial_of(failure: Any, working: set[str]) -> Any:
        def of(choice: EngineChoice) -> Any:
            if choice.kind not in working:
                raise failure(choice)
            return lambda steps: 0.1

        return of

    def unknown(choice: EngineChoice) -> Exception:
        return RuntimeError(f"no {choice.kind} of {choice.width}")

    def refused(choice: EngineChoice) -> Exception:
        return ConfigError("engine.kind", choice.kind, "another")

    found = probe(choices, trial_of(unknown, {"workers"}), 10**6, Clock())
    assert [measured.choice for measured in found] == [choices[1]]
    assert "vmap, K = 2 is no choice for this network: RuntimeError: no vmap of 2" in caplog.text
    with pytest.raises(RuntimeError, match="no vmap of 2"):
        probe(choices, trial_of(unknown, set()), 10**6, Clock())
    with pytest.raises(ConfigError):
        probe(choices, trial_of(refused, {"workers"}), 10**6, Clock())


@pytest.mark.parametrize("caused", [False, True])
def test_what_failed_lets_its_models_go(caused: bool) -> None:
    """A failed trial's models are freed before the next trial, and the traceback still shows where it failed."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    found: list[int] = []

    def trial_of(choice: EngineChoice) -> Any:
        found.append(len(alive))
        models = MLP((1, 2, 2), 2, [2])
        alive.add(models)
        if not caused:
            raise RuntimeError(f"no {choice}")
        try:
            compute(models)
        except ValueError as error:
            raise EngineCannot("model.network", "Net", f"no {choice}") from error

    def compute(models: MLP) -> None:
        raise ValueError

    with pytest.raises((RuntimeError, EngineCannot), match="no vmap, K = 1") as told:
        probe([EngineChoice("vmap", k) for k in (1, 2, 3)], trial_of, 100, Clock())
    assert told.traceback[-1].name == "trial_of"
    assert found == [0, 0, 0]


def test_a_probe_costs_little_of_the_run() -> None:
    choices = {EngineChoice("vmap", k): 0.01 for k in range(1, 40)}
    found, clock = simulated(choices, client_steps=100)
    assert clock.now < 0.4
    assert 1 <= len(found) < len(choices)
    _, clock = simulated({EngineChoice("vmap", 1): 3.0, EngineChoice("vmap", 2): 3.0}, client_steps=100)
    assert clock.now < 15


def test_building_is_paid_for_by_long_runs_only() -> None:
    """If building takes a second and a step 10 ms, a run of a second tries one choice, and a run of hours a few."""
    choices = {EngineChoice("workers", k): 0.01 for k in range(1, 40)}
    found, clock = simulated(choices, client_steps=100, building=1.0)
    assert (len(found), clock.now < 1.1) == (1, True)
    found, clock = simulated(choices, client_steps=10**7, building=1.0)
    assert len(found) > 3
    assert clock.now < 8
    found, clock = simulated(choices, client_steps=100, building=60.0)
    assert (len(found), clock.now < 61) == (1, True)


def test_trials_of_long_runs_record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for long, eager in ((1, True), (10**9, False)):
        asked = []
        monkeypatch.setattr(trials, "LONG_RUN", long)
        build = trials.build_engine
        monkeypatch.setattr(
            trials, "build_engine", lambda *a, b=build, asked=asked, **k: asked.append(a[5]) or b(*a, **k)
        )
        data = tiny_data(schedule={"cohort_width": "auto"})
        fit(tiny_client(data, engine=EngineOptions("workers", 1)), data)
        assert asked
        assert set(asked) == {eager}
        monkeypatch.undo()


@needs_onednn
def test_a_choice_of_an_older_checkpoint_is_blas() -> None:
    saved = of_large("blas")[0].to_dict()
    del saved["products"]
    assert from_dict(saved, of_large()) == EngineChoice("workers", 6, 2, products="blas")
    assert from_dict(saved, of_large("onednn")) is None


def test_a_choice_of_an_older_checkpoint_has_the_batch_first() -> None:
    allowed = [EngineChoice("workers", 4, 2, batch_last=last) for last in (True, False)]
    assert from_dict({"kind": "workers", "width": 4, "threads": 2, "stack": 1}, allowed) == allowed[1]
    assert from_dict(allowed[0].to_dict(), allowed) == allowed[0]
    assert from_dict({**allowed[0].to_dict(), "of_a_later_version": 1}, allowed) is None


def trials_of(client: Client) -> dict[str, float]:
    """What the run's summary has of trials: choice -> seconds."""
    engine = client.require_federation().engine
    assert engine is not None
    return engine["seconds_per_client_step_in_trials"]


@pytest.mark.usefixtures("unhurried_probe")
@pytest.mark.parametrize("kind", ["auto", "vmap", "workers"])
def test_auto_trains_to_the_same_model(kind: Any) -> None:
    data = tiny_data(schedule={"cohort_width": 2})
    expected = weights(fit(tiny_client(data), data))
    data = tiny_data(schedule={"cohort_width": "auto"})
    client = tiny_client(data, engine=EngineOptions(kind))
    found = weights(fit(client, data))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert client.engine_choice is not None
    assert data.schedule.width == client.engine_choice.width
    trials = trials_of(client)
    assert str(client.engine_choice) == min(trials, key=trials.__getitem__)
    assert len(trials) > 1


def test_a_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data(schedule={"cohort_width": 2})
    client = tiny_client(data, engine=EngineOptions("auto"))
    before = {n: t.clone() for n, t in client.network.state_dict().items()}
    seen = {}

    def choose(*given: Any) -> Chosen:
        found = choose_engine(*given)
        seen.update({n: t.clone() for n, t in client.network.state_dict().items()})
        return found

    monkeypatch.setattr(cfl.training.client, "choose_engine", choose)
    fit(client, data)
    assert all(torch.equal(before[n], seen[n]) for n in before)


def test_a_choice_has_its_own_time_where_another_is_faster() -> None:
    """As in a process in which another choice than the first process's is the fastest."""
    choice, faster = EngineChoice("vmap", 4), EngineChoice("vmap", 2)
    trials, engine = [Measured(faster, 0.25), Measured(choice, 0.5)], mock.Mock()
    assert Chosen(engine, choice, trials).seconds_per_step == 4 * 0.5
    assert Chosen(engine, choice, trials[:1]).seconds_per_step == float("inf")


def test_a_resumed_run_keeps_the_choice(tmp_path: Path) -> None:
    """A resumed run keeps its engine and cohort width, because another width rounds differently."""
    options = ("--schedule.cohort_width", "auto", "--engine.kind", "auto")
    assert tiny_cli.fit(tmp_path, *options) == 0
    saved = tiny_cli.checkpoint(tmp_path)["engine"]
    assert set(saved) == {"kind", "width", "threads", "stack", "batch_last", "products"}
    recorded = tiny_cli.summary(tmp_path)["engine"]
    trials = recorded.pop("seconds_per_client_step_in_trials")
    assert recorded == saved
    assert str(EngineChoice(**saved)) == min(trials, key=trials.__getitem__)
    data = tiny_data(schedule={"cohort_width": "auto"})
    client = tiny_client(data, engine=EngineOptions("auto"))
    client._resumed_choice = {"kind": "vmap", "width": 1, "threads": 0, "stack": 1}
    fit(client, data)
    assert client.engine_choice == EngineChoice("vmap", 1)
    assert trials_of(client) == {}


@pytest.mark.parametrize("width", [0, -1, "wide", 2.5])
def test_bad_widths(width: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.cohort_width .* or auto"):
        Schedule(cohort_width=width)


def test_an_unsettled_width_is_no_width() -> None:
    schedule = Schedule(cohort_width="auto")
    with pytest.raises(RuntimeError, match="auto"):
        _ = schedule.width
    schedule.settle_width(3)
    assert schedule.width == 3
    assert schedule.with_width(4).width == 4
    assert schedule.width == 3


def test_a_run_chooses_its_engine_as_if_no_run_had_used_the_data_before(caplog: pytest.LogCaptureFixture) -> None:
    """The first run limits padding and splits cohorts of its unequal clients; trials of the next take whole ones."""
    data = unequal(7)
    fit(tiny_client(data, engine=EngineOptions("vmap")), data)
    assert data.schedule.most_padding is not None
    client = tiny_client(data, methods={"agem": AGEM()}, engine=EngineOptions("auto"))
    assert fit(client, data).finished
    assert "is no choice" not in caplog.text


def test_compiled_steps_are_the_same_steps() -> None:
    data = tiny_data(schedule={"rounds_per_task": 1, "cohort_width": 2})
    expected = weights(fit(tiny_client(data), data))
    data = tiny_data(schedule={"rounds_per_task": 1, "cohort_width": 2})
    with mock.patch("torch.compile", wraps=torch.compile) as compiling:
        found = weights(fit(tiny_client(data, mlp, engine=EngineOptions("vmap", compile="default")), data))
    assert compiling.called
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
