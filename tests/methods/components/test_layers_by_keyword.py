"""Networks that call their layers by keyword, as in ``self.fc(input=x)``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.tiny import fit, permuted, sgd, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.methods import EWC, FOT, GPM, RGO, Method
from cfl.models import Network


class ByPosition(Network):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.fc, self.norm, self.head = nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, num_outputs)
        self.drop = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.fc(x.flatten(1)))))


class ByKeyword(ByPosition):
    def features(self, x: Tensor) -> Tensor:
        return self.drop(input=torch.relu(self.norm(input=self.fc(input=x.flatten(1)))))


METHODS: dict[str, Callable[[], Method]] = {
    "EWC": lambda: EWC(5.0),
    "FOT": lambda: FOT(0.8),
    "FOT, dropout": lambda: FOT(0.8, gpse_dropout=True),
    "GPM": lambda: GPM(0.8),
    "RGO": lambda: RGO(1.0),
}


@pytest.mark.parametrize("name", METHODS)
def test_they_train_as_those_that_call_by_position(name: str) -> None:
    """Statistics of batches, because EWC looks at the input of BatchNorm then."""
    found = []
    for network in (ByPosition, ByKeyword):
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
        client = tiny_client(data, network, sgd, {"it": METHODS[name]()})
        found.append(weights(fit(client, data, {"batchnorm": "drop"})))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
