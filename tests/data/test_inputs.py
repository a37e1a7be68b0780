"""Network inputs of samples of several tasks, fetched together."""

from __future__ import annotations

import pytest
import torch

from cfl.data.augmentation import Augmentation, CropFlip
from cfl.data.inputs import Inputs
from cfl.data.types import ImageSet, PixelTransform, Task

SHAPE = (2, 4, 3)
TRANSFORM = PixelTransform((0.3, 0.4), (0.2, 0.7))
TURNED = torch.tensor([-1, *range(10), -1])


def tasks(*sets: ImageSet) -> list[Task]:
    """Five tasks of every set: unchanged, two permutations, a map that blackens pixels, and another normalisation."""
    maps = [None, torch.randperm(12), torch.randperm(12), TURNED]
    other = PixelTransform((0.0, 0.0), (1.0, 1.0), 16.0)
    plain = [TRANSFORM if m is None else TRANSFORM.with_pixel_map(m) for m in maps]
    return [Task("", held, held, 5, transform) for held in sets for transform in (*plain, other)]


@pytest.mark.parametrize("augmentation", [None, CropFlip(1)])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 60])
def test_samples_of_several_tasks_are_those_of_each(augmentation: Augmentation | None, number: int, count: int) -> None:
    torch.manual_seed(0)
    sets = [ImageSet(torch.randint(256, (20, *SHAPE), dtype=torch.uint8), torch.randint(5, (20,))) for _ in range(2)]
    every = tasks(*sets[:number])
    inputs = Inputs(every, SHAPE, [5 * task for task in range(len(every))], augmentation, 7)
    of, index = torch.randint(len(every), (count,)), torch.randint(20, (count,))
    x, y = inputs.of_tasks(of, index, (3, 1))
    assert x.shape == (count, *SHAPE)
    for row, (task, place) in enumerate(zip(of.tolist(), index.tolist(), strict=True)):
        own, label = inputs.of_task(task, torch.tensor([place]), (3, 1))
        assert torch.equal(x[row], own[0])
        assert y[row] == label
    both, _ = inputs.of_tasks(of.view(-1, 1).expand(-1, 2), index.view(-1, 1).expand(-1, 2), (3, 1))
    assert torch.equal(both, x[:, None].expand(-1, 2, -1, -1, -1))
