"""Quadratic penalties as pulls: their gradient, and a pull as part of the engine's own SGD step."""

from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import DECAY, ConvNet, fit, mlp, permuted, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.data.partitions import Dirichlet
from cfl.engines import EngineOptions, recorded
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.engines.updates import KeepGradients
from cfl.methods import ER, EWC, FedCurv, FedProx, Method
from cfl.models import MLP, Network
from cfl.training.client import Client

VMAP = EngineOptions("vmap")


@pytest.mark.parametrize("strength", ["number", "by weight", "by client and weight"])
def test_a_pull_is_the_gradient_of_its_penalty(strength: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    shape = {"number": (), "by weight": (1, 4, 5), "by client and weight": (3, 4, 5)}[strength]
    s = torch.rand(shape, generator=generator, dtype=torch.float64)
    anchor = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad((s / 2 * (w - anchor).square()).sum(), w)[0]
    before = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    gradient = before.clone()
    with torch.no_grad():
        Pull(s if s.ndim else float(s), anchor).add_to(gradient, w)
    torch.testing.assert_close(gradient - before, expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("strength", [0.7, 15.0])
def test_a_step_with_it_is_that_of_sgd(weight_decay: float, strength: float) -> None:
    """A step with a pull is SGD's on the penalised loss, even a strong pull that overshoots the anchor (rate 0.1)."""
    generator = torch.Generator().manual_seed(0)
    w, g, anchor = (torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    parameter = nn.Parameter(w.clone())
    parameter.grad = g + strength * (w - anchor)
    torch.optim.SGD([parameter], lr=0.1, weight_decay=weight_decay).step()
    towards, share = Pull(strength, anchor).step(0.1, weight_decay)
    assert share.shape == ()
    stepped = w.lerp(towards, share).mul_(1 - 0.1 * weight_decay).sub_(g, alpha=0.1)
    torch.testing.assert_close(stepped, parameter.detach())


class Branches(Network):
    """A network that is no chain of layers, so autograd computes its gradients."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.left, self.right = nn.Linear(16, 6), nn.Linear(16, 6)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return torch.relu(self.left(x)) * torch.sigmoid(self.right(x))


class OwnAnchors(Method):
    """Pulls each client to its own anchors, some weights with strength 0 and ``head.bias`` not at all."""

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        found = {}
        for name, parameter in cohort.parameters.items():
            generator = torch.Generator().manual_seed(len(name))
            shape = (self.context.num_clients, *parameter.shape[1:])
            strength, anchor = (torch.rand(shape, generator=generator)[list(cohort.clients)] for _ in range(2))
            found[name] = Pull(strength.sub_(0.3).clamp_(min=0), anchor)
        found.pop("head.bias")
        return found


def methods_of(name: str) -> dict[str, Method]:
    makes: dict[str, Any] = {
        "fedprox": lambda: FedProx(0.8),
        "ewc": lambda: EWC(3.0),
        "fedcurv": lambda: FedCurv(0.3),
        "own": OwnAnchors,
    }
    return {"pulls": makes[name]()}


def trained(
    engine: EngineOptions, methods: dict[str, Method], network: Any = mlp, optimizer: Any = DECAY
) -> tuple[dict[str, Tensor], Client]:
    """Train four clients of different sizes on two tasks, in cohorts of three."""
    data = tiny_data(permuted(), schedule={"cohort_width": 3, "batch_size": 4}, partition=Dirichlet(alpha=1.0))
    client = tiny_client(data, network, optimizer, methods, engine)
    return weights(fit(client, data)), client


def engines_of(network: Any) -> list[EngineOptions]:
    if network is ConvNet:
        return [EngineOptions("workers", 2, batch_last=last) for last in (False, True)]
    stacks = (1, 3) if network is not Branches else (1,)
    return [EngineOptions("workers", 2, stack) for stack in stacks]


@pytest.mark.parametrize(
    "network", [partial(MLP, hidden=[8], dropout=0.3), ConvNet, Branches], ids=["mlp", "conv", "other"]
)
@pytest.mark.parametrize("name", ["fedprox", "ewc", "fedcurv", "own"])
def test_engines_that_step_at_once_agree_with_gradients(
    name: str, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained(VMAP, {}, network)
    expected, _ = trained(VMAP, methods_of(name), network)
    assert not torch.allclose(plain["head.weight"], expected["head.weight"], atol=1e-3)

    def never(*_: Any) -> None:
        raise AssertionError("a gradient has been written")

    for engine in engines_of(network):
        monkeypatch.setattr(KeepGradients, "product", never)
        monkeypatch.setattr(KeepGradients, "gradient", never)
        found, _ = trained(engine, methods_of(name), network)
        monkeypatch.undo()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("network", [mlp, ConvNet])
def test_recorded_steps_pull_alike(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    made: set[int] = set()
    record = recorded.RecordedSteps._record

    def counted(*given: Any) -> Any:
        made.add(worth)
        return record(*given)

    monkeypatch.setattr(recorded.RecordedSteps, "_record", counted)
    for worth in (1, 10**9):
        monkeypatch.setattr(recorded, "WORTH_RECORDING", worth)
        engine = EngineOptions("workers", 2, 1, batch_last=network is ConvNet)
        runs.append([trained(engine, methods_of(name), network)[0] for name in ("fedprox", "own")])
    assert made == {1}
    for replayed, written in zip(*runs, strict=True):
        for name, value in replayed.items():
            assert torch.equal(value, written[name])


def test_with_replayed_samples_too() -> None:
    """Engines agree on pulls beside replayed samples, which have another loss."""

    def made() -> dict[str, Method]:
        return {"fedprox": FedProx(0.8), "er": ER()}

    expected, _ = trained(VMAP, made())
    for stack in (1, 3):
        found, _ = trained(EngineOptions("workers", 2, stack), made())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


class Halve(Method):
    """Halves every gradient, including the parts that other methods have added."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values():
            gradient.mul_(0.5)


@pytest.mark.parametrize(
    ("optimizer", "methods"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {}),
        (partial(torch.optim.Adam, lr=0.01), {}),
        (DECAY, {"halve": Halve}),
        (partial(torch.optim.SGD, lr=0.1, weight_decay=10.0), {}),  # 1 - lr * decay = 0
    ],
    ids=["momentum", "adam", "another method", "decay to nothing"],
)
def test_elsewhere_it_is_added_to_the_gradient(optimizer: Any, methods: dict[str, Any]) -> None:
    def made() -> dict[str, Method]:
        return {**methods_of("own"), **{name: make() for name, make in methods.items()}}

    expected, _ = trained(VMAP, made(), optimizer=optimizer)
    found, _ = trained(EngineOptions("workers", 2), made(), optimizer=optimizer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
