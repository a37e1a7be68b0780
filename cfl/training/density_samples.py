"""Draws images from a density network, to show what it has learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import cast

import torch
from torch import Tensor

from cfl.federation import matrix_rows
from cfl.models.density import DensityNetwork, densities_differ, is_density
from cfl.models.functional import call_with
from cfl.randomness.generators import torch_generator
from cfl.training.client import Client

CLIENTS_AT_MOST = 8
"""Most rows of a picture of personal models, one per client."""


@dataclass(frozen=True, eq=False)
class DrawnImages:
    """Images of a picture, in rows.

    Attributes:
        images: ``[R, N, C, H, W]`` float32 from 0 to 1; NaN where a row has fewer images.
        whose: the model that the images are from, for the caption.
        row_names: name of each row, if rows are clients or tasks.
        what: what is shown, for the caption, in front of ``whose``.
        inches: width of an image in the picture.
    """

    images: Tensor
    whose: str
    row_names: list[str] | None = None
    what: str = "samples of"
    inches: float = 0.6


@torch.no_grad()
def draw_images(client: Client, count: int) -> DrawnImages | None:
    """Draw ancestral samples of a run's current model.

    They depend on the weights, the run's seed, the task and, with personal models, the client. Samples of a global
    model fill a square; if its density differs by client, client 0's masks are used. With personal models, each of the
    first :data:`CLIENTS_AT_MOST` clients that hold their current task has a row with an equal share of the samples.
    They are drawn from the model that the client uses if a sample's task is unknown.

    Args:
        client: the module, with its federation.
        count: number of samples.

    Returns:
        The images. None if there is nothing to show: the network is no density, samples are no images (a single row or
        column), they have a number of channels other than 1 or 3, or outputs depend on themselves (MADE's
        ``stale_output_mask``).
    """
    federation, network = client.require_federation(), client.network
    channels, height, width = client.input_shape
    no_density = not is_density(network) or getattr(network, "stale_output_mask", False)
    if count < 1 or no_density or min(height, width) < 2 or channels not in (1, 3):
        return None
    seed, task = federation.data.seed, federation.last_task

    def drawn(model: dict[str, Tensor], count: int, whose: int, at: int, *named: int) -> Tensor:
        encoded = federation.model_for(federation.data.stream_task(at, whose), model)
        generator = torch_generator(seed, "samples", at, *named)
        return call_with(network, encoded, cast(DensityNetwork, network).sample, count, generator, whose).float().cpu()

    if not federation.model.has_personal_models:
        columns = math.ceil(math.sqrt(count))
        lines = -(-count // columns)
        images = torch.full((lines * columns, *client.input_shape), math.nan)
        images[:count] = drawn(federation.model.state_tensors(), count, 0, task)
        by = " by client 0's masks" if densities_differ(network) else ""
        return DrawnImages(images.unflatten(0, (lines, columns)), f"the global model{by} after task {task}")
    at_task = {owner: row for owner, row in matrix_rows.current(federation).items() if owner is not None}
    holding = (owner for owner, at in at_task.items() if owner in federation.members(at))
    owners = list(islice(holding, CLIENTS_AT_MOST))
    if not owners:
        return None
    each = max(1, count // len(owners))
    rows = [drawn(federation.model_of(owner, None), each, owner, at_task[owner], owner) for owner in owners]
    names = [f"client {owner}, task {at_task[owner]}" for owner in owners]
    return DrawnImages(torch.stack(rows), "clients' own models at their present tasks", names)
