"""Networks that are wrong on purpose are caught; those of the package pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cfl.models import MLP, Network, SmallCNN
from cfl.testing import check_network
from cfl.testing.tiny_networks import NetworkFactory, norm_net


class Good(Network):
    """A convolution with BatchNorm and dropout."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv, self.norm, self.drop = nn.Conv2d(input_shape[0], 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.3)
        self.head = nn.Linear(3 * (input_shape[1] - 2) * (input_shape[2] - 2), num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.conv(x))).flatten(1))


class Flat(Network):
    """The head alone; most wrong networks differ from it in one thing."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Headless(Flat):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.out = self.head
        del self.head


class OfTokens(Network):
    """Takes whole numbers from 0 to 9 only."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.embedding = nn.Embedding(10, 3)
        self.head = nn.Linear(3, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return self.embedding(x.flatten(1).long()).mean(1)


class OtherFeatures(Flat):
    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


class PastTheHead(Flat):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class TwoNames(Flat):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.first = self.second = nn.Linear(self.head.in_features, self.head.in_features)

    def features(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.flatten(1))))


class MixesSamples(Flat):
    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) - x.flatten(1).mean(0)


class OtherNorm(Flat):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.norm = nn.BatchNorm3d(1)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x[:, None]).flatten(1)


class NormOverPadding(Good):
    """Subtracts the mean of the batch, to which padded samples contribute."""

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return (x - x.mean(0) if self.training else x).flatten(1)


class Branches(Flat):
    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) if self.head.bias.sum().item() > 0 else -x.flatten(1)


class Remembers(Flat):
    """Has a state that no buffer holds."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.calls = 0

    def features(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x.flatten(1) * (1 + 0.1 * self.calls)


class FailsForOneSample(Flat):
    def features(self, x: Tensor) -> Tensor:
        return torch.stack(list(x.squeeze(0).flatten(1))) if len(x) > 1 else x.squeeze().flatten(2)


class FailsInTraining(Flat):
    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ x.new_zeros(3, 3) if self.training else x.flatten(1)


class NormFailsInTraining(Good):
    def features(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)) if self.training else super().features(x)


class FailsWithoutGradient(Flat):
    """Fails in training after the checks of its state, which compute gradients."""

    def features(self, x: Tensor) -> Tensor:
        if self.training and not torch.is_grad_enabled():
            raise RuntimeError("needs gradients")
        return x.flatten(1)


class Detached(Flat):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.requires_grad_(False)


GOOD: list[NetworkFactory] = [Good, Flat, norm_net, partial(MLP, hidden=[7], dropout=0.2)]


@pytest.mark.parametrize("make", GOOD, ids=["good", "flat", "norm_net", "mlp"])
def test_good_networks_pass(make: NetworkFactory) -> None:
    check_network(make, (1, 4, 4), 3)


def test_other_shapes() -> None:
    check_network(SmallCNN, (2, 16, 17), 5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Headless, r"^head: .*Headless, whose head is missing.*nn\.Linear"),
        (
            OfTokens,
            r"^head: OfTokens fails on images \[5, 1, 4, 4\] of normally distributed numbers.*: IndexError: index",
        ),
        (OtherFeatures, r"^head: features of OtherFeatures gives \[5, 1, 4, 4\]; what enters head is \[5, 16\]"),
        (PastTheHead, r"^head: forward of PastTheHead gives something else than head.*: their logits differs by 0\.\d"),
        (TwoNames, r"^names: .*whose module first is second as well"),
        (MixesSamples, r"^samples: in evaluation mode MixesSamples computes a sample otherwise in a batch: .* by \d"),
        (OtherNorm, r"^normalisation: batch statistics of OtherNorm cannot leave out padded samples: .*norm"),
        (NormOverPadding, r"^normalisation: padded samples change what NormOverPadding computes of the others: .* by"),
        (Branches, r"^stacked: torch\.func\.vmap does not compute Branches .*vmap.*engine\.kind workers"),
        (Remembers, r"^state: .*Remembers, of which two passes over the same samples differ"),
        (
            FailsForOneSample,
            r"^samples: FailsForOneSample in evaluation mode, with one sample and with 5 fails: Ind",
        ),
        (FailsInTraining, r"^state: .*FailsInTraining.*RuntimeError: .*mat1 and mat2"),
        (NormFailsInTraining, r"^normalisation: NormFailsInTraining in training mode fails: \w+Error: "),
        (FailsWithoutGradient, r"^stacked: FailsWithoutGradient in training mode fails: .*needs gradients"),
        (Detached, r"^state: .*all parameters frozen"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_networks_are_caught(make: NetworkFactory, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_network(make, (1, 4, 4), 3)
