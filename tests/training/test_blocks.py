"""Blocks of local steps: they give the same bits as single steps, and some callbacks and options prevent them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.tiny import (
    DECAY,
    MOMENTUM,
    PoolNet,
    double,
    dropping,
    fit,
    kept_by,
    mlp,
    norm_net,
    split,
    tiny_client,
    tiny_data,
    unequal,
    weights,
)
from torch import Tensor, nn

from cfl.callbacks import RoundProgress
from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.partitions import Dirichlet
from cfl.data.samples import Samples
from cfl.engines import EngineOptions
from cfl.methods import ER, EWC, SCAFFOLD, FedProx, Method
from cfl.models import Network
from cfl.training import blocks, local_work
from cfl.training import client as client_module
from cfl.training.client import Client

ENGINES: dict[str, tuple[Any, EngineOptions]] = {
    "vmap": (dropping, EngineOptions("vmap")),
    "one worker": (dropping, EngineOptions("workers", 1, stack=1)),
    "two workers": (dropping, EngineOptions("workers", 2, stack=1)),
    "stacks": (dropping, EngineOptions("workers", 2, stack=2)),
    "batch last": (PoolNet, EngineOptions("workers", 2, batch_last=True)),
    "channels last": (PoolNet, EngineOptions("workers", 2, batch_last=False)),
    "autograd": (norm_net, EngineOptions("workers", 2)),
}


class Watches(Callback):
    """Notes each round's loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Client)
        self.losses.append(pl_module.mean_loss)


@pytest.fixture
def length(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the length of blocks, which follows from the time that steps take."""

    def to(steps: int) -> None:
        for module in (client_module, local_work):
            monkeypatch.setattr(module, "steps_per_block", lambda seconds: steps)

    return to


def run(
    width: int, network: Any, engine: EngineOptions, methods: Any = None, optimizer: Any = DECAY, **data: Any
) -> Any:
    """Train seven unequal clients for two rounds of each task. Returns weights, clients' tensors, each round's loss."""
    options = {"local_epochs": 2, "rounds_per_task": 2, **data}
    module, watch = unequal(width, options.pop("stream", None), **options), Watches()
    client = tiny_client(module, network, optimizer, methods() if methods else None, engine)
    federation = fit(client, module, callbacks=[watch])
    return weights(federation), kept_by(federation), watch.losses


def assert_equal(found: Any, expected: Any) -> None:
    """Compare two results of ``run`` bit for bit."""
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    assert found[1].keys() == expected[1].keys()
    for client, kept in expected[1].items():
        for name, value in kept.items():
            assert torch.equal(found[1][client][name], value), (client, name)
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("optimizer", [DECAY, MOMENTUM], ids=["decay", "momentum"])
def test_blocks_of_any_length_are_the_steps(length: Callable[[int], None], name: str, optimizer: Any) -> None:
    network, engine = ENGINES[name]
    length(1)
    expected = run(3, network, engine, optimizer=optimizer)
    for steps in (2, 3, 1000):
        length(steps)
        assert_equal(run(3, network, engine, optimizer=optimizer), expected)


METHODS: dict[str, Callable[[], dict[str, Method]]] = {
    "er": lambda: {"er": ER(8)},
    "ewc": lambda: {"ewc": EWC(5.0)},
    "fedprox": lambda: {"fedprox": FedProx(0.1)},
    "scaffold": lambda: {"scaffold": SCAFFOLD("II")},
}


def test_a_stacked_client_is_collected_directly_after_its_last_step(length: Callable[[int], None]) -> None:
    """A client of a stack is collected after its last step, before decay and pulls move its row any further."""
    found = []
    for steps in (1, 1000):
        length(steps)
        data = tiny_data(schedule={"cohort_width": 3, "batch_size": 4}, partition=Dirichlet(alpha=1.0))
        client = tiny_client(data, mlp, DECAY, {"fedprox": FedProx(0.8)}, EngineOptions("workers", 2, 3))
        found.append(weights(fit(client, data)))
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)


@pytest.mark.parametrize("name", METHODS)
def test_methods_see_the_same_steps(length: Callable[[int], None], name: str) -> None:
    """Blocks change no result of methods that use samples, gradients, pulls or a client's number of steps."""
    runs = []
    for steps in (1, 2, 1000):
        length(steps)
        engine = EngineOptions("workers", 2, stack=1)
        runs.append(run(3, mlp, engine, METHODS[name], stream=split(), rounds_per_task=1))
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])


def test_a_rounds_loss_does_not_depend_on_who_works_beside_whom(length: Callable[[int], None]) -> None:
    network, engine = ENGINES["two workers"]
    length(1000)
    losses = [run(width, double(network), engine)[2] for width in (1, 2, 7)]
    assert losses[0] == losses[1] == losses[2]


