"""FOT with second moments instead of sketches, room for later tasks, and protection in proportion to importance."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import plain_network, train_client
from support.naive_fot import Grown, Watch, extract, projector
from support.tiny import (
    CONV_INPUTS,
    MLP_INPUTS,
    UNEQUAL,
    NetworkFactory,
    StridedNet,
    deep_mlp,
    double,
    fit,
    mlp,
    permuted,
    sgd,
    tiny_client,
    tiny_data,
)

from cfl.data.partitions import IID
from cfl.federation.channel import Channel
from cfl.methods import FOT
from cfl.methods.components.capacity import room_for
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.covariance_message import CovarianceMessage
from cfl.methods.components.layer_inputs.packed import pack, unpack
from cfl.methods.components.subspace import choose_rank, project
from cfl.randomness.generators import torch_generator
from cfl.testing import check_method
from cfl.testing.method_case import MethodCase
from cfl.testing.processes import processes_do_not_matter

LAYERS: dict[NetworkFactory, dict[str, int]] = {deep_mlp: MLP_INPUTS, StridedNet: CONV_INPUTS}
SCHEDULE = {"rounds_per_task": 2, "clients_per_round": 3}


def run(make: NetworkFactory, fot: FOT, tasks: int = 3, **data_options: Any) -> tuple[Any, Watch, list[Any]]:
    """A whole run, and the global networks at the end of each task."""
    options = {"partition": UNEQUAL, "schedule": SCHEDULE, **data_options}
    data, watch = tiny_data(permuted(tasks), **options), Watch(fot)
    fit(tiny_client(data, double(make), sgd, {"fot": fot}), data, None, [watch])
    networks = [plain_network(data, double(make), watch.models[2 * (task + 1)]).eval() for task in range(tasks)]
    return data, watch, networks


def extractions(
    make: NetworkFactory, data: Any, networks: list[Any], thresholds: list[float], biases: bool = False, **naive: Any
) -> list[dict[str, Grown]]:
    """The expected bases after each of the tasks, by a plain loop."""
    bases = {
        name: np.zeros((d + (biases and networks[0].get_submodule(name).bias is not None), 0))
        for name, d in LAYERS[make].items()
    }
    found = []
    for task, threshold in enumerate(thresholds):
        clients = data.rounds.round(2 * task + 1).clients
        grown = extract(
            dict.fromkeys(clients, networks[task]),
            data,
            task,
            bases,
            threshold,
            multiples={"conv": 1, "linear": 1},
            exact=True,
            biases=biases,
            **naive,
        )
        found.append(grown)
        bases = {name: layer.basis for name, layer in grown.items()}
    return found


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("make", LAYERS, ids=["mlp", "convolutions"])
@pytest.mark.parametrize("rule", ["code", "gpm"])
def test_bases_are_the_principal_directions_of_the_inputs_themselves(
    make: NetworkFactory, biases: bool, rule: Any
) -> None:
    """Against the singular vectors of all clients' stacked inputs, patch by patch in float64."""
    fot = FOT(0.9, message="covariance", rank_rule=rule, protect_bias=biases)
    data, watch, networks = run(make, fot)
    for task, expected in enumerate(extractions(make, data, networks, [0.9, 0.9], biases, rule=rule)):
        rows = {row["layer"]: row for row in fot.report().rows if row["task"] == task}
        for name, grown in expected.items():
            found = watch.bases[2 * (task + 1)][name]
            assert rows[name]["added"] == grown.added, (task, name)
            assert rows[name]["residual_share"] == pytest.approx(grown.rho, rel=1e-4)
            np.testing.assert_allclose(projector(found), projector(grown.basis), rtol=0, atol=1e-3, err_msg=name)


def test_the_last_task_is_extracted_only_when_asked_for() -> None:
    for asked in (False, True):
        fot = FOT(0.9, message="covariance", last_extraction=asked)
        data, _, networks = run(deep_mlp, fot)
        assert {row["task"] for row in fot.report().rows} == {0, 1, *([2] if asked else [])}
    expected = extractions(deep_mlp, data, networks, [0.9] * 3)[2]
    for name, grown in expected.items():
        np.testing.assert_allclose(projector(fot.bases[name]), projector(grown.basis), rtol=0, atol=1e-3)


# Messages


