"""FOT's extraction (GPSE) computed by its equations: float64, one image, one patch and one client after another.

Nothing of the engine is used except the data, the documented keys of the Gaussian draws, and the choice between the two
ways of drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.methods import FOT
from cfl.methods.components.layer_inputs.covariance import covariance_is_cheaper
from cfl.randomness.generators import torch_generator
from support.tiny import weights


class Watch(Callback):
    """Copies of the global model and of FOT's bases after every round; entry 0 is before the first."""

    def __init__(self, fot: FOT | None = None) -> None:
        self.fot = fot
        self.models: list[dict[str, Tensor]] = []
        self.bases: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(pl_module)

    def _look(self, module: Any) -> None:
        self.models.append(weights(module.federation))
        if self.fot is not None:
            self.bases.append({name: basis.clone() for name, basis in self.fot.bases.items()})


def layer_rows(network: nn.Module, name: str, x: Tensor, with_bias: bool = False) -> np.ndarray:
    """Inputs of a layer, ``[n, d]``, for one batch of images in the network's present mode; patches if it convolves."""
    layer, seen = network.get_submodule(name), []
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        network(x)
    handle.remove()
    received = np.concatenate([inputs.double().numpy() for inputs in seen])  # of every call
    rows = conv_rows(layer, received) if isinstance(layer, nn.Conv2d) else received
    return np.concatenate([rows, np.ones((len(rows), 1))], 1) if with_bias else rows


def conv_rows(layer: nn.Conv2d, images: np.ndarray) -> np.ndarray:
    """Patches, flattened like the weight of one output map."""
    (kernel_h, kernel_w), (step_h, step_w) = layer.kernel_size, layer.stride
    pad_h, pad_w = layer.padding
    rows = []
    for image in images:
        channels, height, width = image.shape
        padded = np.zeros((channels, height + 2 * pad_h, width + 2 * pad_w))
        padded[:, pad_h : pad_h + height, pad_w : pad_w + width] = image
        for top in range(0, padded.shape[1] - kernel_h + 1, step_h):
            for left in range(0, padded.shape[2] - kernel_w + 1, step_w):
                rows.append(padded[:, top : top + kernel_h, left : left + kernel_w].reshape(-1))
    return np.array(rows)


def train_images(data: FederatedDataModule, task: int, index: Sequence[int] | slice = slice(None)) -> Tensor:
    """Training samples of a task as network input."""
    return data.tasks[task].transform(data.tasks[task].train.images[index])


@dataclass
class Sketched:
    """What one client computes for one layer: sketch, energies of all inputs and outside the basis, and the inputs."""

    a: np.ndarray
    energy: float
    residual: float
    samples: int
    rows: np.ndarray


def sketch(
    network: nn.Module,
    data: FederatedDataModule,
    task: int,
    client: int,
    name: str,
    number: int,
    basis: np.ndarray,
    columns: int,
    batch: int,
    with_bias: bool,
) -> Sketched:
    """``A_i = X_i* G_i`` (eq 8, 9), or ``L Z`` with L the covariance's root; ``number`` is the layer's among the
    protected ones.
    """
    own = data.indices[task][client].tolist()
    generator = torch_generator(data.seed, "sketch", task, client, number)
    pieces = [
        layer_rows(network, name, train_images(data, task, own[start : start + batch]), with_bias)
        for start in range(0, len(own), batch)
    ]
    result = Sketched(np.zeros((len(basis), columns)), 0.0, 0.0, len(own), np.concatenate(pieces))
    layer, count = network.get_submodule(name), sum(map(len, pieces))
    from_covariance = covariance_is_cheaper(layer, count, len(basis), columns)
    covariance = np.zeros((len(basis), len(basis)))
    for rows in pieces:
        outside = np.array([x - basis @ (basis.T @ x) for x in rows])
        if from_covariance:
            covariance += sum(np.outer(x, x) for x in outside)
        else:
            gaussian = torch.randn(len(rows), columns, generator=generator).double().numpy()
            result.a += sum(np.outer(x, g) for x, g in zip(outside, gaussian, strict=True))
        result.energy += float((rows**2).sum())
        result.residual += float((outside**2).sum())
    if from_covariance:
        _, lengths, directions = np.linalg.svd(covariance)
        gaussian = torch.randn(len(basis), columns, generator=generator).double().numpy()
        result.a = directions.T @ np.diag(np.sqrt(lengths)) @ directions @ gaussian
    return result