def kinds(client: Client, data: Any, callbacks: Any = (), **options: Any) -> set[type]:
    """The types of the batches that Lightning got in the second round."""
    seen: set[type] = set()
    complete = data.on_after_batch_transfer

    def noted(batch: Any, dataloader_idx: int) -> Any:
        if data.next_round == 1 and isinstance(batch, CohortBatch | CohortBlock):
            seen.add(type(batch))
        return complete(batch, dataloader_idx)

    data.on_after_batch_transfer = noted
    fit(client, data, callbacks=list(callbacks), **options)
    return seen


class Nosy(Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        """Nothing."""


class Stubborn(Client):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def test_rounds_come_in_blocks_unless_somebody_has_a_part_in_single_steps() -> None:
    def made(kind: type[Client] = Client) -> tuple[Client, Any]:
        data = tiny_data(schedule={"rounds_per_task": 2})
        client = tiny_client(data, engine=EngineOptions("workers", 1, stack=1))
        client.__class__ = kind
        return client, data

    assert kinds(*made()) == {CohortBlock}
    assert kinds(*made(), callbacks=[RoundProgress(enabled=False)]) == {CohortBlock}
    assert kinds(*made(), callbacks=[Nosy()]) == {CohortBatch}
    assert kinds(*made(), gradient_clip_val=1.0) == {CohortBatch}
    assert kinds(*made(Stubborn)) == {CohortBatch}


class Idle(Client):
    """A client that removes the gradients before every step."""

    seen = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        for parameter in self.work.cohort.parameters.values():  # type: ignore[union-attr]
            Idle.seen += parameter.grad is not None
            parameter.grad = None


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), EngineOptions("workers", 1), EngineOptions()])
def test_a_subclass_sees_gradients_whatever_the_engine(engine: EngineOptions) -> None:
    data = tiny_data()
    client = tiny_client(data, engine=engine)
    client.__class__ = Idle
    Idle.seen, before = 0, weights_of(client)
    fit(client, data)
    assert Idle.seen > 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(client).items())


def weights_of(client: Client) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in client.network.state_dict().items()}


def test_bfloat16_is_computed_in_single_steps() -> None:
    data = tiny_data(schedule={"rounds_per_task": 2})
    assert kinds(tiny_client(data), data, precision="bf16-mixed") == {CohortBatch}


def test_a_block_takes_about_a_second() -> None:
    assert blocks.steps_per_block(0.3) == 3
    assert blocks.steps_per_block(7.0) == 1
    assert blocks.steps_per_block(float("inf")) == 1
    assert blocks.steps_per_block(0.0) > 1000


class Lonely(Network):
    """A network that fails on a batch of one sample."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_outputs)

    def features(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.any():
            raise ValueError("a lonely sample")
        return x.flatten(1)


@pytest.mark.parametrize("steps", [1, 1000])
def test_a_failure_names_its_step(length: Callable[[int], None], steps: int) -> None:
    length(steps)
    size = len(tiny_data(num_clients=2).indices[0][0])
    data = tiny_data(num_clients=2, schedule={"batch_size": size - 1})  # the second step is of one sample
    client = tiny_client(data, Lonely, engine=EngineOptions("workers", 2))
    with pytest.raises(RuntimeError, match=r"local step 1 of clients \[0, 1\] failed in round 0 \(task 0\)"):
        fit(client, data)


class FailsInThirdStep(Method):
    """A method whose term of the loss fails when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked = 0

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        self.asked += 1
        if self.asked == 3:
            raise ValueError("the third")
        return logits.square().mean()


@pytest.mark.parametrize("steps", [1, 1000])
def test_a_failure_of_a_method_names_its_step(length: Callable[[int], None], steps: int) -> None:
    length(steps)
    data = tiny_data(num_clients=1, schedule={"batch_size": 2})
    client = tiny_client(data, methods={"fails": FailsInThirdStep()}, engine=EngineOptions("workers", 1, stack=1))
    with pytest.raises(RuntimeError, match=r"local step 2 of clients \[0\] failed in round 0 \(task 0\)"):
        fit(client, data)


@pytest.mark.parametrize("kind", ["vmap", "workers"])
def test_a_steps_samples_are_let_go_before_the_next_ones_are_fetched(length: Callable[[int], None], kind: Any) -> None:
    """A step's samples are freed before later steps fetch theirs. Otherwise a block would hold an epoch's images."""
    length(1000)
    data = tiny_data(schedule={"batch_size": 2, "rounds_per_task": 1})
    gather, fetched, most = data.gather, list[Any](), 0

    def noted(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal most
        x, y = gather(*given, **options)
        most = max(most, sum(reference() is not None for reference in fetched))
        fetched.append(weakref.ref(x))
        return x, y

    data.gather = noted  # type: ignore[method-assign]
    fit(tiny_client(data, methods={"er": ER(8)}, engine=EngineOptions(kind)), data)
    assert len(fetched) >= 20
    assert most <= 3
