"""The order of test samples: each once, either in stored order or in a random order that stays the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support import tiny
from support.tiny import at_round, fit, norm_net, split, tiny_client, tiny_data
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.types import ImageSet

CPU = torch.device("cpu")


def data(seed: int = 0, **options: object) -> FederatedDataModule:
    return tiny_data(tiny.permuted(test=50), seed=seed, eval_batch_size=7, **options)


def evaluated(module: FederatedDataModule, task: int) -> tuple[Tensor, Tensor]:
    """A task's test inputs and outputs in the order of evaluation."""
    batches = [module.evaluation_batch(batch, CPU) for batch in module.val_dataloader()[task]]
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


def test_stored_order_unless_asked() -> None:
    module = data()
    for number, task in enumerate(module.tasks):
        x, y = evaluated(module, number)
        assert torch.equal(x, task.transform(task.test.images))
        assert torch.equal(y, task.test.labels)


def test_random_order_holds_every_sample_with_its_label() -> None:
    module = data(eval_shuffle=True)
    orders = []
    for number, task in enumerate(module.tasks):
        x, y = evaluated(module, number)
        stored = task.transform(task.test.images).flatten(1)
        order = [int((stored == row).all(1).nonzero()) for row in x.flatten(1)]
        assert sorted(order) == list(range(50))
        assert torch.equal(y, task.test.labels[order])
        assert sum(a < b for a, b in pairwise(order)) < 40
        orders.append(order)
        again = evaluated(module, number)
        assert torch.equal(again[0], x)
        at_round(module, 3)
        assert torch.equal(evaluated(data(eval_shuffle=True), number)[0], x)
        assert not torch.equal(evaluated(data(seed=1, eval_shuffle=True), number)[0].flatten(1), x.flatten(1))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("batchnorm", ["average", "drop"])
def test_order_matters_where_the_test_batch_normalises(batchnorm: str) -> None:
    """With the test batch's own statistics, a shuffled order of class-sorted test samples changes the accuracy."""

    def matrix(shuffle: bool) -> Tensor:
        module = tiny_data(
            split(train=160, test=120),
            eval_batch_size=8,
            eval_shuffle=shuffle,
            schedule={"rounds_per_task": 6, "cohort_width": 4},
        )
        for task in module.tasks:
            order = task.test.labels.argsort(stable=True)
            object.__setattr__(task, "test", ImageSet(task.test.images[order], task.test.labels[order]))
        return fit(tiny_client(module, norm_net), module, {"batchnorm": batchnorm}).accuracy.compute()

    stored, shuffled = matrix(False), matrix(True)
    if batchnorm == "average":
        assert torch.equal(stored, shuffled)
    else:
        assert float((shuffled - stored).diagonal().mean()) > 5, "batches of one class hide what tells it apart"