@dataclass
class Grown:
    """A layer after an extraction, the task's inputs, and the singular values that the rank rule saw."""

    basis: np.ndarray
    added: int
    rho: float
    rows: np.ndarray
    values: np.ndarray


def rank(energies: np.ndarray, rho: float, threshold: float, rule: str) -> int:
    """Smallest r that satisfies the rule; ``len(energies)`` if none does."""
    for r in range(len(energies)):
        share = float(energies[:r].sum() / energies.sum())
        if rule == "code" and share > (rho - (1 - threshold)) / rho:
            return r
        if rule == "gpm" and rho**2 * share + 1 - rho**2 >= threshold:
            return r
    return len(energies)


def extract(
    networks: Mapping[int, nn.Module],
    data: FederatedDataModule,
    task: int,
    bases: Mapping[str, np.ndarray],
    threshold: float,
    *,
    multiples: Mapping[str, float],
    rule: str = "code",
    minimum: int = 0,
    client_mean: bool = False,
    batch: int = 500,
    biases: bool = False,
    exact: bool = False,
    privatise: Callable[[np.ndarray, int, int], np.ndarray] | None = None,
) -> dict[str, Grown]:
    """Extend the bases as the server does: sum of sketches (eq 10), its singular vectors (eq 11), the rank rule.

    Args:
        networks: client -> the network whose layer inputs it sketches, in training or evaluation mode as wanted.
        data: the clients' samples.
        task: the task that has ended.
        bases: layer -> ``[d, k]`` so far, ``k`` may be 0; the layers in the network's order.
        threshold: epsilon.
        multiples: columns of a sketch as a multiple of d, for ``conv`` and ``linear``.
        rule: ``code`` or ``gpm``.
        minimum: directions to add at least.
        client_mean: rho as the mean of the clients' own, weighted by samples.
        batch: samples per piece of a sketch.
        biases: a 1 is appended to the inputs of every layer that has a bias.
        exact: the server gets the inputs themselves instead of sketches.
        privatise: (A_i, client, layer's number) -> what the client sends instead of A_i.
    """
    grown = {}
    for number, (name, basis) in enumerate(bases.items()):
        layer = next(iter(networks.values())).get_submodule(name)
        multiple = multiples["conv" if isinstance(layer, nn.Conv2d) else "linear"]
        columns = int(np.ceil(multiple * len(basis)))
        with_bias = biases and layer.bias is not None
        sent = {
            client: sketch(network, data, task, client, name, number, basis, columns, batch, with_bias)
            for client, network in networks.items()
        }
        if client_mean:
            own = [(s.samples, np.sqrt(s.residual / s.energy)) for s in sent.values()]
            rho = sum(n * share for n, share in own) / sum(n for n, _ in own)
        else:
            rho = np.sqrt(sum(s.residual for s in sent.values()) / sum(s.energy for s in sent.values()))
        rows = np.concatenate([s.rows for s in sent.values()])
        if exact:
            total = rows.T
        else:
            total = sum(s.a if privatise is None else privatise(s.a, client, number) for client, s in sent.items())
        total = total - basis @ (basis.T @ total)  # changes only exact inputs and sketches with noise
        directions, values, _ = np.linalg.svd(total, full_matrices=False)
        room = len(basis) - basis.shape[1]
        added = min(max(rank(values[:room] ** 2, rho, threshold, rule), minimum), room)
        basis = np.linalg.qr(np.concatenate([basis, directions[:, :added]], 1)).Q
        grown[name] = Grown(basis, added, float(rho), rows, values)
    return grown


def projector(basis: np.ndarray | Tensor) -> np.ndarray:
    """``O O^T``: the same for every basis of the same space."""
    columns = basis.double().numpy() if isinstance(basis, Tensor) else basis
    return columns @ columns.T
