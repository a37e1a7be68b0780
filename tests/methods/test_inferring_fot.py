"""InferringFOT against residuals written out patch by patch in float64, and its reports and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.naive import plain_network
from support.naive_fot import Watch, layer_rows, projector
from support.tiny import (
    NetworkFactory,
    StridedNet,
    deep_mlp,
    double,
    fit,
    mlp,
    norm_net,
    sgd,
    split,
    tiny_client,
    tiny_data,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.federation.federation import Federation
from cfl.methods import FOT, InferringFOT, Method, PersonalLayers
from cfl.methods.inferring_fot import energies, residual_shares
from cfl.models import MLP
from cfl.runtime.errors import ConfigError


class Repeating(MLP):
    """Calls a layer three times in a forward pass."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, hidden=[8, 8], dropout=0.0)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x.flatten(1)))
        for _ in range(3):
            x = torch.relu(self.layers[1](x))
        return x


LAYERS: dict[NetworkFactory, dict[str, int]] = {
    Repeating: {"layers.0": 16, "layers.1": 8},
    deep_mlp: {"layers.0": 16, "layers.1": 10},
    StridedNet: {"conv1": 9, "conv2": 18, "fc": 8},
}


def data_of(class_loss: str = "own", **options: Any) -> FederatedDataModule:
    """Four clients, all in every round, three tasks of two classes and two rounds."""
    settings = {"scenario": "class", "class_loss": class_loss, "partition": Dirichlet(1.0, 3), **options}
    return tiny_data(split(3, classes=6, train=240, test=90), schedule={"rounds_per_task": 2}, **settings)


def run(make: NetworkFactory, fot: Method, data: FederatedDataModule, **options: Any) -> tuple[Federation, Watch]:
    watch = Watch()
    federation = fit(tiny_client(data, double(make), sgd, {"inferring_fot": fot}), data, callbacks=[watch], **options)
    return federation, watch


def inputs(data: FederatedDataModule, task: int, part: str) -> Tensor:
    samples = data.tasks[task]
    return samples.transform(getattr(samples, part).images).double()


def share_outside(rows: np.ndarray, basis: np.ndarray) -> float:
    """The share of energy of one sample's input vectors outside a basis."""
    rest = [row - sum((row @ column) * column for column in basis.T) for row in rows]
    return sum(float(row @ row) for row in rest) / sum(float(row @ row) for row in rows)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("make", LAYERS, ids=["a layer called three times", "mlp", "convolutions"])
