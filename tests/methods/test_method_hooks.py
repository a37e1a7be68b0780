"""The hooks of methods during a round, tested with small methods defined here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.naive import federated_averaging, plain_network
from support.tiny import (
    Poison,
    SaveAfter,
    at_round,
    double,
    fit,
    five_unequal,
    mlp,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.methods.context import Context
from cfl.runtime.errors import BadUpdate, ConfigError

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def data_of(width: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round, two tasks of three rounds."""
    return five_unequal(width=width, **options)


def run(methods: dict[str, Method], width: int = 2, optimizer: Any = sgd, **options: Any) -> Federation:
    data = data_of(width)
    return fit(tiny_client(data, double(mlp), optimizer, methods), data, **options)


def naive_run(optimizer: Any = sgd, **options: Any) -> dict[str, Tensor]:
    data = data_of()
    network = plain_network(data, double(mlp), tiny_client(data, double(mlp)).network.state_dict())
    return federated_averaging(network, data, optimizer, **options)[0]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(float((a[name] - value).abs().max()) > 1e-4 for name, value in b.items())


# Penalties and gradients, client by client.


class Pull(Method):
    """Draws client c towards the value c / 10 with strength 0.1 (c + 1)."""

    def penalty(self, cohort: Cohort) -> Tensor:
        clients = torch.tensor(cohort.clients, dtype=torch.float64)
        distance = torch.zeros(len(clients), dtype=torch.float64)
        for parameter in cohort.parameters.values():
            targets = (clients / 10).view(-1, *[1] * (parameter.ndim - 1))
            distance = distance + (parameter - targets).square().flatten(1).sum(1)
        return 0.1 * (clients + 1) * distance


def pull(network: nn.Module, client: int) -> Tensor:
    return sum(0.1 * (client + 1) * ((p - client / 10) ** 2).sum() for p in network.parameters())


