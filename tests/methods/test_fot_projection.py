"""FedProject: steps of later tasks do not change what protected layers compute on old inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import Hook, plain_network, train_client
from support.naive_fot import Watch, layer_rows, projector, train_images
from support.tiny import NetworkFactory, StridedNet, double, fit, mlp, norm_net, sgd, split, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.sources import Synthetic
from cfl.data.streams import ClassSplit, Permuted, Stream
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.methods import FOT, CFeD, Method, PersonalLayers
from cfl.models import MLP
from cfl.runtime.errors import ConfigError

wide_mlp: NetworkFactory = partial(MLP, hidden=[12, 9], dropout=0.0)
precise_mlp = double(wide_mlp)


class WideConv(StridedNet):
    """A StridedNet whose first layer has 48 inputs, a space that a few patches do not span."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv1 = torch.nn.Conv2d(input_shape[0], 3, 4, stride=2, padding=1)
        self.conv2 = torch.nn.Conv2d(3, 10, 3, stride=2, padding=1)
        self.fc = torch.nn.Linear(10, 12)
        self.head = torch.nn.Linear(12, num_outputs)


def few_images(scenario: str, classes: int = 2) -> Stream:
    """Tasks of four training images each, whose inputs span the input space of no layer."""
    if scenario == "domain":
        return Permuted(Synthetic(classes, [3, 4, 4], 4, 8), 2)
    return ClassSplit(Synthetic(2 * classes, [3, 4, 4], 8, 8), 2)


def watched(
    data: FederatedDataModule, make: NetworkFactory, fot: FOT | None, optimizer: Any = sgd, **federated: Any
) -> Watch:
    watch = Watch(fot)
    fit(tiny_client(data, make, optimizer, {"fot": fot} if fot else {}), data, federated, [watch])
    return watch


def matrix(model: dict[str, Tensor], layer: str, with_bias: bool = False) -> np.ndarray:
    """A layer's weight ``[o, d]`` in float64, on request with the bias as a last column."""
    weight = model[f"{layer}.weight"].double().flatten(1)
    columns = [weight, model[f"{layer}.bias"].double()[:, None]] if with_bias else [weight]
    return torch.cat(columns, 1).numpy()


def distance(watch: Watch, name: str, first: int, last: int) -> float:
    """Greatest change of a tensor between two rounds."""
    return float((watch.models[last][name] - watch.models[first][name]).abs().max())


# Old inputs, old outputs


@pytest.mark.parametrize("make", [wide_mlp, WideConv], ids=["mlp", "convolutions"])
@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_with_biases_protected_and_every_input_covered_old_outputs_stay(make: NetworkFactory, scenario: str) -> None:
    """Training the second task moves all weights and no output on the first task's training images."""
    schedule = {"rounds_per_task": 5, "local_epochs": 4, "batch_size": 1}
    data = tiny_data(few_images(scenario), num_clients=2, schedule=schedule)
    x, own = train_images(data, 0), data.outputs.own[0]
    changes = {}
    for fot in (FOT(threshold=1.0, protect_bias=True), None):
        watch = watched(data, make, fot)
        before, after = (plain_network(data, make, watch.models[r]).eval() for r in (5, 10))
        with torch.no_grad():
            changes["fot" if fot else "fedavg"] = float((after(x) - before(x))[:, own].abs().max())
        if fot:
            assert all(distance(watch, f"{name}.weight", 5, 10) > 1e-3 for name in fot.bases)
            assert all(0 < basis.shape[1] < len(basis) for basis in fot.bases.values())
    assert changes["fot"] < 1e-5
    assert changes["fedavg"] > 0.1


def test_with_free_biases_a_layers_product_with_old_inputs_stays_and_its_output_moves() -> None:
    data = tiny_data(few_images("domain"), num_clients=2, schedule={"rounds_per_task": 5, "local_epochs": 4})
    fot = FOT(threshold=1.0)
    watch = watched(data, wide_mlp, fot)
    before, x = plain_network(data, wide_mlp, watch.models[5]), train_images(data, 0)
    for layer in ("layers.0", "layers.1", "head"):
        change = matrix(watch.models[10], layer) - matrix(watch.models[5], layer)
        rows = layer_rows(before, layer, x)
        assert abs(rows @ change.T).max() < 1e-5, layer
        assert abs(change).max() > 1e-3, layer
        assert not torch.equal(watch.models[5][f"{layer}.bias"], watch.models[10][f"{layer}.bias"])


