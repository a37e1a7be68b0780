"""Draws true and found boxes into test images, to show what a detector has learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cfl.models.base import Network
from cfl.models.functional import call_with
from cfl.training.client import Client
from cfl.training.density_samples import DrawnImages

ACROSS = 4
"""Largest number of images of a task."""
ROWS = 4
"""Largest number of tasks."""
SURE = 0.3
"""Lowest score of a box that is drawn."""
GREEN, ORANGE = (0.0, 0.8, 0.2), (1.0, 0.5, 0.0)
_INCHES = 1.7


@torch.no_grad()
def draw_boxes(client: Client, count: int) -> DrawnImages | None:
    """Draw the true boxes, and those that the current global model finds, into test images of each task.

    Images are evenly spaced among those with boxes.

    Args:
        client: the module, with its federation.
        count: number of images, divided equally among tasks. There are at most :data:`ACROSS` of a task.

    Returns:
        The images, or None if the run does not detect boxes, ``count`` is 0 or models are personal.
    """
    federation, network = client.require_federation(), client.network
    if (
        not isinstance(network, Network)
        or federation.measure.predicts != "boxes"
        or federation.model.has_personal_models
    ):
        return None
    tasks = federation.data.evaluated[: min(ROWS, count)]
    if not tasks:
        return None
    across = min(ACROSS, count // len(tasks))
    rows = torch.full((len(tasks), across, 3, *client.input_shape[1:]), math.nan)
    device = next(network.parameters()).device
    for number, (task, row) in enumerate(zip(tasks, rows, strict=True)):
        with_boxes = (task.test.labels[..., 0] >= 0).any(1).nonzero().flatten()
        drawn = min(across, len(with_boxes))
        chosen = with_boxes[[k * len(with_boxes) // drawn for k in range(drawn)]]
        images, true = task.test.images[chosen], task.test.labels[chosen]
        if not len(chosen):
            continue
        model = federation.model_for(number, federation.model.state_tensors())
        found = call_with(network, model, network.answers, task.transform(images.to(device))).cpu()
        row[: len(chosen)] = images.float() / task.transform.scale
        for image, boxes, answers in zip(row, true, found, strict=False):
            for box in answers[(answers[:, 0] >= 0) & (answers[:, 5] >= SURE)]:
                outline(image, box[1:5], ORANGE)
            for box in boxes[boxes[:, 0] >= 0]:
                outline(image, box[1:], GREEN)
    said = f"true boxes in green, found ones (score {SURE:g} and more) in orange,"
    names = [f"task {number}" for number in range(len(tasks))]
    return DrawnImages(rows, f"the global model after task {federation.last_task}", names, said, _INCHES)


def outline(image: Tensor, box: Tensor, colour: tuple[float, float, float]) -> None:
    """Draw a box of left, top, right and bottom in pixels, a pixel wide, into an image ``[3, H, W]``."""
    height, width = image.shape[1:]
    left, top = (int(value) for value in box[:2].floor().clamp(min=0))
    right, bottom = min(int(box[2].ceil()), width) - 1, min(int(box[3].ceil()), height) - 1
    if right < left or bottom < top:
        return
    paint = torch.tensor(colour)[:, None]
    image[:, [top, bottom], left : right + 1] = paint[..., None]
    image[:, top : bottom + 1, [left, right]] = paint[..., None]