class Twist(Method):
    """Multiplies client c's gradient by (c + 1) / 3 and adds a thousandth of the weight."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        factors = (torch.tensor(cohort.clients, dtype=torch.float64) + 1) / 3
        for name, gradient in cohort.gradients.items():
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))
            gradient.add_(cohort.parameters[name].detach(), alpha=1e-3)


def twist(network: nn.Module, client: int) -> None:
    for parameter in network.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * (client + 1) / 3 + 1e-3 * parameter.detach()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_penalty_is_each_clients_own(width: int) -> None:
    expected = naive_run(MOMENTUM, penalty=pull)
    assert_close(weights(run({"pull": Pull()}, width, MOMENTUM)), expected)
    assert differ(expected, naive_run(MOMENTUM))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_gradients_are_each_clients_own(width: int) -> None:
    expected = naive_run(MOMENTUM, change_gradients=twist)
    assert_close(weights(run({"twist": Twist()}, width, MOMENTUM)), expected)
    assert differ(expected, naive_run(MOMENTUM))


def test_penalty_and_gradients_together_come_before_clipping() -> None:
    def change(network: nn.Module, client: int) -> None:
        twist(network, client)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.4)

    found = run({"pull": Pull(), "twist": Twist()}, gradient_clip_val=0.4)
    assert_close(weights(found), naive_run(penalty=pull, change_gradients=change))


def test_the_reported_loss_is_without_penalties() -> None:
    """So that runs of different methods show comparable losses."""

    class Constant(Method):
        def penalty(self, cohort: Cohort) -> Tensor:
            weights = cohort.parameters["head.bias"]
            return 1000.0 + 0 * weights.sum(1)

    data = data_of()
    client = tiny_client(data, methods={"constant": Constant()})
    fit(client, data)
    assert 0 < client.mean_loss < 5


def test_a_penalty_is_one_number_for_every_client() -> None:
    """A sum over clients would count as often as there are clients in the cohort."""

    class Summed(Method):
        def penalty(self, cohort: Cohort) -> Tensor:
            return sum((p.square().sum() for p in cohort.parameters.values()), torch.zeros(()))

    data = data_of()
    with pytest.raises(
        RuntimeError, match=r"methods\.summed: penalty of shape \[\], not \[.*one number for every client"
    ):
        fit(tiny_client(data, methods={"summed": Summed()}), data)


class Remembers(Method):
    """Its penalty has no gradient, and is 0 in the first task."""

    def penalty(self, cohort: Cohort) -> Tensor:
        distance = sum(p.detach().square().flatten(1).sum(1) for p in cohort.parameters.values())
        return cohort.task * (distance + torch.zeros(len(cohort.clients)))


def test_a_penalty_without_gradient_is_refused_unless_it_is_zero() -> None:
    """It would train nothing. A method that has nothing to remember yet may return zeros."""
    ended: list[int] = []
    methods: dict[str, Method] = {
        "mine": Remembers(),
        "ends": type("Ends", (Method,), {"end_task": lambda self, plan: ended.append(plan.task)})(),
    }
    with pytest.raises(ConfigError, match=r"methods\.mine = 'Remembers\.penalty without gradient' .*valid: 0, or what"):
        run(methods)
    assert ended == [0]


def test_a_transform_is_the_last_word_on_the_global_step() -> None:
    class Freeze(Method):
        def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**step, "head.bias": torch.zeros_like(step["head.bias"])}

    data = data_of()
    before = tiny_client(data, double(mlp)).network.state_dict()
    found = run({"freeze": Freeze()}, federated={"server_momentum": 0.9, "server_lr": 0.5})
    assert torch.equal(weights(found)["head.bias"], before["head.bias"])
    assert not (weights(found)["head.weight"] == before["head.weight"]).any()


@pytest.mark.parametrize("found", [None, {}, {"head.bias": torch.zeros(4)}])
def test_a_transform_answers_for_every_parameter(found: Any) -> None:
    """A missing step would otherwise leave the global model as it is, without an error."""

    class Forgets(Method):
        def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
            return found

    with pytest.raises(RuntimeError, match=r"methods\.mine\.transform_step gives (NoneType|no head)"):
        run({"mine": Forgets()})


def test_gradients_cannot_be_replaced() -> None:
    """The optimizer would not use a replaced gradient."""

    class Replaces(Method):
        def adjust_gradients(self, cohort: Cohort) -> None:
            cohort.gradients["head.bias"] = torch.zeros(2, 4)  # type: ignore[index]

    with pytest.raises(RuntimeError, match="does not support item assignment"):
        run({"mine": Replaces()})


# Order.


class Trace(Method):
    """Records the order in which hooks are called."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.label, self.events = name, events

    def _note(self, event: str) -> None:
        self.events.append(f"{event} {self.label}")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self._note("setup")

    def start_clients(self, cohort: Cohort) -> None:
        assert not any(p.grad is not None for p in cohort.parameters.values())
        for name, value in self.context.state_tensors().items():
            assert all(torch.equal(row, value) for row in cohort.parameters[name])
        self._note(f"open {len(cohort.clients)}")

    def penalty(self, cohort: Cohort) -> None:
        self._note("penalty")

    def adjust_gradients(self, cohort: Cohort) -> None:
        assert set(cohort.gradients) == set(cohort.parameters)
        self._note("gradients")

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self._note(f"close {len(positions)}")

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        assert not self.context.channel._unread, "the sum has been read"
        self._note("transform")
        return step

    def end_round(self, plan: RoundPlan) -> None:
        assert self.context.round == plan.round + 1
        self._note("round")

    def end_task(self, plan: RoundPlan) -> None:
        assert plan.last_of_task
        self._note("task")


def test_every_hook_runs_for_every_method_in_their_order() -> None:
    """Three equal clients in cohorts of two and one, one local step, two tasks of one and two rounds."""
    events: list[str] = []
    data = tiny_data(num_clients=3, schedule={"rounds_per_task": [1, 2], "batch_size": 100, "cohort_width": 2})
    methods: dict[str, Method] = {"second": Trace("b", events), "first": Trace("a", events)}
    fit(tiny_client(data, methods=methods), data)

    def both(*names: str) -> list[str]:
        return [f"{name} {method}" for name in names for method in "ba"]

    cohorts = both("open 2", "penalty", "gradients", "close 2") + both("open 1", "penalty", "gradients", "close 1")
    one_round = cohorts + both("transform", "round")
    assert events == both("setup") + one_round + both("task") + 2 * one_round + both("task")


