"""Counted dropout: random, unbiased, and a function of (key, row, unit) only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from cfl.models.dropout import (
    CountedDropout,
    CountedDropout2d,
    DropoutMasks,
    convert_dropout,
    dropout_masks,
)
from cfl.runtime.errors import ConfigError


class Net(nn.Module):
    """Two convolutions and two linear layers with dropout of both kinds; one layer never drops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.maps = nn.Dropout2d(0.25)
        self.units = nn.Dropout(0.2)
        self.never = nn.Dropout(0.0)
        self.fc = nn.Linear(6 * 4 * 5, 50)
        self.last = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.never(self.units(self.maps(self.conv(x))))
        return self.last(self.fc(x.flatten(1)))


SHAPE = (1, 6, 7)
RATES = {"maps": 0.25, "units": 0.2, "last": 0.5}


def masks(samples: int, *of: int) -> dict[str, Tensor]:
    return DropoutMasks(convert_dropout(Net()), SHAPE).draw(torch.tensor(of), samples)


def test_layers_and_shapes() -> None:
    network = convert_dropout(Net())
    assert (type(network.maps), type(network.units)) == (CountedDropout2d, CountedDropout)
    found = DropoutMasks(network, SHAPE).draw(torch.tensor([1, 2]), 3)
    assert {name: tuple(mask.shape) for name, mask in found.items()} == {
        "maps": (2, 3, 6, 1, 1),
        "units": (2, 3, 6, 4, 5),
        "last": (2, 3, 50),
    }


@pytest.mark.parametrize("name", RATES)
def test_rates_and_scales(name: str) -> None:
    """Kept with probability 1 - p (4 standard errors), and scaled so that the expectation is exact."""
    mask = masks(2000, *range(20))[name].flatten()
    keep, kept = 1 - RATES[name], mask > 0
    assert abs(kept.double().mean() - keep) < 4 * math.sqrt(keep * (1 - keep) / len(mask))
    scale = float(mask.max())
    assert torch.equal(mask, kept.float() * scale)
    assert scale == pytest.approx(1 / keep, rel=2e-5)


def test_units_rows_and_clients_are_independent() -> None:
    """No two columns, rows or clients agree more often than chance (5 standard errors, all pairs)."""
    kept = (masks(64, *range(8))["last"] > 0).double()  # [8, 64, 50]
    for axis in range(3):
        rows = kept.movedim(axis, 0).flatten(1)
        signs = 2 * rows - 1
        agreement = signs @ signs.T / rows.shape[1]
        agreement.fill_diagonal_(0)
        assert agreement.abs().max() < 5 / math.sqrt(rows.shape[1])


def test_a_mask_depends_on_key_and_row_alone() -> None:
    alone, beside, more = masks(5, 42), masks(5, 7, 42, 9), masks(9, 42)
    for name in RATES:
        assert torch.equal(alone[name][0], beside[name][1])
        assert torch.equal(alone[name][0], more[name][0, :5])
        assert not torch.equal(alone[name][0], beside[name][0])


def test_the_forward_pass_drops_by_the_masks_and_only_within_the_context() -> None:
    network = convert_dropout(Net()).train()
    drawn = {name: mask[0] for name, mask in masks(4, 3).items()}
    x = torch.randn(4, *SHAPE)
    with dropout_masks(network, drawn):
        found = network(x)
    h = network.conv(x) * drawn["maps"] * drawn["units"]
    torch.testing.assert_close(found, network.fc(h.flatten(1)) * drawn["last"])
    torch.manual_seed(0)
    one = network(x)
    torch.manual_seed(0)
    assert torch.equal(one, network(x))  # torch's own masks again
    assert not torch.equal(one, network(x))
    network.eval()
    with dropout_masks(network, drawn):
        torch.testing.assert_close(network(x), network.fc(network.conv(x).flatten(1)))


def test_masks_of_another_batch_are_refused() -> None:
    network = convert_dropout(Net()).train()
    drawn = {name: mask[0] for name, mask in masks(4, 3).items()}
    with dropout_masks(network, drawn), pytest.raises(ValueError, match="4 samples do not fit a batch of 3"):
        network(torch.randn(3, *SHAPE))


def test_looking_at_a_network_leaves_it_as_it_was() -> None:
    network = convert_dropout(Net()).train()
    network.units.eval()
    DropoutMasks(network, SHAPE)
    assert network.training
    assert not network.units.training
    assert not any(m._forward_pre_hooks for m in network.modules())


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (2, 3, 4, 5)])
def test_masks_have_the_shape_of_what_they_drop(shape: tuple[int, ...]) -> None:
    """Masks have the shape of a layer's input, also for sequences and other shapes than rows of units and images."""

    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.weight * x.view(len(x), *shape))

    network = convert_dropout(Reshaped())
    units = math.prod(shape)
    drawn = DropoutMasks(network, (1, 1, units)).draw(torch.tensor([1, 2]), 3)["drop"]
    assert drawn.shape == (2, 3, *shape)
    assert set(drawn.flatten().tolist()) == {0.0, 2.0}
    x = torch.rand(3, 1, 1, units)
    with dropout_masks(network, {"drop": drawn[1]}):
        assert torch.equal(network(x), x.view(3, *shape) * drawn[1])


def test_a_layer_used_twice_is_refused() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(super().forward(x))

    with pytest.raises(ConfigError, match="last, used more than once"):
        DropoutMasks(convert_dropout(Twice()), SHAPE)


def test_a_layer_that_drops_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dropout layer 0 with p = 1.*below 1"):
        DropoutMasks(convert_dropout(nn.Sequential(nn.Dropout(1.0))), SHAPE)


def test_a_network_without_dropout_draws_nothing() -> None:
    drawn = DropoutMasks(convert_dropout(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Dropout(0.0))), (1, 2, 2))
    assert not drawn
    assert drawn.draw(torch.tensor([1]), 3) == {}