# The projection itself


def naive_projection(step: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Remove every direction's share from each row of a step."""
    result = step.copy()
    for row in result:
        for direction in basis.T:
            row -= (row @ direction) * direction
    return result


@pytest.mark.parametrize("protect_bias", [False, True])
def test_a_run_is_federated_averaging_with_projected_steps(protect_bias: bool) -> None:
    """Eq (6) on every protected layer in rounds of later tasks, and the clients' mean step for everything else."""
    data = tiny_data(schedule={"rounds_per_task": 2})
    fot = FOT(threshold=0.8, protect_bias=protect_bias)
    watch = watched(data, double(wide_mlp), fot)
    for number in range(data.num_rounds):
        received = watch.models[number]
        one_round = mean_update(data, number, received)
        for layer in ("layers.0", "layers.1", "head"):
            step = matrix(one_round, layer, with_bias=True)
            basis = watch.bases[number].get(layer)
            assert (basis is None) == (number < 2)
            if basis is not None and protect_bias:
                step = naive_projection(step, basis.double().numpy())
            elif basis is not None:
                step[:, :-1] = naive_projection(step[:, :-1], basis.double().numpy())
            taken = matrix(watch.models[number + 1], layer, True) - matrix(received, layer, True)
            np.testing.assert_allclose(taken, step, rtol=0, atol=1e-6)  # bases are float32


def mean_update(
    data: FederatedDataModule,
    number: int,
    start: dict[str, Tensor],
    make: NetworkFactory = precise_mlp,
    optimizer: Any = sgd,
    change_gradients: Hook | None = None,
) -> dict[str, Tensor]:
    """The clients' mean update of one round."""
    plan = data.rounds.round(number)
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
    for client in plan.clients:
        network = plain_network(data, make, start)
        train_client(network, data, plan, client, optimizer, change_gradients=change_gradients)
        for name, value in network.state_dict().items():
            total[name] += (value - start[name]) / len(plan.clients)
    return total


@pytest.mark.parametrize(
    ("optimizer", "federated"),
    [
        (sgd, {"server_momentum": 0.9, "server_lr": 0.7}),
        (partial(torch.optim.Adam, lr=0.02, weight_decay=0.1), {"server_momentum": 0.5}),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), {}),
    ],
    ids=["server momentum", "adam", "momentum and decay"],
)
def test_no_step_of_a_later_task_reaches_the_basis(optimizer: Any, federated: dict[str, Any]) -> None:
    """(W_new - W_old) O = 0, also with momentum from earlier rounds and weight decay."""
    data = tiny_data(schedule={"rounds_per_task": 3})
    fot = FOT(threshold=0.9)
    watch = watched(data, double(StridedNet), fot, optimizer, **federated)
    for number in range(3, 6):
        for layer, basis in watch.bases[number].items():
            assert 0 < basis.shape[1] < len(basis)
            change = matrix(watch.models[number + 1], layer) - matrix(watch.models[number], layer)
            assert abs(change @ basis.double().numpy()).max() < 1e-6 * np.linalg.norm(change) + 1e-12, layer
            assert np.linalg.norm(change) > 1e-4, layer


def test_bases_grow_and_keep_what_they_protect() -> None:
    data = tiny_data(split(3, classes=6, train=96), schedule={"rounds_per_task": 2})
    watch = watched(data, wide_mlp, FOT(threshold=0.7))
    for layer in ("layers.0", "layers.1"):
        first, second = watch.bases[2][layer], watch.bases[4][layer]
        assert torch.equal(second[:, : first.shape[1]], first)
        assert second.shape[1] > first.shape[1]
        np.testing.assert_allclose(projector(second) @ projector(first), projector(first), rtol=0, atol=1e-6)


def test_heads_of_their_own_tasks_are_free() -> None:
    """Task-incremental: a new head may change on inputs of earlier tasks, and earlier heads do not move."""
    data = tiny_data(few_images("task"), num_clients=2, schedule={"rounds_per_task": 3, "local_epochs": 3})
    watch = watched(data, double(wide_mlp), FOT(threshold=1.0))
    old, new = data.outputs.own[0].numpy(), data.outputs.own[1].numpy()
    change = matrix(watch.models[6], "head", True) - matrix(watch.models[3], "head", True)
    assert (change[old] == 0).all()
    rows = layer_rows(plain_network(data, double(wide_mlp), watch.models[3]), "head", train_images(data, 0), True)
    assert abs(rows @ change[new].T).max() > 1e-2


