"""Networks that an engine would train otherwise than plain autograd does are found before training."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pytest
import torch
from support.own_networks import Plain, as_global_model
from support.tiny import fit, permuted, sgd, tiny_client, tiny_data
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cfl.engines import EngineOptions, candidates
from cfl.engines.against_autograd import SAMPLES, AgainstAutograd
from cfl.models.base import Network
from cfl.models.decomposition import decompose, decomposed_layers
from cfl.runtime.errors import ConfigError, EngineCannot

X = torch.randn(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class Normalised(Plain):
    def make(self) -> None:
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))


class InSingle(Plain):
    """Computes in float32 whatever its weights are."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.float())


class Deep(Plain):
    """Batch statistics of few samples, layer upon layer, enlarge rounding: float32's to some thousandths."""

    def make(self) -> None:
        layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())]
        self.body = nn.Sequential(*layers)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1))


class DeepInSingle(Deep):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x.float())


class InBfloat16(Plain):
    """The gradient of a bias before batch statistics is 0, and in bfloat16 it is rounding."""

    def make(self) -> None:
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 1, 3, padding=1),
            nn.BatchNorm2d(1),
        ).bfloat16()

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.bfloat16()).flatten(1).float()


class Complex(Plain):
    def make(self) -> None:
        super().make()
        self.phase = nn.Parameter(torch.ones(16, 2))

    def features(self, x: Tensor) -> Tensor:
        return (super().features(x) * torch.view_as_complex(self.phase)).abs()


class PaddingRow(Plain):
    """Under vmap torch trains the padding row of an embedding."""

    def make(self) -> None:
        self.rows = nn.Embedding(7, 1, padding_idx=0)

    def features(self, x: Tensor) -> Tensor:
        return self.rows(x.flatten(1).abs().long() % 7)[..., 0]


class Centred(Plain):
    """Statistics over the batch without a layer: padding has a part in them."""

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        return h - h.mean(0)


class AsksForGradients(Plain):
    """Under vmap tensors say that they need no gradient."""

    def features(self, x: Tensor) -> Tensor:
        h = super().features(x)
        return 2 * h if self.body.weight.requires_grad else h


class Checkpointed(Plain):
    def features(self, x: Tensor) -> Tensor:
        return checkpoint(super().features, x + 0 * self.body.bias[:1], use_reentrant=True)


class Recurrent(Plain):
    def make(self) -> None:
        self.body = nn.GRU(4, 16, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x[:, 0])[0][:, -1]


class Folded(Plain):
    """BatchNorm over tokens that are folded into the batch, which no padding mask fits."""

    def make(self) -> None:
        self.body = nn.BatchNorm1d(4)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.reshape(-1, 4)).view(len(x), 16)


class Viewed(Plain):
    """Weights of workers have the channels last, with which a map cannot be viewed as rows."""

    def make(self) -> None:
        self.body = nn.Conv2d(1, 4, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).view(len(x), -1)


@pytest.mark.parametrize("make", [Plain, Normalised, InSingle, Deep, DeepInSingle, InBfloat16, Complex])
def test_nothing_differs(make: type[Network]) -> None:
    network = as_global_model(make)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    compared = AgainstAutograd(network, X)
    assert compared.under_vmap() is None
    assert compared.on_a_copy() is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (PaddingRow, "the gradient of rows.weight is not that of plain autograd"),
        (Centred, "the gradient of head.weight is not that of plain autograd"),
        (AsksForGradients, "the gradient of head.weight is not that of plain autograd"),
        (Checkpointed, "RuntimeError"),
        (Recurrent, "RuntimeError"),
        (Folded, "ValueError: a batch mask of 3 samples does not fit a batch of 12"),
    ],
)
def test_what_vmap_computes_otherwise(make: type[Network], said: str) -> None:
    compared = AgainstAutograd(as_global_model(make), X)
    assert said in str(compared.under_vmap())
    assert compared.on_a_copy() is None


def test_what_workers_cannot_compute() -> None:
    compared = AgainstAutograd(as_global_model(Viewed), X)
    assert "view size is not compatible" in str(compared.on_a_copy())
    assert compared.under_vmap() is None


def test_what_copies_of_a_network_share_stays_as_it_is() -> None:
    """FedWeIT's knowledge base is one for all copies."""
    network = as_global_model(Plain)
    decompose(network, attends=True)
    weight = decomposed_layers(network)[0].parts
    weight.reserve(entries=2)
    weight.knowledge.entries = torch.ones(2, 16, 16)
    assert AgainstAutograd(network, X).under_vmap() is None
    assert weight.knowledge.entries.dtype == torch.float32


def run(make: type[Network], kind: Literal["auto", "vmap", "workers"], width: int | Literal["auto"] = "auto") -> Any:
    data = tiny_data(permuted(1), schedule={"cohort_width": width})
    client = tiny_client(data, make, sgd, engine=EngineOptions(kind))
    fit(client, data)
    return client.engine_choice


def test_a_run_takes_an_engine_that_is_right(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(PaddingRow, "auto").kind == "workers"
    assert "vmap does not compute several clients of PaddingRow together: the gradient of rows.weight" in caplog.text
    assert run(PaddingRow, "vmap").width == 1
    assert run(Viewed, "auto").kind == "vmap"
    assert "workers do not compute Viewed: RuntimeError: view size is not compatible" in caplog.text


def test_equal_samples_are_not_compared() -> None:
    """Their batch statistics have no spread, so that gradients are rounding, which engines compute otherwise."""
    network, x = as_global_model(Deep), X[:1].expand(SAMPLES, -1, -1, -1)
    assert AgainstAutograd(network, x).under_vmap() is not None
    options = EngineOptions("vmap")
    found = candidates(options, 2, 2, network, (1, 4, 4), "32-true", 1, samples=lambda: x)
    assert [choice.width for choice in found] == [2]
    with pytest.raises(EngineCannot):
        candidates(options, 2, 2, as_global_model(PaddingRow), (1, 4, 4), "32-true", 1, samples=lambda: X)


def test_a_run_that_leaves_no_engine_is_refused() -> None:
    with pytest.raises(EngineCannot, match=r"schedule\.cohort_width: 1.*the gradient of rows\.weight"):
        run(PaddingRow, "vmap", 2)
    with pytest.raises(ConfigError, match=r"engine\.kind.*vmap or auto.*view size"):
        run(Viewed, "workers")
