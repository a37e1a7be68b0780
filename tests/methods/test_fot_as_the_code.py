"""FOT's options that follow its published code in GPSE: active dropout, and random numbers shared by clients."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import fit, mlp, permuted, sgd, tiny_client, tiny_data
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, max_pool2d

from cfl.federation.channel import Channel
from cfl.methods import FOT
from cfl.methods.components.layer_inputs.before_dropout import watch_before_dropout
from cfl.methods.components.layer_inputs.sketch import Sketch, sketch_rows
from cfl.methods.components.layer_inputs.workers_in_step import stream_of
from cfl.methods.components.subspace import choose_rank, principal_directions
from cfl.models import MLP
from cfl.models.dropout import DropoutMasks, convert_dropout
from cfl.randomness.generators import seed_for, torch_generator
from cfl.runtime.errors import ConfigError

dropping = partial(MLP, hidden=[24, 24], dropout=[0.5, 0.5])


def fot(options: dict[str, Any], network: Any = dropping, width: int = 4, threads: int = 1) -> FOT:
    data = tiny_data(permuted(2, train=160), num_clients=8, schedule={"cohort_width": width})
    method = FOT(**{"threshold": 0.9, "sketch_size": 1.0, **options})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fit(tiny_client(data, network, sgd, {"fot": method}), data)
    finally:
        torch.set_num_threads(before)
    return method


def sizes(method: FOT) -> list[int]:
    return [basis.shape[1] for basis in method.bases.values()]


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The summed sketches that the server reads, one dictionary per extraction."""
    sums: list[dict[str, Tensor]] = []
    read = Channel.sum

    def watched(channel: Channel, topic: str) -> tuple[dict[str, Tensor], float]:
        found = read(channel, topic)
        if topic == "fot sketch":
            sums.append({name: value.clone() for name, value in found[0].items()})
        return found

    monkeypatch.setattr(Channel, "sum", watched)
    return sums


class KeepsModel(FOT):
    """FOT that keeps the global model from which the first extraction starts."""

    model: dict[str, Tensor] | None = None

    def end_task(self, plan: Any) -> None:
        self.model = self.model or {n: t.double() for n, t in self.context.state_tensors().items()}
        super().end_task(plan)


# Dropout.


def test_sketches_are_of_activations_before_the_dropout_in_front_of_a_layer(
    sketches: list[dict[str, Tensor]],
) -> None:
    """As the authors' hooks on the ReLUs: x and ReLU 1, then the ReLUs of what earlier dropouts left."""
    data = tiny_data(permuted(2, train=160), num_clients=8)
    network = partial(MLP, hidden=[24, 20, 18], dropout=[0.2, 0.5, 0.5])
    method = KeepsModel(0.9, sketch_size=2.0, sketch_sharing=8, gpse_dropout=True)
    fit(tiny_client(data, network, sgd, {"fot": method}), data)
    assert method.model is not None
    w, drawn = method.model, DropoutMasks(method.context.network, data.input_shape)
    names = ("layers.0", "layers.1", "layers.2", "head")
    expected: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()).double())
    for client in range(8):
        (x, _), *more = data.client_batches(0, client, 500, torch.device("cpu"))
        assert not more
        key = torch.tensor([seed_for(data.seed, "gpse dropout", 0, client, 0)])
        masks = [mask[0].double() for mask in drawn.draw(key, len(x)).values()]
        given = [x.flatten(1).double()]
        flowing = given[0]
        for number in range(3):
            given.append((flowing @ w[f"layers.{number}.weight"].T + w[f"layers.{number}.bias"]).clamp(min=0))
            flowing = given[-1] * masks[number]
        for number, (name, rows) in enumerate(zip(names, given, strict=True)):
            generator = torch_generator(data.seed, "shared sketch", 0, 0, number)
            numbers = torch.randn(len(rows), 2 * rows.shape[1], generator=generator)
            expected[name] = expected[name] + rows.T @ numbers.double()
            expected[f"{name} energies"] = expected[f"{name} energies"] + (rows**2).sum()
    for name in names:
        torch.testing.assert_close(sketches[0][name].double(), expected[name], rtol=0, atol=1e-4)
        energies = expected[f"{name} energies"].expand(2)
        torch.testing.assert_close(sketches[0][f"{name} energies"], energies, rtol=1e-5, atol=0)


def test_dropout_reaches_the_third_layer_and_not_the_first_two() -> None:
    off, on = (fot({"threshold": 0.99, "gpse_dropout": dropout}) for dropout in (False, True))
    assert torch.equal(off.bases["layers.0"], on.bases["layers.0"])
    first, second = (method.bases["layers.1"] for method in (off, on))
    torch.testing.assert_close(first @ first.T, second @ second.T, rtol=0, atol=1e-4)
    assert off.bases["head"].shape[1] < on.bases["head"].shape[1]