def test_clients_close_when_they_have_finished_and_only_then() -> None:
    """A client that waits for others of its cohort sends the model of its own last step."""
    closed: list[tuple[int, int]] = []
    steps = 0

    class Count(Method):
        def start_clients(self, cohort: Cohort) -> None:
            nonlocal steps
            steps = 0

        def adjust_gradients(self, cohort: Cohort) -> None:
            nonlocal steps
            steps += 1

        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            closed.extend((cohort.clients[p], steps) for p in positions)

    data = data_of(width=3, schedule={"rounds_per_task": 1, "local_epochs": 2})
    fit(tiny_client(data, methods={"count": Count()}), data)
    expected = []
    for r in range(2):
        plan = data.rounds.round(r)
        expected += [(c, 2 * -(-len(data.indices[plan.task][c]) // 8)) for c in plan.clients]
    assert sorted(closed) == sorted(expected)
    assert len({step for _, step in closed}) > 1


def test_clients_begin_with_the_tensors_that_a_method_gives_them() -> None:
    """Each client begins with its number in its biases, and sends it, because it does not learn."""

    class Numbered(Method):
        def start_clients(self, cohort: Cohort) -> None:
            for position, client in enumerate(cohort.clients):
                cohort.begin_with(position, {"head.bias": torch.full_like(cohort.parameters["head.bias"][0], client)})

    data = data_of(width=3, schedule={"rounds_per_task": 1})
    still = partial(torch.optim.SGD, lr=0.0)
    found = weights(fit(tiny_client(data, double(mlp), still, {"numbered": Numbered()}), data))["head.bias"]
    clients = data.rounds.round(data.num_rounds - 1).clients
    torch.testing.assert_close(found, torch.full_like(found, sum(clients) / len(clients)), rtol=0, atol=1e-12)


def test_clients_that_close_know_how_many_steps_they_took_and_how_long() -> None:
    """With steps and learning rate a method can compute a mean gradient from an update, here of one SGD step."""
    seen: dict[tuple[int, int], int] = {}

    class Read(Method):
        def start_clients(self, cohort: Cohort) -> None:
            assert (cohort.steps, cohort.lr) == (0, 0.03)

        def adjust_gradients(self, cohort: Cohort) -> None:
            self.gradients = {n: g.clone() for n, g in cohort.gradients.items()}
            self.before = {n: p.detach().clone() for n, p in cohort.parameters.items()}

        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            for p in positions:
                seen[cohort.round, cohort.clients[p]] = cohort.steps
                for name, gradient in self.gradients.items():
                    step = (self.before[name] - cohort.parameters[name])[p] / cohort.lr
                    torch.testing.assert_close(step, gradient[p], rtol=0, atol=1e-12)

    data = data_of(width=3, schedule={"local_epochs": 2})
    fit(tiny_client(data, double(mlp), partial(torch.optim.SGD, lr=0.03), {"read": Read()}), data)
    assert seen == {
        (r, c): 2 * -(-len(data.indices[data.rounds.round(r).task][c]) // 8)
        for r in range(data.num_rounds)
        for c in data.rounds.round(r).clients
    }
    assert len(set(seen.values())) > 1


# Declarations.


def test_a_scenario_that_a_method_does_not_support_is_refused() -> None:
    class OnlyTask(Method):
        scenarios: ClassVar[Any] = frozenset({"task", "domain"})

    data = tiny_data(split(), scenario="class")
    with pytest.raises(ConfigError, match=r"data\.scenario = 'class'.*domain.*task.*methods\.mine \(OnlyTask\)"):
        fit(tiny_client(data, methods={"mine": OnlyTask()}), data)
    for scenario in ("task", "domain"):
        data = tiny_data(split(), scenario=scenario, schedule={"rounds_per_task": 1})
        assert fit(tiny_client(data, methods={"mine": OnlyTask()}), data).finished


def test_an_optimizer_under_which_a_method_loses_its_guarantee_is_refused() -> None:
    class OnlySGD(Method):
        optimizers: ClassVar[Any] = frozenset({"SGD"})

    data = data_of()
    client = tiny_client(data, optimizer=partial(torch.optim.Adam, lr=0.01), methods={"mine": OnlySGD()})
    with pytest.raises(ConfigError, match=r"model\.optimizer = 'Adam'.*SGD.*methods\.mine"):
        fit(client, data)
    assert fit(tiny_client(data, optimizer=sgd, methods={"mine": OnlySGD()}), data).finished


def test_a_method_may_look_at_the_optimizer_before_training() -> None:
    class NoDecay(Method):
        def setup(self, context: Context) -> None:
            super().setup(context)
            assert context.optimizer is not None
            decay = context.optimizer.param_groups[0]["weight_decay"]
            if decay:
                raise ConfigError("model.optimizer.init_args.weight_decay", decay, "0")

        def begin_task(self, plan: RoundPlan) -> None:
            trained.append(plan.task)

    trained: list[int] = []
    data = data_of()
    decayed = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"weight_decay = 0\.1"):
        fit(tiny_client(data, optimizer=decayed, methods={"mine": NoDecay()}), data)
    assert not trained
    assert fit(tiny_client(data, optimizer=sgd, methods={"mine": NoDecay()}), data).finished


def test_an_optimizer_that_mixes_weights_is_refused() -> None:
    """Clients are rows of one tensor, so a norm or a curvature over it would mix them."""
    data = data_of()
    for optimizer in (partial(torch.optim.LBFGS, lr=0.1), partial(torch.optim.Adafactor, lr=0.1)):
        with pytest.raises(ConfigError, match=rf"model\.optimizer = '{optimizer.func.__name__}'.*Adam"):
            fit(tiny_client(data, optimizer=optimizer), data)


def test_a_failure_at_a_tasks_beginning_says_where() -> None:
    class Fails(Method):
        def begin_task(self, plan: RoundPlan) -> None:
            if plan.task == 1:
                raise StopIteration("made up")

    data = data_of()
    with pytest.raises(RuntimeError, match=r"beginning task 1 failed in round \d+ \(task 1\): StopIteration: made up"):
        fit(tiny_client(data, methods={"mine": Fails()}), data)


class Tells(Method):
    """Sends every client's head bias to the server in a message of its own."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        payload = cohort.rows(positions, {"bias": cohort.parameters["head.bias"]})
        self.context.channel.uplink_individually("bias", payload, [cohort.clients[p] for p in positions])

    def end_round(self, plan: RoundPlan) -> None:
        assert list(self.context.channel.collect_individually("bias")) == list(plan.clients)


class Declares(Tells):
    individual_uplinks: ClassVar[bool] = True


def test_single_messages_are_for_methods_that_declare_them() -> None:
    with pytest.raises(RuntimeError, match="individual_uplinks") as caught:
        run({"tells": Tells()})
    assert isinstance(caught.value.__cause__, PermissionError)
    found = run({"tells": Declares(), "other": Method()})
    assert found.channel.uplink_bytes["bias"] == 6 * 3 * 4 * 8


def test_the_reported_loss_leaves_out_padding() -> None:
    """Finished clients are padded with loss 0, which must not lower the mean. Any width gives the same loss."""
    losses = []
    for width in (1, 3):
        data = data_of(width)
        client = tiny_client(data, double(mlp))
        fit(client, data)
        losses.append(client.mean_loss)
    sizes = [len(data.indices[1][c]) for c in data.rounds.round(5).clients]
    assert len({-(-size // 8) for size in sizes}) > 1, "clients with different numbers of steps"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Failures.


class Fails(Method):
    """Raises an error in one hook of one round."""

    def __init__(self, hook: str, error: Exception, round: int) -> None:
        self.round, self.error = round, error
        setattr(self, hook, self._fail)

    def _fail(self, first: Any, *rest: Any) -> Any:
        is_step = isinstance(first, dict)
        if self.round == (self.context.round if is_step else first.round):
            raise self.error
        return first if is_step else None


@pytest.mark.parametrize("error", [KeyError("a layer"), StopIteration("exhausted"), ValueError("shapes")], ids=repr)
@pytest.mark.parametrize("hook", ["penalty", "adjust_gradients"])
def test_a_failure_says_where_it_happened(hook: str, error: Exception) -> None:
    """A StopIteration is the critical case: Lightning would end the epoch without a message."""
    data = data_of()
    clients = next(iter(_loader(data, 4))).clients
    with pytest.raises(RuntimeError) as caught:
        fit(tiny_client(data, methods={"fails": Fails(hook, error, round=4)}), data)
    message = str(caught.value)
    assert caught.value.__cause__ is error
    for part in ("local step 0 ", f"clients {list(clients)} ", "round 4 ", "(task 1)", repr(error.args[0])[1:-1]):
        assert part in message
    assert type(error).__name__ in message


def _loader(data: FederatedDataModule, round: int) -> Any:
    at_round(data, round)
    return data.train_dataloader()


@pytest.mark.parametrize("error", [KeyError("a layer"), StopIteration("exhausted")], ids=repr)
@pytest.mark.parametrize(
    ("hook", "doing"),
    [
        ("start_clients", "opening clients"),
        ("finish_clients", "collecting from clients"),
        ("transform_step", "closing the round"),
        ("end_round", "closing the round"),
        ("end_task", "closing the round"),
    ],
)
def test_a_failure_between_the_steps_says_where_it_happened(hook: str, doing: str, error: Exception) -> None:
    """In the last round a StopIteration would otherwise leave a run that looks finished."""
    data = data_of()
    with pytest.raises(RuntimeError, match=rf"{doing} .*round 5 \(task 1\).*{type(error).__name__}") as caught:
        fit(tiny_client(data, methods={"fails": Fails(hook, error, round=5)}), data)
    assert caught.value.__cause__ is error


def test_a_fit_that_ends_early_is_no_success() -> None:
    class Ends(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 2:
                raise StopIteration

    data = data_of()
    with pytest.raises(RuntimeError, match="ended after 2 of 6 rounds"):
        fit(tiny_client(data), data, callbacks=[Ends()])


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_precision_that_batches_do_not_follow_is_refused(precision: str) -> None:
    data = data_of()
    with pytest.raises(ConfigError, match=rf"trainer.precision = '{precision}'.*bf16-mixed"):
        fit(tiny_client(data), data, precision=precision)


def test_a_failure_in_a_later_step_names_that_step() -> None:
    class Third(Method):
        calls = 0

        def penalty(self, cohort: Cohort) -> None:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("too late")

    data = data_of(schedule={"batch_size": 2})
    with pytest.raises(RuntimeError, match=r"local step 2 of clients \[\d, \d\] .*round 0 \(task 0\).*too late"):
        fit(tiny_client(data, methods={"third": Third()}), data)


def test_a_network_that_fails_is_named_before_training() -> None:
    data = data_of()
    client = tiny_client(data)
    client.network.head = nn.Linear(3, 4)
    with pytest.raises(ConfigError, match=r"model\.network = .*MLP on images \[1, 4, 4\]: RuntimeError"):
        fit(client, data, num_sanity_val_steps=0)


@pytest.mark.parametrize("error", [ConfigError("methods.mine.x", 1, "2"), BadUpdate("client 3 sent NaN")], ids=repr)
def test_errors_that_name_their_cause_themselves_pass_unchanged(error: Exception) -> None:
    for hook in ("penalty", "adjust_gradients"):
        with pytest.raises(type(error)) as caught:
            run({"fails": Fails(hook, error, round=0)})
        assert caught.value is error


# NaN.


@pytest.mark.parametrize("width", [1, 3])
def test_a_nan_update_stops_the_run_and_is_named(width: int) -> None:
    data = data_of()
    plan = next(data.rounds.round(r) for r in range(3, 6) if 2 in data.rounds.round(r).clients)
    with pytest.raises(BadUpdate, match=rf"client 2 .*round {plan.round} \(task 1\)"):
        run({"poison": Poison(2, plan.round)}, width)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_skipped_client_leaves_its_neighbours_as_they_are(width: int, weighting: str) -> None:
    """The run equals one whose average leaves out the client's updates, also if clients train side by side."""
    federated = {"on_bad_update": "skip", "client_weighting": weighting}
    found = run({"poison": Poison(2)}, width, federated=federated)
    assert_close(weights(found), naive_run(unheard=[2], by_samples=weighting == "samples"))
    plans = [found.schedule.round(r) for r in range(6)]
    assert found.channel.skipped == [(plan.round, plan.task, 2) for plan in plans if 2 in plan.clients]
    assert len(found.channel.skipped) > 1


class Closes(Method):
    """Records the clients of ``finish_clients`` by round. The method asks for a buffer."""

    replays_logits: ClassVar[bool] = False

    def __init__(self) -> None:
        self.heard: dict[int, set[int]] = {}

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self.heard.setdefault(cohort.round, set()).update(cohort.clients[p] for p in positions)


@pytest.mark.parametrize("width", [1, 3])
def test_no_method_hears_of_a_client_that_is_left_out(width: int) -> None:
    """A skipped client's buffer is not updated either, and ``finish_clients`` is not called for it."""
    closes, data = Closes(), data_of(width)
    methods: dict[str, Method] = {"poison": Poison(2), "closes": closes}
    found = fit(tiny_client(data, double(mlp), sgd, methods), data, {"on_bad_update": "skip"})
    plans = [found.schedule.round(r) for r in range(6)]
    assert closes.heard == {plan.round: set(plan.clients) - {2} for plan in plans}
    assert any(2 in plan.clients for plan in plans)
    assert found.buffer is not None
    assert found.clients.holders("buffer") == found.buffer.holders() == sorted(set().union(*closes.heard.values()))


def test_the_mean_loss_is_that_of_finite_ones() -> None:
    class Losses(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            means.append(pl_module.mean_loss)  # type: ignore[arg-type]

    kept = []
    for methods in ({"poison": Poison(2)}, {}):
        means: list[float] = []
        run(methods, federated={"on_bad_update": "skip"}, callbacks=[Losses()])
        kept.append(means)
    assert len(kept[0]) == 6
    assert all(0.5 < loss < 2 for loss in kept[0])
    first = next(plan.round for plan in map(data_of().rounds.round, range(6)) if 2 in plan.clients)
    assert kept[0][:first] == kept[1][:first]
    assert kept[0][first] != kept[1][first]


def test_a_diverging_run_stops() -> None:
    with pytest.raises(BadUpdate, match=r"round 0 \(task 0\).*lr"):
        run({}, optimizer=partial(torch.optim.SGD, lr=1e200))
    with pytest.raises(BadUpdate, match=r"round 0 \(task 0\).*every client was skipped"):
        run({}, optimizer=partial(torch.optim.SGD, lr=1e200), federated={"on_bad_update": "skip"})


# The state of a method.


class Brake(Method):
    """Shortens the global step round by round, so that a lost state changes the result."""

    def __init__(self) -> None:
        self.factor = torch.tensor(1.0, dtype=torch.float64)

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.factor * value for name, value in step.items()}

    def end_round(self, plan: RoundPlan) -> None:
        self.factor = self.factor * 0.7

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


def test_a_methods_state_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "after.ckpt"
    whole = run({"brake": Brake(), "other": Method()}, callbacks=[SaveAfter(3, path)])
    resumed = run({"brake": Brake(), "other": Method()}, ckpt_path=path)
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value)
    assert resumed.methods["brake"].factor == pytest.approx(0.7**6)


class Stumbles(Method):
    """Fails in the tests after the second task."""

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        if task == 1 and self.context.round == 6:
            raise StopIteration("made up")
        return None


def test_a_failure_in_a_test_says_where() -> None:
    data = data_of()
    with pytest.raises(RuntimeError, match=r"testing on task 1 failed after 6 rounds: StopIteration: made up"):
        fit(tiny_client(data, methods={"stumbles": Stumbles()}), data)
