"""Parts of a network that training must leave alone: frozen parameters, modules in evaluation mode, constants."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from support.tiny import ConvNet, double, fit, split, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import (
    APD,
    DER,
    EWC,
    FOT,
    GPM,
    RGO,
    SCAFFOLD,
    FedAGEM,
    FedCurv,
    FedProx,
    LearningRateDecay,
    Method,
    SingleTask,
)
from cfl.models import Network
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ENGINES = ["vmap", "workers"]


class Frozen(Network):
    """Two layers and the head. The first layer and the second layer's bias are frozen."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.body, self.fc = nn.Linear(16, 6), nn.Linear(6, 5)
        self.head = nn.Linear(5, num_outputs)
        self.body.requires_grad_(False)
        assert self.fc.bias is not None
        self.fc.bias.requires_grad = False

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(torch.relu(self.body(x.flatten(1)))))


FROZEN = {"body.weight", "body.bias", "fc.bias"}
METHODS: dict[str, Any] = {
    "fedavg": dict,
    "prox": lambda: {"prox": FedProx(mu=0.5)},
    "ewc": lambda: {"ewc": EWC(strength=5.0)},
    "fedcurv": lambda: {"fedcurv": FedCurv(strength=5.0)},
    "scaffold": lambda: {"scaffold": SCAFFOLD(any_optimizer=True)},
    "fed_agem": lambda: {"fed_agem": FedAGEM(samples=8)},
    "der": lambda: {"der": DER(alpha=0.5)},
    "gpm": lambda: {"gpm": GPM(layers=["fc"], threshold=0.9)},
    "fot": lambda: {"fot": FOT(layers=["fc"], protect_bias=False)},
}


def decayed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_frozen_parameters_stay_and_are_not_sent(name: str, engine: Any) -> None:
    data = tiny_data()
    client = tiny_client(data, Frozen, decayed, METHODS[name](), EngineOptions(engine))
    before = {name: tensor.clone() for name, tensor in client.network.named_parameters()}
    federation = fit(client, data)
    for parameter, tensor in federation.network.named_parameters():
        assert torch.equal(tensor, before[parameter]) == (parameter in FROZEN), parameter
    assert set(federation.model.shared_parameters) == set(before) - FROZEN
    trained = 4 * sum(tensor.numel() for key, tensor in before.items() if key not in FROZEN)
    clients_rounds = 4 * 6
    topic = federation.channel.uplink_bytes
    assert topic.get("update", 0) == clients_rounds * trained


def test_no_fisher_is_kept_of_frozen_parameters() -> None:
    data = tiny_data()
    federation = fit(tiny_client(data, Frozen, decayed, {"ewc": EWC(strength=5.0)}), data)
    trained = set(federation.model.shared_parameters)
    for client in range(4):
        kept = federation.clients.get("ewc", client)
        assert kept is not None
        assert {name.partition(" ")[2] for name in kept} == trained


@pytest.mark.parametrize("kind", [FOT, GPM, RGO])
def test_layers_that_nobody_trains_need_no_protection(kind: Any) -> None:
    data, method = tiny_data(), kind()
    federation = fit(tiny_client(data, Frozen, decayed, {"some": method}), data)
    layers = {row["layer"] for row in method.report().rows}
    assert layers == {"fc", "head"}
    assert federation.finished
    data, method = tiny_data(), kind(layers=["b*"])
    with pytest.raises(ConfigError, match=r"layers = 'body, whose weight is frozen' .*layers that are trained"):
        fit(tiny_client(data, Frozen, decayed, {"some": method}), data)


def test_freezing_is_training_the_rest() -> None:
    """Freezing parameters trains the others as an optimizer that skips these parameters does."""

    class Selective(torch.optim.SGD):
        """SGD that skips three of the parameters, found by their positions."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = closure()  # Lightning's, which computes the gradients
            for place in places:
                self.param_groups[0]["params"][place].grad = None
            super().step()
            return loss

    Selective.__name__ = "SGD"

    class Open(Frozen):
        def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
            super().__init__(input_shape, num_outputs)
            self.requires_grad_(True)

    places = [place for place, (name, _) in enumerate(Open((1, 4, 4), 4).named_parameters()) if name in FROZEN]
    found = []
    for network, optimizer in ((double(Frozen), decayed), (double(Open), None)):
        data = tiny_data()
        make = optimizer or (lambda parameters: Selective(parameters, lr=0.1, momentum=0.5, weight_decay=0.1))
        found.append(weights(fit(tiny_client(data, network, make), data)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_a_network_without_anything_to_train_is_refused() -> None:
    class Still(Frozen):
        def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
            super().__init__(input_shape, num_outputs)
            self.requires_grad_(False)

    with pytest.raises(ConfigError, match=r"model\.network = 'Still with all parameters frozen'"):
        tiny_client(tiny_data(), Still)


def test_a_network_that_cannot_be_built_with_its_options_is_refused() -> None:
    class Dropping(Frozen):
        def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
            super().__init__(input_shape, num_outputs)
            self.dropout = torch.nn.Dropout(1.000000001)

    with pytest.raises(ConfigError, match=r"model\.network = 'Dropping' .* options \(dropout probability has to be"):
        tiny_client(tiny_data(), Dropping)


def test_methods_that_replace_frozen_layers_are_refused() -> None:
    data = tiny_data(split())
    with pytest.raises(ConfigError, match=r"model\.network = .*body.*valid: a network without frozen parameters"):
        tiny_client(data, Frozen, methods={"apd": APD()})


class StillNorm(ConvNet):
    """A network whose first BatchNorm is in evaluation mode, with its own statistics."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, norm=True)
        assert isinstance(self.conv_norm, nn.BatchNorm2d)
        self.conv_norm.running_mean = torch.tensor([0.3, -0.2])
        self.conv_norm.eval()