class Convolutional(nn.Module):
    """A network with pooling after dropout, two dropouts in a row, and a layer directly behind another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 2)
        self.maps, self.units, self.after = nn.Dropout2d(0.4), nn.Dropout(0.5), nn.Dropout(0.3)
        self.fc1, self.fc2, self.head = nn.Linear(2, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.maps(self.conv1(x).tanh()), 2)
        x = self.after(self.units(self.conv2(x).tanh())).flatten(1)
        return self.head(self.fc2(self.fc1(x)).tanh())  # type: ignore[no-any-return]


class Branching(nn.Module):
    """A network with one dropout in front of two layers, and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(16, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x.flatten(1)).tanh())
        return self.head(x + self.left(x).tanh() * self.right(x))  # type: ignore[no-any-return]


def by_hand(network: nn.Module, x: Tensor, m: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers' inputs as :func:`watch_before_dropout` promises them, line by line."""
    p = dict(network.named_parameters())

    def apply(name: str, to: Tensor) -> Tensor:
        kind = conv2d if name.startswith("conv") else linear
        padding = {"padding": 1} if name == "conv1" else {}
        return kind(to, p[f"{name}.weight"], p[f"{name}.bias"], **padding)

    if isinstance(network, Convolutional):
        maps = apply("conv1", x).tanh()
        small = apply("conv2", max_pool2d(maps * m["maps"], 2)).tanh()
        units = (small * m["units"] * m["after"]).flatten(1)
        after = apply("fc1", units)
        return {
            "conv1": x,
            "conv2": max_pool2d(maps, 2),
            "fc1": small.flatten(1),
            "fc2": after,
            "head": apply("fc2", after).tanh(),
        }
    hidden = apply("first", x.flatten(1)).tanh()
    thrown = hidden * m["dropout"]
    product = apply("left", thrown).tanh() * apply("right", thrown)
    return {"first": x.flatten(1), "left": hidden, "right": hidden, "head": hidden + product}


@pytest.mark.parametrize("make", [Convolutional, Branching])
@torch.no_grad()
def test_only_the_dropout_since_the_last_weighted_layer_is_undone(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network = convert_dropout(make()).double().eval()
    x = torch.randn(7, 1, 4, 4, dtype=torch.float64)
    drawn = DropoutMasks(network, (1, 4, 4)).draw(torch.tensor([5]), 7, torch.float64)
    masks = {name: mask[0] for name, mask in drawn.items()}
    assert all((mask == 0).any() for mask in masks.values())
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    seen: dict[str, Tensor] = {}
    watchers = {layer: lambda _, given, name=name: seen.update({name: given}) for name, layer in layers.items()}
    before = network(x)
    watch_before_dropout(network, dict(network.named_parameters()), x, masks, watchers)
    expected = by_hand(network, x, masks)
    assert list(seen) == list(expected)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
    assert torch.equal(network(x), before)  # no hook, mode or mask is left behind
    unwatched = watchers.pop(layers["head"])
    seen.clear()
    watch_before_dropout(network, dict(network.named_parameters()), x, masks, {layers["head"]: unwatched})
    torch.testing.assert_close(seen, {"head": expected["head"]}, rtol=0, atol=1e-12)


def test_dropout_in_gpse_is_counted() -> None:
    """Bases with ``gpse_dropout`` depend neither on the number of threads nor on the cohort width."""
    one, other = fot({"gpse_dropout": True}), fot({"gpse_dropout": True}, width=2, threads=2)
    assert sizes(one) == sizes(other)
    for name, basis in one.bases.items():
        torch.testing.assert_close(basis @ basis.T, other.bases[name] @ other.bases[name].T, atol=2e-4, rtol=0)


def test_without_dropout_layers_the_option_changes_nothing() -> None:
    off, on = fot({}, mlp), fot({"gpse_dropout": True}, mlp)
    assert all(torch.equal(off.bases[name], on.bases[name]) for name in off.bases)


# Random numbers that clients share.


@pytest.mark.parametrize(
    ("clients", "workers", "in_step"),
    [
        (64, 5, [4] * 13 + [1] * 12),  # Permuted MNIST
        (64, 8, [8] * 8),
        (25, 8, [1] * 4 + [7] * 3),
        (8, 3, [2, 2, 2, 1, 1]),
        (9, 4, [1, 1, 1, 3, 3]),
        (7, 1, [1] * 7),
        (3, 5, [3]),
    ],
)
def test_clients_share_as_in_processes_that_are_seeded_alike(clients: int, workers: int, in_step: list[int]) -> None:
    """As in the published code, equally seeded worker processes draw for one of their clients after another."""
    generators = [torch.Generator().manual_seed(3) for _ in range(workers)]
    drawn: dict[bytes, set[int]] = defaultdict(set)
    for number in range(4):
        drawn.clear()
        for generator, own in zip(generators, np.array_split(np.arange(clients), workers), strict=True):
            for client in own:
                torch.empty((), dtype=torch.int64).random_(generator=generator)  # order of the samples
                if number % 2:  # end of a task
                    drawn[torch.rand(4, 7, generator=generator).numpy().tobytes()].add(int(client))
    streams: dict[int, set[int]] = defaultdict(set)
    for client in range(clients):
        streams[stream_of(client, clients, workers)].add(client)
    assert sorted(map(sorted, streams.values())) == sorted(map(sorted, drawn.values()))
    assert [len(streams[stream]) for stream in range(len(streams))] == in_step


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_shared_numbers_are_those_of_workers_in_step(workers: int, sketches: list[dict[str, Tensor]]) -> None:
    """Workers with equally many of the 8 clients share: 4 + 4, 3 + 3 (not the worker with 2), 2 + 2 + 2 and 1 + 1."""
    data = fot({"sketch_size": 3.0, "sketch_sharing": workers}).context._federation.data
    expected = torch.zeros(16, 48, dtype=torch.float64)
    stream = {2: [0, 1, 2, 3] * 2, 3: [0, 1, 2, 0, 1, 2, 3, 4], 5: [0, 1, 0, 1, 0, 1, 2, 2]}[workers]
    for client in range(8):
        generator = torch_generator(data.seed, "shared sketch", 0, stream[client], 0)
        (x, _), *more = data.client_batches(0, client, 500, torch.device("cpu"))
        assert not more
        numbers = torch.randn(len(x), 48, generator=generator)
        expected += x.flatten(1).T.double() @ numbers.double()
    torch.testing.assert_close(sketches[0]["layers.0"].double(), expected, rtol=0, atol=1e-4)


def test_the_more_workers_share_the_lower_the_ranks() -> None:
    """With 8 workers of one client each, all share, and the sum is a sketch of sums over clients, of low rank."""
    found = [sum(sizes(fot({"sketch_size": 3.0, "sketch_sharing": workers}))) for workers in (1, 2, 8)]
    assert found[0] >= found[1] >= found[2]
    assert found[0] > found[2]


@pytest.mark.parametrize(("workers", "threshold"), [(8, 0.96), (4, 0.9), (16, 0.98)])
def test_shared_numbers_act_as_a_lower_threshold(workers: int, threshold: float) -> None:
    """W workers with shared numbers at threshold epsilon find the rank that own numbers find at a lower threshold.

    The mean has the share m of the inputs' energy and m' = W m / (1 + (W - 1) m) of the sums' energy. The lower
    threshold is m + (1 - m) (epsilon - m') / (1 - m').
    """
    d, samples, m = 60, 400, 0.3
    draw = torch.Generator().manual_seed(0)
    spread = torch.linspace(1, 0.05, d)
    spread *= ((1 - m) / spread.square().sum()).sqrt()
    mean = torch.randn(d, generator=draw)
    mean *= m**0.5 / mean.norm()
    inputs = mean + torch.randn(workers, samples, d, generator=draw) * spread
    ranks = []
    of_sums = workers * m / (1 + (workers - 1) * m)
    as_if = m + (1 - m) * (threshold - of_sums) / (1 - of_sums)
    for shared, epsilon in ((True, threshold), (False, as_if)):
        total = torch.zeros(d, 12 * d)
        for worker, rows in enumerate(inputs):
            sketch = Sketch(d, 12 * d)
            sketch_rows(sketch, [rows], None, torch.Generator().manual_seed(1 if shared else worker))
            total += sketch.A
        ranks.append(choose_rank(principal_directions(total)[1], 1.0, epsilon, "code", 0, d))
    assert 5 < ranks[0] < 50
    assert abs(ranks[0] - ranks[1]) <= 1


def test_masks_are_shared_by_those_who_share_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 clients on 3 workers (3 + 3 + 2), three masks have two clients each and two masks have one."""
    asked: list[int] = []
    draw = DropoutMasks.draw

    def noted(masks: DropoutMasks, keys: Tensor, samples: int, dtype: torch.dtype = torch.float32) -> Any:
        asked.append(int(keys[0]))
        return draw(masks, keys, samples, dtype)

    found = {}
    for option in (True, "shared"):
        monkeypatch.setattr(DropoutMasks, "draw", noted)
        asked.clear()
        method = fot({"sketch_sharing": 3, "gpse_dropout": option, "gpse_batch_size": 10_000})
        monkeypatch.undo()
        keys = {seed_for(method.context.seed, "shared gpse dropout", 0, stream, 0) for stream in range(5)}
        own = {seed_for(method.context.seed, "gpse dropout", 0, client, 0) for client in range(8)}
        found[option] = {key: asked.count(key) for key in keys | own if key in asked}
        assert set(found[option]) == (keys if option == "shared" else own)
    assert sorted(found["shared"].values()) == [1, 1, 2, 2, 2]
    assert sorted(found[True].values()) == [1] * 8


def test_shared_dropout_without_shared_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"methods\.fot\.gpse_dropout.*sketch_sharing"):
        FOT(gpse_dropout="shared")
