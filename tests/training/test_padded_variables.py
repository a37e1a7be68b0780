"""Padded variables, which are always 0, add to the NLL a term that training drives to 0, and change nothing else."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import double, fit, tiny_client, tiny_data
from torch import Tensor

from cfl.data.sources import BinarySet
from cfl.data.streams import Sequence
from cfl.models import MADE

REAL, ALL = 8, 14


def nats(network: Any, x: Tensor) -> Tensor:
    """``[D]``: the NLL of each variable in nats, mean over samples."""
    logits = network.logits(x, network.evaluation_degrees(0, x.device))
    p = torch.where(x.flatten(1) == 1, logits.sigmoid(), 1 - logits.sigmoid())
    return -p.log().mean(0).detach()


@pytest.mark.parametrize("order", ["natural", "random"])
def test_other_variables_know_nothing_of_them(order: Any) -> None:
    """The NLL of real variables does not depend on the weights from padded variables, which are always 0."""
    torch.manual_seed(0)
    network: Any = MADE((1, 1, ALL), ALL, hidden=[20], direct=True, order=order).double()
    x = (torch.rand(50, 1, 1, ALL, dtype=torch.float64) > 0.5).double()
    x[..., REAL:] = 0
    before = nats(network, x)
    with torch.no_grad():
        network.layers[0].weight[:, REAL:] = 100.0
        network.shortcut.weight[:, REAL:] = -100.0
    assert torch.equal(nats(network, x), before)
    assert float(-network.log_likelihood(x).mean()) == pytest.approx(float(before.sum()), abs=1e-12)
    assert float(before[REAL:].min()) > 0


def test_training_drives_their_cost_to_nothing(tmp_path: Path) -> None:
    """A federated run drives the NLL of padded variables to 0. Real variables have nearly their NLL without padding."""
    noise = np.random.default_rng(0)
    common = noise.integers(0, 2, (400, 1))
    rows = (common ^ (noise.random((400, REAL)) < 0.2)).astype(np.uint8)
    folder = tmp_path / "binary"
    folder.mkdir()
    np.savez(folder / "noisy.npz", train=rows[:300], valid=rows[300:350], test=rows[350:])
    found = {}
    for pad_to in (None, ALL):
        stream = Sequence([BinarySet("noisy", variables=REAL, pad_to=pad_to)])
        data = tiny_data(
            stream, scenario="density", root=str(tmp_path), schedule={"rounds_per_task": 15, "evaluate_every": 0}
        )
        make = double(partial(MADE, hidden=[16], order="natural"))
        federation = fit(tiny_client(data, make, partial(torch.optim.Adam, lr=0.02)), data)
        x = data.tasks[0].transform(data.tasks[0].test.images).double()
        found[pad_to] = nats(federation.network, x)
        assert float(federation.measured.compute()[0, 0]) == pytest.approx(float(found[pad_to].sum()), abs=1e-9)
        untrained = float(federation.measured.initial()[0])
        assert untrained == pytest.approx((pad_to or REAL) * math.log(2), rel=0.1)
    padding = float(found[ALL][REAL:].sum())
    assert 0 < padding < 0.05 < (ALL - REAL) * math.log(2)
    assert float(found[ALL][:REAL].sum()) == pytest.approx(float(found[None].sum()), abs=0.15)
    assert float(found[None].sum()) < 0.95 * REAL * math.log(2)
