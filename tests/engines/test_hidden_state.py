"""Networks that keep state outside of their tensors are refused before training."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.own_networks import Plain, as_global_model
from support.tiny import fit, permuted, sgd, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.engines.hidden_state import check_hidden_state
from cfl.models.base import Network
from cfl.runtime.errors import ConfigError

X = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class InAList(Plain):
    def make(self) -> None:
        super().make()
        self.more = [nn.Parameter(torch.ones(16))]

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.more[0]


class InALambda(Plain):
    def make(self) -> None:
        super().make()
        self.act: Callable[[Tensor], Tensor] = lambda x: torch.tanh(self.body(x))

    def features(self, x: Tensor) -> Tensor:
        return self.act(x.flatten(1))


class Counts(Plain):
    """A buffer that changes in place and has a part in the outputs."""

    count: Tensor

    def make(self) -> None:
        super().make()
        self.register_buffer("count", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().features(x) * self.count


class Assigns(Counts):
    def features(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return Plain.features(self, x)


class CountsInPython(Plain):
    count = 0

    def features(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().features(x) * self.count


class PythonsRandom(Plain):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * random.random()


class NumpysRandom(Plain):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * float(np.random.rand())  # noqa: NPY002


class OwnGenerator(Plain):
    def make(self) -> None:
        super().make()
        self.generator = torch.Generator()

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * torch.rand((), generator=self.generator)


class TorchsRandom(Plain):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * torch.rand(())


class KeepsItsGraph(Plain):
    last: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        if self.last is not None:
            h = h + 0 * self.last
        self.last = h
        return h


class WithAHook(Plain):
    def make(self) -> None:
        super().make()
        self.body.weight.register_hook(lambda gradient: gradient * 2)


class Sparse(Plain):
    def make(self) -> None:
        self.rows = nn.Embedding(7, 1, sparse=True)

    def features(self, x: Tensor) -> Tensor:
        return self.rows(x.flatten(1).abs().long() % 7)[..., 0]


class Dense(Sparse):
    def make(self) -> None:
        self.rows = nn.Embedding(7, 1)


class Integers(Plain):
    def make(self) -> None:
        super().make()
        self.order = nn.Parameter(torch.arange(16), requires_grad=False)


class OldWeightNorm(Plain):
    def make(self) -> None:
        with pytest.warns(FutureWarning):
            self.body = nn.utils.weight_norm(nn.Linear(16, 16))


class TorchScript(Plain):
    def make(self) -> None:
        self.body = torch.jit.script(nn.Linear(16, 16))


class GradientOfTheInput(Plain):
    """What reentrant checkpointing needs."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.requires_grad_())


class MadeAtFirstUse(Plain):
    places: Tensor | None

    def make(self) -> None:
        super().make()
        self.register_buffer("places", None, persistent=False)

    def features(self, x: Tensor) -> Tensor:
        if self.places is None:
            self.places = torch.linspace(0, 1, 16)
        return super().features(x) + self.places


class NoGradient(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (InAList, "uses a parameter [16] that no module holds"),
        (InALambda, "reaches body.weight by a function that holds the network"),
        (Assigns, "assigns the buffer count in forward"),
        (CountsInPython, "two passes over the same samples differ"),
        (PythonsRandom, "two passes over the same samples differ"),
        (NumpysRandom, "two passes over the same samples differ"),
        (OwnGenerator, "two passes over the same samples differ"),
        (KeepsItsGraph, "uses an activation of an earlier pass"),
        (WithAHook, "parameter body.weight has a hook"),
        (Sparse, "a sparse gradient of a parameter [7, 1]"),
        (Integers, "parameter order is torch.int64"),
        (OldWeightNorm, "cannot be copied"),
        (TorchScript, "part body is TorchScript"),
        (NoGradient, "step fails: RuntimeError"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hidden_state_is_refused(make: type[Network], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_hidden_state(as_global_model(make), X)
    assert error.value.key == "model.network"
    assert said in error.value.value


@pytest.mark.parametrize("make", [Plain, Counts, TorchsRandom, Dense, GradientOfTheInput, MadeAtFirstUse])
def test_other_networks_pass_and_stay_as_they_are(make: type[Network]) -> None:
    network = as_global_model(make)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random_state = torch.get_rng_state()
    check_hidden_state(network, X)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_run_refuses_it_before_training() -> None:
    data = tiny_data(permuted(1))
    client = tiny_client(data, InALambda, sgd)
    with pytest.raises(ConfigError, match=r"model\.network.*holds the network"):
        fit(client, data)
    assert client.federation is not None
    assert client.federation.round == 0