def test_a_protected_head_of_all_tasks_is_projected_too() -> None:
    data = tiny_data(few_images("task"), num_clients=2, schedule={"rounds_per_task": 3, "local_epochs": 3})
    watch = watched(data, double(wide_mlp), FOT(threshold=1.0, layers=["head"]))
    change = matrix(watch.models[6], "head") - matrix(watch.models[3], "head")
    rows = layer_rows(plain_network(data, double(wide_mlp), watch.models[3]), "head", train_images(data, 0))
    assert list(watch.bases[-1]) == ["head"]
    assert abs(rows @ change.T).max() < 1e-6
    assert abs(change).max() > 1e-3


# Layers that stop moving


def test_a_full_basis_freezes_its_layer_and_training_goes_on() -> None:
    """80 noisy images of 16 pixels span the input space of the first layer."""
    data = tiny_data(schedule={"rounds_per_task": 3})
    watch = watched(data, mlp, FOT(threshold=1.0, layers=["layers.0"]))
    first, after, last = (watch.models[r] for r in (3, 4, 6))
    assert watch.bases[3]["layers.0"].shape == (16, 16)
    assert torch.equal(first["layers.0.weight"], last["layers.0.weight"])
    assert not torch.equal(after["layers.0.bias"], last["layers.0.bias"])
    assert not torch.equal(after["head.weight"], last["head.weight"])


@pytest.mark.parametrize("layers", [None, ["layers.1"]])
def test_the_first_layer_can_be_frozen_after_the_first_task(layers: list[str] | None) -> None:
    data = tiny_data(schedule={"rounds_per_task": 2})
    fot = FOT(threshold=0.8, freeze_first_layer=True, layers=layers)
    watch = watched(data, wide_mlp, fot, server_momentum=0.5)
    for name in ("layers.0.weight", "layers.0.bias"):
        assert not torch.equal(watch.models[1][name], watch.models[2][name])
        assert all(torch.equal(watch.models[2][name], later[name]) for later in watch.models[3:])
    assert "layers.0" not in fot.bases
    assert not torch.equal(watch.models[2]["layers.1.weight"], watch.models[4]["layers.1.weight"])


class Trained(Method):
    """Records clients' received and trained parameters by round."""

    def __init__(self) -> None:
        self.models: dict[int, list[dict[str, Tensor]]] = {}
        self.received: dict[int, dict[str, Tensor]] = {}

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self.received[cohort.round] = {name: value.clone() for name, value in cohort.global_parameters.items()}
        for row in positions:
            model = {name: value[row].detach().clone() for name, value in cohort.parameters.items()}
            self.models.setdefault(cohort.round, []).append(model)


DECAY = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
ADAM = partial(torch.optim.AdamW, lr=0.02, eps=1e-2, weight_decay=0.1)  # a smaller eps would enlarge rounding
WORKERS = EngineOptions("workers", 2, stack=1)


@pytest.mark.parametrize(
    ("make", "engine", "width", "optimizers"),
    [
        (wide_mlp, EngineOptions("vmap"), 3, [MOMENTUM, ADAM]),
        (wide_mlp, EngineOptions("vmap"), 1, [MOMENTUM]),
        (wide_mlp, WORKERS, 3, [DECAY, MOMENTUM, ADAM]),
        (wide_mlp, EngineOptions("workers", 2, stack=2), 4, [DECAY, MOMENTUM]),
        (norm_net, EngineOptions("vmap"), 3, [MOMENTUM]),
        (norm_net, WORKERS, 3, [DECAY, MOMENTUM]),
    ],
    ids=["vmap", "one by one", "chain", "stacked chains", "batchnorm, vmap", "batchnorm, workers"],
)
def test_clients_do_not_move_a_frozen_layer_either(
    make: NetworkFactory, engine: EngineOptions, width: int, optimizers: list[Any]
) -> None:
    """Frozen layers stay as received, bit for bit, despite weight decay. The other layers are trained as usual."""
    for optimizer in optimizers:
        assert_frozen(make, engine, width, optimizer)