def some_moments(energies: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``[d, d]`` directions as columns, and second moments with these energies along them."""
    directions = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(energies),) * 2)).Q
    return directions, directions @ np.diag(energies) @ directions.T


def test_a_packed_matrix_has_its_norm_and_comes_back() -> None:
    _, matrix = some_moments(np.linspace(0.1, 5, 9))
    packed = pack(torch.from_numpy(matrix))
    assert packed.shape == (45,)
    assert float(packed.norm()) == pytest.approx(np.linalg.norm(matrix))
    np.testing.assert_allclose(unpack(packed, 9).numpy(), matrix, rtol=1e-14)


def test_directions_have_signs_that_no_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvectors are unique up to their signs, which differ between LAPACK and a GPU's library."""
    _, moments = some_moments(np.linspace(0.1, 5, 9))
    sums = {"layer": pack(torch.from_numpy(moments))}
    expected = CovarianceMessage(None).spectrum(sums, "layer", 9, None).directions
    signs = torch.tensor([-1.0, 1, 1, -1, 1, -1, 1, 1, -1], dtype=torch.float64)
    decompose = torch.linalg.eigh

    def on_another_device(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        energies, directions = decompose(matrix)
        return energies, directions * signs

    monkeypatch.setattr(torch.linalg, "eigh", on_another_device)
    assert torch.equal(CovarianceMessage(None).spectrum(sums, "layer", 9, None).directions, expected)


@pytest.mark.parametrize("share", [1e-2, 1e-4, 1e-5])
def test_float32_moments_keep_small_residuals(share: float) -> None:
    """Raw moments sent in float32 give the ranks of float64, also if the basis leaves only ``share`` of the energy."""
    d, old = 60, 12
    energies = np.concatenate([np.geomspace(1, 0.1, old), np.geomspace(1, 1e-2, d - old)])
    energies[old:] *= share * energies[:old].sum() / energies[old:].sum() / (1 - share)
    directions, moments = some_moments(energies * 1e4)
    basis = torch.from_numpy(directions[:, :old]).float()
    sums = {"layer": pack(torch.from_numpy(moments)).float()}
    seen = CovarianceMessage(None).spectrum(sums, "layer", d, basis)
    assert seen.rho == pytest.approx(math.sqrt(share), rel=0.05)
    for threshold in (1 - share / 2, 1 - share / 10):
        exact = np.cumsum(energies[old:]) + energies[:old].sum()
        needed = int((exact < threshold * energies.sum()).sum()) + 1
        assert abs(choose_rank(seen.values, seen.rho, threshold, "gpm", 0, d - old) - needed) <= 1


def test_inputs_inside_the_basis_leave_nothing_behind() -> None:
    """Residuals that come from float32 rounding alone add no direction."""
    d, old = 60, 12
    directions, moments = some_moments(np.concatenate([np.geomspace(1, 1e-3, old), np.zeros(d - old)]) * 1e4)
    basis = torch.from_numpy(directions[:, :old]).float()
    sums = {"layer": pack(torch.from_numpy(moments)).float()}
    seen = CovarianceMessage(None).spectrum(sums, "layer", d, basis)
    assert choose_rank(seen.values, seen.rho, 1.0, "code", 1, d - old) == 0


def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, torch.Tensor]]]:
    messages: list[tuple[int, dict[str, torch.Tensor]]] = []
    uplink = Channel.uplink

    def listen(self: Channel, topic: str, payload: Any, weights: Any, clients: Any) -> list[bool]:
        if topic == "fot covariance":
            messages.append((clients[0], {name: value[0].clone() for name, value in payload.items()}))
        return uplink(self, topic, payload, weights, clients)

    monkeypatch.setattr(Channel, "uplink", listen)
    return messages


def test_clients_send_a_triangle_and_receive_no_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = heard(monkeypatch)
    fot = FOT(0.9, message="covariance")
    run(deep_mlp, fot)
    assert len(messages) == 2 * 3
    assert {name: len(value) for name, value in messages[0][1].items()} == {"layers.0": 136, "layers.1": 55, "head": 28}
    assert all(value.dtype == torch.float32 for _, message in messages for value in message.values())
    channel = fot.context.channel
    assert channel.uplink_bytes["fot covariance"] == 2 * 3 * 4 * (136 + 55 + 28)
    assert "fot bases" not in channel.downlink_bytes
    assert fot.report().figures["sketch_bytes"] == 4 * (136 + 55 + 28)


def test_noise_has_its_variance_on_a_triangle_clipped_in_the_frobenius_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = heard(monkeypatch)
    mechanism = GaussianMechanism(epsilon=0.5, delta=1e-3, clip=2.0)
    for chosen in (None, mechanism):  # learning rate 0, so that noise does not change the model and its inputs
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
        fot = FOT(0.9, message="covariance", mechanism=chosen)
        fit(tiny_client(data, mlp, partial(torch.optim.SGD, lr=0.0), {"fot": fot}), data)
    assert len(messages) == 8
    sigma, noises = math.sqrt(2 * math.log(1.25 / 1e-3) * 2.0**2 / (0.5**2 * 4)), []
    for (client, plain), (other, private) in zip(messages[:4], messages[4:], strict=True):
        assert client == other
        for name, d in {"layers.0": 16, "head": 8}.items():
            matrix = unpack(plain[name], d).numpy()
            norm = np.linalg.norm(matrix)
            assert norm > 2.0
            noise = private[name].double().numpy() - pack(torch.from_numpy(matrix / norm * 2.0)).numpy()
            noises.append(noise[:36] / sigma)
    everything = np.concatenate(noises)
    assert everything.std() == pytest.approx(1, rel=5 / math.sqrt(2 * everything.size))
    assert abs(np.corrcoef(noises) - np.eye(len(noises))).max() < 0.75
    assert all(bool(basis.isfinite().all()) for basis in fot.bases.values())