class StillDropout(Network):
    """A chain of layers whose dropout is in evaluation mode."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.fc, self.dropout, self.head = nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, num_outputs)
        self.dropout.eval()

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.fc(x.flatten(1))))


class NoDropout(StillDropout):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.dropout.p = 0.0


def trained(network: Any, engine: Any, data: FederatedDataModule | None = None) -> Federation:
    data = tiny_data() if data is None else data
    client: Client = tiny_client(data, double(network), engine=EngineOptions(engine))
    return fit(client, data)


@pytest.mark.parametrize("engine", ENGINES)
def test_batchnorm_in_evaluation_mode_keeps_its_statistics(engine: Any) -> None:
    federation = trained(StillNorm, engine)
    torch.testing.assert_close(federation.network.conv_norm.running_mean, torch.tensor([0.3, -0.2]).double())
    assert not torch.equal(federation.network.fc_norm.running_mean, torch.zeros(5).double())


@pytest.mark.parametrize("network", [StillNorm, StillDropout])
def test_engines_agree_on_modules_in_evaluation_mode(network: Any) -> None:
    found = [weights(trained(network, engine)) for engine in ENGINES]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_in_evaluation_mode_drops_nothing(engine: Any) -> None:
    found = [weights(trained(network, engine)) for network in (StillDropout, NoDropout)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


class Constants(Network):
    """A network with constant buffers: a mask with minus infinity, as in attention, and large counts."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, persistent: bool = False) -> None:
        super().__init__(input_shape, num_outputs)
        self.fc, self.head = nn.Linear(16, 5), nn.Linear(5, num_outputs)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf, -torch.inf]), persistent=persistent)
        self.register_buffer("counts", torch.tensor([2**40 + 1, 2**24 + 1]))

    def features(self, x: Tensor) -> Tensor:
        return torch.softmax(self.fc(x.flatten(1)) + self.mask, 1)


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
@pytest.mark.parametrize("engine", ENGINES)
def test_constants_are_left_alone(batchnorm: str, engine: Any) -> None:
    data = tiny_data()
    client = tiny_client(data, Constants, engine=EngineOptions(engine))
    federation = fit(client, data, {"batchnorm": batchnorm})
    assert federation.network.mask.tolist() == [0.0, 0.0, 0.0, -torch.inf, -torch.inf]
    assert federation.network.counts.tolist() == [2**40 + 1, 2**24 + 1]
    counts = {"average": ("counts",), "local": (), "drop": ()}[batchnorm]
    assert federation.model.shared_buffers == counts
    assert federation.model.personal == (frozenset({"counts"}) if batchnorm == "local" else frozenset())


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
@pytest.mark.parametrize(
    "method",
    [LearningRateDecay(patience=1), APD(), SCAFFOLD("I"), FedCurv(0.5), SingleTask()],
    ids=lambda method: type(method).__name__,
)
def test_constants_are_no_sign_of_bad_training(method: Method, batchnorm: str) -> None:
    """An infinite constant does not count as failed training for methods that keep tensors of clients."""
    data = tiny_data(validation=0.2)
    methods = {"some": copy.deepcopy(method)}
    federation = fit(tiny_client(data, Constants, methods=methods), data, {"batchnorm": batchnorm})
    assert federation.finished
    assert federation.channel.skipped == []


def test_infinities_in_what_is_exchanged_are_refused() -> None:
    data = tiny_data()
    client = tiny_client(data, lambda shape, outputs: Constants(shape, outputs, persistent=True))
    with pytest.raises(ConfigError, match=re.escape("model.network = 'Constants, whose buffer mask has others'")):
        fit(client, data)


class Masked(Constants):
    """A network whose only buffer is the mask."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        del self.counts


def test_constants_are_no_statistics_to_be_dropped() -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"federated\.batchnorm = 'drop' .*keeps no statistics"):
        fit(tiny_client(data, Masked), data, {"batchnorm": "drop"})