def test_the_task_is_that_with_the_smallest_residual(make: NetworkFactory, biases: bool) -> None:
    data, fot = data_of(), InferringFOT(4, threshold=0.9, protect_bias=biases)
    federation, watch = run(make, fot, data)
    assert set(fot.bases) == set(fot.task_bases) == set(LAYERS[make])
    last = plain_network(data, double(make), watch.models[-1]).eval()
    bases: dict[str, list[np.ndarray]] = {}
    for name, d in LAYERS[make].items():
        biased = biases and last.get_submodule(name).bias is not None
        rank = min(4, (d + biased) // 2)
        for task in range(3):
            network = plain_network(data, double(make), watch.models[2 * (task + 1)]).eval()
            rows = layer_rows(network, name, inputs(data, task, "train"), biased)
            directions = np.linalg.svd(rows, full_matrices=False)[2][:rank].T
            found = fot.task_bases[name][task].double().numpy()
            np.testing.assert_allclose(projector(found), projector(directions), rtol=0, atol=2e-3, err_msg=name)
            bases.setdefault(name, []).append(found)

    right, identified, known, matrix = [], [], [], federation.accuracy.compute()
    for task in range(3):
        x, y = inputs(data, task, "test"), data.tasks[task].test.labels + 2 * task
        with torch.no_grad():
            logits = last(x).numpy()
            scores = fot.classify(task, watch.models[-1], x)
        assert scores is not None
        chosen = []
        for number in range(len(x)):
            totals = np.zeros(3)
            for name, of_tasks in bases.items():
                biased = biases and last.get_submodule(name).bias is not None
                rows = layer_rows(last, name, x[number : number + 1], biased)
                totals += [share_outside(rows, basis) for basis in of_tasks]
            inferred = int(totals.argmin())
            chosen.append(2 * inferred + int(logits[number, 2 * inferred : 2 * inferred + 2].argmax()))
        assert scores.argmax(1).tolist() == chosen
        among = scores[:, 2 * task : 2 * task + 2].argmax(1).numpy()
        assert (among == logits[:, 2 * task : 2 * task + 2].argmax(1)).all()
        right.append(float((np.array(chosen) == y.numpy()).mean()))
        identified.append(float((np.array(chosen) // 2 == task).mean()))
        known.append(float((among + 2 * task == y.numpy()).mean()))
        assert matrix[2, task].item() == pytest.approx(100 * right[-1], abs=1e-9)
    assert fot.report().figures["tasks_identified"] == pytest.approx(100 * np.mean(identified), abs=1e-9)
    assert federation.known is not None
    np.testing.assert_allclose(federation.known.compute()[2].numpy(), 100 * np.array(known), atol=1e-9)
    assert 0.4 < np.mean(identified) < 1


def test_shares_outside_subspaces_of_coordinates() -> None:
    layer, x = nn.Linear(6, 2), torch.randn(5, 6, dtype=torch.float64)
    bases = torch.zeros(2, 6, 3, dtype=torch.float64)
    bases[0, :2, :2] = bases[1, 2:4, :2] = torch.eye(2, dtype=torch.float64)
    energy = x.square()
    expected = torch.stack([energy[:, 2:].sum(1), energy[:, [0, 1, 4, 5]].sum(1)], 1) / energy.sum(1, keepdim=True)
    torch.testing.assert_close(residual_shares(energies(layer, x, bases, False)), expected)


def test_a_task_with_few_directions_has_no_others() -> None:
    """Most units never fire. Directions chosen by rounding would hold part of other tasks' inputs."""

    class Silent(MLP):
        def __init__(self, shape: tuple[int, int, int], outputs: int) -> None:
            super().__init__(shape, outputs, hidden=[12, 6], dropout=0.0)
            self.layers[0].bias.data[2:] = -1e3

    fot = InferringFOT(6, threshold=0.9)
    run(Silent, fot, data_of())
    lengths = fot.task_bases["layers.1"].norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([[1.0] * 2 + [0.0] * 4] * 3), rtol=0, atol=1e-5)


def test_a_basis_is_at_most_half_of_the_space() -> None:
    """With all directions every task's residual would be 0. The layer has 16 inputs."""
    run(mlp, fot := InferringFOT(20, threshold=0.9), data_of())
    assert fot.task_bases["layers.0"].shape == (3, 16, 8)


def test_bytes_are_those_of_fot_with_an_extraction_after_the_last_task() -> None:
    federation, _ = run(mlp, method := InferringFOT(4, threshold=0.9), data_of())
    other, _ = run(mlp, FOT(0.9, message="covariance", last_extraction=True), data_of())
    sent = federation.channel.uplink_bytes["fot covariance"]
    assert sent == other.channel.uplink_bytes["fot covariance"] == 3 * 4 * 4 * (16 * 17 // 2)
    assert method.report().figures["task_bases_bytes"] == 3 * 4 * 16 * 4
    assert federation.client_storage() == 0


def test_it_trains_as_fot_does() -> None:
    for make in (mlp, norm_net):
        _, found = run(make, InferringFOT(4, threshold=0.9), data_of())
        _, expected = run(make, FOT(0.9, message="covariance"), data_of())
        assert all(torch.equal(found.models[-1][name], value) for name, value in expected.models[-1].items())


def test_an_output_layer_that_tasks_share_in_the_loss_is_protected() -> None:
    for class_loss, protected in (("own", False), ("seen", True), ("all", True)):
        method = FOT(0.9, message="covariance")
        run(deep_mlp, method, data_of(class_loss))
        assert ("head" in method.bases) == protected


def test_what_cannot_work_is_refused() -> None:
    for fot, others, key in (
        (InferringFOT(layers=[]), {}, "methods.inferring_fot.layers"),
        (InferringFOT(), {"local": PersonalLayers(["head.*"])}, "methods.inferring_fot"),
    ):
        data = data_of()
        with pytest.raises(ConfigError) as refused:
            fit(tiny_client(data, mlp, sgd, {"inferring_fot": fot, **others}), data)
        assert refused.value.key == key