def assert_frozen(make: NetworkFactory, engine: EngineOptions, width: int, optimizer: Any) -> None:
    data = tiny_data(schedule={"rounds_per_task": 2, "cohort_width": width})
    first = "layers.0" if make is wide_mlp else "conv"
    # No layer is projected, so that the server's step is the clients' mean.
    fot, trained = FOT(freeze_first_layer=True, layers=[]), Trained()
    watch = Watch(fot)
    fit(tiny_client(data, make, optimizer, {"fot": fot, "trained": trained}, engine), data, None, [watch])
    assert all(len(models) == len(data.rounds.round(number).clients) for number, models in trained.models.items())
    for number, models in trained.models.items():
        for name, received in trained.received[number].items():
            moved = [not torch.equal(model[name], received) for model in models]
            assert not any(moved) if number >= 2 and name.startswith(f"{first}.") else all(moved), (number, name)

    def freeze(network: nn.Module, client: int) -> None:
        for parameter in network.get_submodule(first).parameters():
            parameter.grad = None

    for number in (2, 3):
        step = mean_update(data, number, watch.models[number], make, optimizer, freeze)
        for name in trained.received[number]:
            taken = watch.models[number + 1][name] - watch.models[number][name]
            torch.testing.assert_close(taken, step[name].float(), rtol=0, atol=2e-5)


def test_nothing_moves_the_model_behind_the_projection() -> None:
    """Refuse server distillation, which would move protected and frozen layers."""
    methods: dict[str, Method] = {"fot": FOT(0.9), "cfed": CFeD(Synthetic(4, [1, 4, 4], 40, 8), server_distillation=1)}
    data = tiny_data(schedule={"rounds_per_task": 1})
    with pytest.raises(ConfigError, match="methods without cfed") as caught:
        fit(tiny_client(data, mlp, sgd, methods), data)
    assert caught.value.key == "methods"


def test_what_is_not_the_servers_cannot_be_frozen() -> None:
    data = tiny_data(schedule={"rounds_per_task": 1})
    methods = {"own": PersonalLayers(["layers.0.bias"]), "fot": FOT(freeze_first_layer=True)}
    with pytest.raises(ConfigError, match=r"layers\.0") as caught:
        fit(tiny_client(data, wide_mlp, sgd, methods), data)
    assert caught.value.key == "methods.fot.freeze_first_layer"


ZEROS, OTHER = [0.0] * 16, [1.0, 2.0, *[0.0] * 14]


@pytest.mark.parametrize("inputs", [[ZEROS], [ZEROS, OTHER]], ids=["zeros", "zeros and others"])
def test_clients_lose_no_direction_because_some_inputs_are_zero(inputs: list[list[float]]) -> None:
    """An input of zeros, with its 1 for the bias, protects the bias alone: no direction of the weights."""

    class Protecting(FOT):
        seen: list[Tensor]

        def _protection(self, name: str, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
            rows = torch.cat([torch.tensor(inputs), torch.ones(len(inputs), 1)], 1)
            return (torch.linalg.qr(rows.T).Q, None) if self.bases else (None, None)

        def _right_factors(self, cohort: Cohort) -> dict[str, Any]:
            found = super()._right_factors(cohort)
            if self.bases:
                factor = found.get("layers.0.weight")
                self.seen.append(torch.eye(16) if factor is None else _dense(factor))
            return found

    def _dense(factor: Any) -> Tensor:
        first: Tensor = factor.matrix[0]
        return torch.eye(len(first)) - first @ first.T if factor.removes else first

    fot = Protecting(0.9, layers=["layers.0"], protect_bias=True, project_clients=True)
    fot.seen = []
    data = tiny_data(schedule={"rounds_per_task": 2})
    fit(tiny_client(data, mlp, sgd, {"fot": fot}), data)
    direction = torch.tensor(inputs).sum(0) / max(1.0, math.hypot(*inputs[-1]))
    expected = torch.eye(16) - torch.outer(direction, direction)
    assert fot.seen
    for found in fot.seen:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_frozen_bias_needs_no_protection() -> None:
    def frozen(*given: Any) -> nn.Module:
        network = mlp(*given)
        network.get_submodule("layers.0").bias.requires_grad_(False)
        return network

    data, fot = tiny_data(), FOT(threshold=0.9, protect_bias=True)
    watch = watched(data, frozen, fot)
    assert {name: len(basis) for name, basis in fot.bases.items()} == {"layers.0": 16, "head": 9}
    assert torch.equal(watch.models[0]["layers.0.bias"], watch.models[-1]["layers.0.bias"])