@pytest.mark.parametrize("signal", [0.0, 0.2, 3.0])
def test_only_directions_that_stand_out_of_the_noise_count(signal: float) -> None:
    """Noise alone has no direction above the edge of its eigenvalues. A signal of three times the edge is found."""
    d, mechanism = 200, GaussianMechanism(epsilon=0.5, delta=1e-3)
    sigma = mechanism.sigma(1)
    edge = sigma * math.sqrt(2 * d)
    generator = torch.Generator().manual_seed(1)
    direction = torch.nn.functional.normalize(torch.randn(d, generator=generator, dtype=torch.float64), dim=0)
    noise = torch.randn(d * (d + 1) // 2, generator=generator, dtype=torch.float64) * sigma
    moments = unpack(noise, d)
    largest = float(torch.linalg.eigvalsh(moments).max())
    assert edge * 0.85 < largest < edge * 1.01
    message = pack(moments + signal * edge * torch.outer(direction, direction))
    seen = CovarianceMessage(mechanism).spectrum({"layer": message}, "layer", d, None)
    assert int((seen.values > 0).sum()) == (1 if signal > 1 else 0)
    if signal > 1:
        assert float((seen.directions[:, 0] @ direction).square()) > 0.9
        assert seen.rho == pytest.approx(1)


# Room for later tasks


def test_room_is_divided_among_the_tasks_to_come() -> None:
    total = {"total": 0.5}
    used = [0]
    for left in range(9, 0, -1):
        used.append(used[-1] + room_for(total, 100, used[-1], left))
    assert np.diff(used).max() - np.diff(used).min() <= 1
    assert used[-1] == 50
    assert room_for(total, 100, 0, 9) == 6
    assert room_for(total, 100, 0, 1) == 50
    assert room_for(total, 100, 50, 1) == 0
    assert [room_for({"per_task": 0.1}, 100, k, 5) for k in (0, 50, 98, 100)] == [10, 5, 1, 0]
    assert room_for(None, 100, 30, 5) == 70


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("capacity", [{"total": 0.5}, {"per_task": 0.25}])
def test_no_task_takes_more_than_its_room(capacity: dict[str, float], last: bool) -> None:
    """Three tasks have two extractions, or three with ``last_extraction``."""
    free = FOT(0.999, message="covariance", last_extraction=last)
    run(deep_mlp, free)
    bound = FOT(0.999, message="covariance", capacity=capacity, last_extraction=last)
    extractions = 2 + last
    run(deep_mlp, bound)
    for name, d in LAYERS[deep_mlp].items():
        used = 0
        for task in range(extractions):
            added = next(row["added"] for row in bound.report().rows if (row["task"], row["layer"]) == (task, name))
            assert added == room_for(capacity, d, used, extractions - task)
            used += added
        assert used < free.bases[name].shape[1]
        assert bound.bases[name].shape == (d, used)


# Protection in proportion to importance


def naive_importance(grown: Grown, old: int, before: np.ndarray, alpha: float) -> np.ndarray:
    """SGP's importance of every direction, summed over single inputs."""
    singular = [math.sqrt(sum(float(grown.basis[:, j] @ row) ** 2 for row in grown.rows)) for j in range(old)]
    singular += [float(value) for value in grown.values[: grown.added]]
    largest = max(singular)
    importance = [(alpha + 1) * value / (alpha * value + largest) for value in singular]
    return np.array([min(1.0, value + before[j]) if j < old else value for j, value in enumerate(importance)])


@pytest.mark.parametrize("alpha", [0.0, 1.0, 20.0])
def test_importance_is_that_of_a_plain_loop_and_scales_the_projection(alpha: float) -> None:
    steps: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    fot = FOT(0.9, message="covariance", importance_scale=alpha)
    transform = fot.transform_step

    def listen(step: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        projected = transform(step)
        steps.append((step, projected))
        return projected

    fot.transform_step = listen  # type: ignore[method-assign]
    data, _, networks = run(deep_mlp, fot)
    # The plain loop finds the same directions except for signs: the gaps between energies are larger than rounding.
    before = {name: np.zeros(0) for name in LAYERS[deep_mlp]}
    for grown in extractions(deep_mlp, data, networks, [0.9, 0.9]):
        before = {
            name: naive_importance(layer, len(before[name]), before[name], alpha) for name, layer in grown.items()
        }
    for name, expected in before.items():
        np.testing.assert_allclose(fot.importance[name].numpy(), expected, rtol=2e-3, err_msg=name)
        assert float(fot.importance[name].max()) == pytest.approx(1)
    step, projected = steps[-1]
    for name in LAYERS[deep_mlp]:
        delta, basis = step[f"{name}.weight"].double(), fot.bases[name].double()
        expected_step = delta.clone()
        for j, importance in enumerate(fot.importance[name].tolist()):
            expected_step -= importance * torch.outer(delta @ basis[:, j], basis[:, j])
        np.testing.assert_allclose(projected[f"{name}.weight"].double(), expected_step, rtol=0, atol=1e-6)
    last = {row["layer"]: row["importance"] for row in fot.report().rows}
    assert last == {name: pytest.approx(float(value.mean())) for name, value in fot.importance.items()}


def test_importance_of_all_directions_one_is_the_papers_projection() -> None:
    step = torch.randn(5, 9, generator=torch_generator(0, "test"))
    basis = torch.linalg.qr(torch.randn(9, 4, generator=torch_generator(1, "test"))).Q
    torch.testing.assert_close(project(step, basis, torch.ones(4)), project(step, basis))
    full = torch.eye(9)
    torch.testing.assert_close(project(step, full, torch.full((9,), 0.25)), 0.75 * step)


def test_importance_is_part_of_a_checkpoint() -> None:
    fot, other = (FOT(0.9, message="covariance", importance_scale=1.0) for _ in range(2))
    run(deep_mlp, fot)
    other.load_state_dict(fot.state_dict())
    assert other.importance.keys() == fot.importance.keys() == LAYERS[deep_mlp].keys()
    assert all(torch.equal(other.importance[name], value) for name, value in fot.importance.items())


# Clients that project their gradients


@pytest.mark.parametrize("options", [{}, {"protect_bias": True}, {"importance_scale": 1.0}], ids=str)
@pytest.mark.parametrize("make", LAYERS, ids=["mlp", "convolutions"])
def test_clients_that_project_take_the_steps_of_a_plain_loop(make: NetworkFactory, options: dict[str, Any]) -> None:
    """The last round repeated client by client. Gradients lose their part in the basis, then the server projects."""
    fot = FOT(0.7, message="covariance", project_clients=True, **options)
    data, watch, _ = run(make, fot, partition=IID())
    plan, bases = data.rounds.round(5), watch.bases[5]
    assert all(0 < basis.shape[1] < basis.shape[0] for basis in bases.values())

    def project_gradients(network: torch.nn.Module, client: int) -> None:
        for name, held in bases.items():
            layer, basis = network.get_submodule(name), held.double()
            columns = basis[: layer.weight[0].numel()]
            if "importance_scale" in options:
                inside = columns @ torch.diag(fot.importance[name]) @ columns.T
            else:
                inside = columns @ torch.linalg.pinv(columns)
            gradient = layer.weight.grad.flatten(1)
            layer.weight.grad = (gradient - gradient @ inside).view_as(layer.weight)

    start, ends = watch.models[5], []
    for client in plan.clients:
        network = plain_network(data, double(make), start)
        train_client(network, data, plan, client, sgd, change_gradients=project_gradients)
        ends.append({name: value.clone() for name, value in network.state_dict().items()})
    step = {name: start[name] - torch.stack([end[name] for end in ends]).mean(0) for name in start}
    for name, moved in fot.transform_step(step).items():
        torch.testing.assert_close(watch.models[6][name], start[name] - moved, rtol=0, atol=1e-7, msg=name)


def test_clients_that_project_receive_the_bases_in_every_round() -> None:
    fot = FOT(0.7, message="covariance", project_clients=True)
    _, watch, _ = run(deep_mlp, fot)
    sizes = [4 * sum(basis.numel() for basis in watch.bases[end].values()) for end in (2, 4)]
    assert fot.context.channel.downlink_bytes["fot bases"] == 2 * 3 * sum(sizes)
    assert fot.computes_locally
    assert not FOT(0.7).computes_locally


TOGETHER = partial(
    FOT,
    0.9,
    message="covariance",
    importance_scale=5.0,
    capacity={"total": 0.6},
    project_clients=True,
    gpse_clients="all",
)


def test_the_options_together_have_what_every_method_must_have() -> None:
    """The checks are those of every method: width, engines, resuming, state, sums and others."""
    check_method(TOGETHER, fedavg_in_first_task=True)


def test_the_options_together_do_not_depend_on_processes() -> None:
    """Results differ only by the order in which float32 messages are added."""
    processes_do_not_matter(MethodCase(TOGETHER, tolerance=1e-5))
