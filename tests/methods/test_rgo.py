"""RGO on some clients, against closed forms in a plain float64 loop with permutations between the layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive_fot import Watch, layer_rows
from support.naive_memories import chosen_samples, multiply, run_rounds
from support.tiny import (
    CONV_LAYERS,
    MLP_LAYERS,
    UNEQUAL,
    NetworkFactory,
    StridedNet,
    deep_mlp,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import IID
from cfl.data.samples import Samples
from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted, Stream
from cfl.methods import (
    AGEM,
    ER,
    EWC,
    FOT,
    GPM,
    RGO,
    SCAFFOLD,
    DPFedAvg,
    FedAGEM,
    FedCurv,
    FedProx,
    LearningRateDecay,
    Method,
    PersonalLayers,
)
from cfl.methods.rgo import drawn_label_loss
from cfl.models import MLP, Network
from cfl.randomness.generators import numpy_generator, torch_generator
from cfl.runtime.errors import ConfigError

NORM_LAYERS = ["conv", "fc", "head"]


class PlainRGO:
    """RGO in the server's order of features, on networks with a permutation in front of every inner layer."""

    def __init__(
        self,
        data: FederatedDataModule,
        layers: Sequence[str],
        share: float = 0.4,
        damping: float = 1e-2,
        weigh: bool = True,
        encode: bool = True,
        samples: int = 10**6,
        anew: bool = False,
    ) -> None:
        self.data, self.layers, self.damping, self.weigh, self.encode = data, layers, damping, weigh, encode
        self.samples = samples
        clients = data.num_clients
        self.keepers = []
        for task in range(len(data.tasks)):
            order = numpy_generator(data.seed, "rgo share", *([task] if anew else [])).permutation(clients).tolist()
            self.keepers.append(set(order[: round(share * clients)]))
        self.sums: dict[int, dict[str, np.ndarray]] = {}
        self.seen: dict[tuple[int, str], list[tuple[float, float]]] = {}  # mean curvature, free share of P

    def prepare(self, network: nn.Module, task: int) -> None:
        """Register the task's permutations in front of the inner layers."""
        if not self.encode or task == 0:
            return
        for number, name in enumerate(self.layers[1:]):
            layer = network.get_submodule(name)
            order = numpy_generator(self.data.seed, "feature permutation", task, number).permutation(
                layer.weight.shape[1]
            )
            layer.register_forward_pre_hook(partial(self._reorder, torch.from_numpy(order)))

    @staticmethod
    def _reorder(order: Tensor, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        reordered = torch.empty_like(inputs[0])
        reordered[:, order] = inputs[0]
        return reordered

    def remember(self, network: nn.Module, task: int) -> None:
        for client in self.keepers[task] & set(self.data.members[task].tolist()):
            images = chosen_samples(self.data, task, client, self.samples, "rgo samples")
            squares = self.output_gradients(network, task, client, images)
            for layer in self.layers:
                rows = layer_rows(network, layer, images)
                curvature = squares[layer] * rows.T @ rows / len(images)
                d = len(curvature)
                own = self.sums.setdefault(client, {})
                added = curvature + self.damping * np.trace(curvature) / d * np.eye(d)
                own[layer] = own.get(layer, 0.0) + added
                free = d / float((self.projection(client, layer) ** 2).sum())
                self.seen.setdefault((task, layer), []).append((float(np.trace(curvature)) / d, free))

    def output_gradients(self, network: nn.Module, task: int, client: int, images: Tensor) -> dict[str, float]:
        """Mean square of the gradients by the layers' outputs, one sample after another."""
        if not self.weigh:
            return dict.fromkeys(self.layers, 1.0)
        outputs: dict[str, Tensor] = {}
        found: dict[str, list[np.ndarray]] = {layer: [] for layer in self.layers}

        def look(layer: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[layer] = output

        handles = [network.get_submodule(n).register_forward_hook(partial(look, n)) for n in self.layers]
        generator = torch_generator(self.data.seed, "rgo labels", task, client)
        train = self.data.outputs.train
        allowed = torch.arange(self.data.num_outputs) if train is None else train[task].nonzero().flatten()
        for image in images:
            log_p = network(image[None])[0, allowed].log_softmax(0)
            drawn = float(torch.rand(1, generator=generator, dtype=torch.float64))
            label = int(np.searchsorted(np.cumsum(log_p.detach().double().exp().numpy()), drawn, side="right"))
            for layer, gradient in zip(
                self.layers, torch.autograd.grad(-log_p[label], [outputs[n] for n in self.layers]), strict=True
            ):
                found[layer].append(gradient.double().numpy() ** 2)
        for handle in handles:
            handle.remove()
        return {layer: float(np.mean(squares)) for layer, squares in found.items()}

    def projection(self, client: int, layer: str) -> np.ndarray:
        inverse = np.linalg.inv(self.sums[client][layer])
        return inverse * len(inverse) / np.trace(inverse)

    def change(self, network: nn.Module, client: int) -> None:
        for layer in self.sums.get(client, {}):
            multiply(network, layer, self.projection(client, layer))


# Networks and options: (network, stream, RGO's options, the same for the plain loop)
CASES: dict[str, tuple[NetworkFactory, Callable[[int], Stream], dict[str, Any], dict[str, Any]]] = {
    "mlp": (deep_mlp, permuted, {"share": 0.5}, {"layers": MLP_LAYERS, "share": 0.5}),
    "few samples, inputs alone": (
        deep_mlp,
        permuted,
        {"share": 0.75, "curvature": "inputs", "samples": 7, "batch_size": 3},
        {"layers": MLP_LAYERS, "share": 0.75, "weigh": False, "samples": 7},
    ),
    "others after every task": (
        deep_mlp,
        permuted,
        {"share": 0.5, "drawn": "per_task"},
        {"layers": MLP_LAYERS, "share": 0.5, "anew": True},
    ),
    "few samples, little damping, plain features": (
        deep_mlp,
        permuted,
        {"share": 1.0, "damping": 1e-3, "samples": 7, "batch_size": 3, "feature_encoding": False},
        {"layers": MLP_LAYERS, "share": 1.0, "damping": 1e-3, "samples": 7, "encode": False},
    ),
    "convolutions, task-incremental": (
        partial(StridedNet),
        lambda tasks: split(tasks, classes=6, train=120),
        {"share": 0.5},
        {"layers": CONV_LAYERS[:3], "share": 0.5},
    ),
    "batchnorm": (norm_net, permuted, {"share": 1.0}, {"layers": NORM_LAYERS, "share": 1.0}),
    "features alone": (deep_mlp, permuted, {"share": 0.0}, {"layers": MLP_LAYERS, "share": 0.0}),
}
# BatchNorm needs more than one sample. Clients with and without a matrix share a cohort only if their sizes are equal.
EQUAL = {"batchnorm", "few samples, inputs alone", "features alone"}
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("optimizer", [sgd, MOMENTUM], ids=["sgd", "momentum"])
@pytest.mark.parametrize("name", CASES)
def test_every_round_is_that_of_a_plain_loop(name: str, optimizer: Any) -> None:
    """With four tasks, the recursion after three equals the closed form over three, in the server's coordinates."""
    make, stream, options, naive = CASES[name]
    data = tiny_data(
        stream(4 if naive["layers"] == MLP_LAYERS else 3),
        partition=IID() if name in EQUAL else UNEQUAL,
        schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 3},
    )
    rgo = RGO(**options)
    client = tiny_client(data, double(make), optimizer, {"rgo": rgo})
    watch, initial = Watch(), copy.deepcopy(client.network.state_dict())
    federation = fit(client, data, None, [watch])
    plain = PlainRGO(data, **naive)
    models = run_rounds(data, double(make), initial, optimizer, plain.change, plain.remember, plain.prepare)
    for number, (found, expected) in enumerate(zip(watch.models[1:], models, strict=True)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8, msg=lambda m, n=number: f"round {n}: {m}")
    assert [rgo.keepers(task) for task in range(len(data.tasks))] == plain.keepers
    assert (len(set(map(frozenset, plain.keepers))) > 1) == (rgo.drawn == "per_task")
    assert federation.clients.holders("rgo") == sorted(plain.sums)
    for who in plain.sums:
        held = federation.clients.get("rgo", who)
        assert held is not None
        for layer in naive["layers"]:
            np.testing.assert_allclose(held[layer], plain.projection(who, layer), rtol=1e-8, atol=1e-10)
    report = rgo.report()
    assert report.figures["keepers"] == len(plain.keepers[0])
    assert [(row["task"], row["layer"]) for row in report.rows] == list(plain.seen)
    for row, clients in zip(report.rows, plain.seen.values(), strict=True):
        curvature, free = np.mean(clients, axis=0)
        assert row["clients"] == len(clients)
        assert (row["curvature"], row["free_space"]) == pytest.approx((curvature, 100 * free), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_are_symmetric_positive_definite_and_of_fixed_trace(dtype: torch.dtype) -> None:
    data = tiny_data(permuted(4), schedule={"rounds_per_task": 1})
    make: NetworkFactory = double(mlp) if dtype == torch.float64 else mlp
    federation = fit(tiny_client(data, make, sgd, {"rgo": RGO(share=1.0, damping=1e-3)}), data)
    for client in range(data.num_clients):
        held = federation.clients.get("rgo", client)
        assert held is not None
        for name, d in {"layers.0": 16, "head": 8}.items():
            p = held[name].double()
            assert held[name].dtype == dtype
            torch.testing.assert_close(p, p.T, rtol=0, atol=1e-6)
            assert float(p.trace()) == pytest.approx(d, rel=1e-6)
            assert float(torch.linalg.eigvalsh(p)[0]) > 0
            assert float(torch.linalg.eigvalsh(p)[-1]) > 1.5  # not the identity


def test_the_old_loss_grows_less_than_by_plain_descent() -> None:
    """Softmax regression with one client that keeps everything. The new task is learned as well."""
    data_of = partial(
        tiny_data,
        permuted(2, train=64),
        num_clients=1,
        schedule={"rounds_per_task": 4, "clients_per_round": 1, "local_epochs": 2},
    )
    grown, learned = {}, {}
    regression: NetworkFactory = partial(MLP, hidden=[], dropout=0.0)
    for label, methods in (("rgo", {"rgo": RGO(share=1.0, samples=64)}), ("fedavg", {})):
        data = data_of()
        client, watch = tiny_client(data, regression, sgd, dict[str, Method](methods)), Watch()
        fit(client, data, None, [watch])
        losses = {}
        for moment in (4, 8):
            client.network.load_state_dict(watch.models[moment])
            for task in (0, 1):
                x, y = next(data.client_batches(task, 0, 64, torch.device("cpu")))
                with torch.no_grad():
                    losses[moment, task] = float(nn.functional.cross_entropy(client.network.eval()(x), y))
        grown[label] = losses[8, 0] - losses[4, 0]
        learned[label] = losses[4, 1] - losses[8, 1]
    assert 0 < grown["rgo"] < 0.8 * grown["fedavg"]
    assert learned["rgo"] > 0.3 * learned["fedavg"]


class LinearMap(Network):
    """``W x``, whose squared loss is a quadratic in W."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(math.prod(input_shape), num_outputs, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class LeastSquares(Method):
    """A client's loss is the mean of ``|W x - e_y|^2 / 2``."""

    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        logits = network(x)
        targets = nn.functional.one_hot(samples.y, logits.shape[-1]).to(logits.dtype)
        return (samples.weights.to(logits.dtype) * (logits - targets).square().sum(-1)).sum() / 2


class Quadratic:
    """Least squares of one task: ``tr(W A W^T) / 2 - tr(W B^T) + c`` with ``A = E[x x^T]``, ``B = E[e_y x^T]``."""

    def __init__(self, data: FederatedDataModule, task: int) -> None:
        x, y = next(data.client_batches(task, 0, 1000, torch.device("cpu")))
        rows, targets = x.flatten(1).double().numpy(), np.eye(data.num_outputs)[y.numpy()]
        self.a, self.b = rows.T @ rows / len(rows), targets.T @ rows / len(rows)

    def growth(self, start: np.ndarray, step: np.ndarray) -> float:
        """Growth of the loss from ``start [o, d]`` to ``start + step``."""
        return float(np.sum((start @ self.a - self.b) * step) + np.sum((step @ self.a) * step) / 2)

    def descend(self, start: np.ndarray, lr: float, steps: int, p: np.ndarray) -> np.ndarray:
        """Weights after steps ``W <- W - lr (W A - B) P``, which multiply the distance to the minimum by a matrix."""
        least = self.b @ np.linalg.inv(self.a)
        return least + (start - least) @ np.linalg.matrix_power(np.eye(len(p)) - lr * self.a @ p, steps)


@pytest.mark.parametrize("seed", range(5))
def test_on_a_quadratic_the_old_loss_grows_less_than_by_plain_descent(seed: int) -> None:
    """With one client, least squares and whole batches, the estimate of the old loss is exact."""
    steps, lr = 60, 0.02
    stream = Permuted(Synthetic(4, [1, 4, 4], 64, 8, noise=60.0, seed=seed), 2)
    schedule = {"rounds_per_task": 2, "clients_per_round": 1, "local_epochs": steps // 2, "batch_size": 64}
    grown, learned, curved = {}, {}, {}
    for label in ("rgo", "fedavg"):
        data = tiny_data(stream, num_clients=1, schedule=schedule, seed=seed)
        rgo = RGO(share=1.0, curvature="inputs", damping=0.01)
        methods: dict[str, Method] = {"squares": LeastSquares(), **({"rgo": rgo} if label == "rgo" else {})}
        client, watch = tiny_client(data, double(LinearMap), partial(torch.optim.SGD, lr=lr), methods), Watch()
        fit(client, data, None, [watch])
        start, end = (watch.models[moment]["head.weight"].numpy() for moment in (2, 4))
        old, new = Quadratic(data, 0), Quadratic(data, 1)
        d = len(old.a)
        inverse = np.linalg.inv(old.a + 0.01 * np.trace(old.a) / d * np.eye(d))
        p = inverse * d / np.trace(inverse) if label == "rgo" else np.eye(d)
        np.testing.assert_allclose(end, new.descend(start, lr, steps, p), rtol=0, atol=1e-9)
        grown[label], learned[label] = old.growth(start, end - start), -new.growth(start, end - start)
        # The mean growth of the old loss, at its minimum, by a step -G P with G of no preferred direction.
        curved[label] = np.trace(p @ old.a @ p) / d
        least = d / np.trace(np.linalg.inv(old.a))
    assert 0 < grown["rgo"] < 0.6 * grown["fedavg"]
    assert learned["rgo"] > 0.85 * learned["fedavg"]
    # Among all symmetric P of the same trace, the inverse of the old curvature has the least growth.
    assert least <= curved["rgo"] < 0.9 * curved["fedavg"]


def test_drawn_labels_give_the_gauss_newton_curvature() -> None:
    """Over many draws the logits' gradient has the mean square ``p_k (1 - p_k)``, and 0 for outputs not allowed."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64)
    allowed = torch.tensor([True, False, True, True, False])
    many = logits.expand(200_000, 5).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(drawn_label_loss(many, allowed, torch_generator(0, "test")), many)
    p = logits.masked_fill(~allowed, -torch.inf).softmax(0)
    torch.testing.assert_close(gradient.square().mean(0), p * (1 - p), rtol=0.02, atol=0)


# Feature encoding


def test_an_encoded_model_computes_what_permuted_features_give() -> None:
    data = tiny_data(permuted(3), schedule={"rounds_per_task": 1})
    for make, layers in ((deep_mlp, MLP_LAYERS), (StridedNet, CONV_LAYERS)):
        client = tiny_client(data, double(make), sgd, {"rgo": RGO()})
        federation = fit(client, data)
        network = federation.network.eval()
        explicit = copy.deepcopy(network)
        PlainRGO(data, layers).prepare(explicit, 2)
        x = torch.randn(6, *data.input_shape)
        model = federation.methods.model_for(2, federation.model.state_tensors())
        with torch.no_grad():
            logits = torch.func.functional_call(network, model, (x,))
            torch.testing.assert_close(logits, explicit(x), rtol=0, atol=1e-12)
            assert float((logits - network(x)).abs().max()) > 1e-2


def test_evaluation_uses_every_tasks_own_order() -> None:
    """A task's accuracy in the matrix is that of the model encoded for this task."""
    data = tiny_data(permuted(3), schedule={"rounds_per_task": 2})
    federation = fit(tiny_client(data, deep_mlp, sgd, {"rgo": RGO()}), data)
    network = federation.network.eval()
    for task in range(3):
        test = data.tasks[task].test
        with torch.no_grad():
            logits = torch.func.functional_call(
                network,
                federation.methods.model_for(task, federation.model.state_tensors()),
                (data.tasks[task].transform(test.images),),
            )
        correct = int((logits.argmax(1) == test.labels).sum())
        assert float(federation.accuracy.compute()[2, task]) == pytest.approx(100 * correct / len(test), abs=1e-3)


@pytest.mark.parametrize(
    "beside",
    [
        FedProx(0.5),
        PersonalLayers(["head.*"]),
        LearningRateDecay(factor=2.0, patience=1, threshold=0.5),
        DPFedAvg(0.1, 0.1, True, quantile=0.5),
    ],
)
def test_who_stands_first_changes_nothing(beside: Method) -> None:
    """Anchors, own tensors and validation are in the task's order while clients train, in any order of the methods.
    Updates are bounded in the server's order."""
    found = []
    for names in (["beside", "rgo"], ["rgo", "beside"]):
        methods: dict[str, Method] = {"beside": copy.deepcopy(beside), "rgo": RGO(share=0.0)}
        data = tiny_data(permuted(3), num_clients=5, validation=0.2, schedule={"rounds_per_task": 2, "cohort_width": 3})
        watch = Watch()
        federation = fit(tiny_client(data, deep_mlp, sgd, {name: methods[name] for name in names}), data, None, [watch])
        found.append(watch.models[-1])
        if isinstance(beside, LearningRateDecay):  # so that validation decides about steps
            assert methods["beside"].report().figures["mean_rate"] < 1
            held = [federation.clients.get("learning rate", client) for client in range(5)]
            found[-1] |= {f"loss of {client}": of["best"] for client, of in enumerate(held) if of is not None}
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# Clients, widths, settings


@pytest.mark.parametrize("share", [0.2, 0.4, 1.0])
def test_the_share_of_clients_that_keep_a_projection(share: float) -> None:
    data = tiny_data(permuted(2), num_clients=10, schedule={"rounds_per_task": 1, "clients_per_round": 5})
    rgo = RGO(share=share)
    federation = fit(tiny_client(data, mlp, sgd, {"rgo": rgo}), data)
    assert federation.clients.holders("rgo") == sorted(rgo.keepers(0))
    assert len(rgo.keepers(0)) == round(10 * share)
    model = sum(p.numel() * 4 for p in federation.network.parameters())
    assert federation.channel.total_downlink_bytes == (10 + len(rgo.keepers(0))) * model
    assert rgo.report().figures["memory_bytes"] == 4 * (16**2 + 8**2) + 2 * 8
    assert federation.clients.bytes() == len(rgo.keepers(0)) * rgo.report().figures["memory_bytes"]


def test_the_clients_of_the_share_depend_on_the_seed_alone() -> None:
    def keepers(seed: int, **options: Any) -> frozenset[int]:
        data = tiny_data(permuted(2), num_clients=10, seed=seed, schedule={"rounds_per_task": 1})
        rgo = RGO(**options)
        fit(tiny_client(data, mlp, sgd, {"rgo": rgo}), data)
        return rgo.keepers(0)

    assert keepers(0) == keepers(0, damping=0.1) == keepers(0, feature_encoding=False)
    assert keepers(0) != keepers(1)


def test_a_layer_without_curvature_is_left_as_it_is() -> None:
    """Inputs that are all zero leave the projection at the identity and divide nothing by zero."""
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    client = tiny_client(data, mlp, partial(torch.optim.SGD, lr=1e-9), {"rgo": RGO(share=1.0)})
    with torch.no_grad():
        client.network.layers[0].weight.zero_()
        client.network.layers[0].bias.fill_(-1.0)
    federation = fit(client, data)
    held = federation.clients.get("rgo", 0)
    assert held is not None
    assert torch.equal(held["head"], torch.eye(8))
    assert float(held["head scale"]) == 0


@pytest.mark.parametrize(
    ("options", "methods", "names"),
    [
        ({}, {"er": ER()}, "false with er:"),
        ({}, {"agem": AGEM(), "fed": FedAGEM()}, "false with agem, fed:"),
        ({}, {"ewc": EWC(1.0)}, "false with ewc:"),
        ({}, {"fedcurv": FedCurv(1.0), "scaffold": SCAFFOLD()}, "false with fedcurv, scaffold:"),
        ({}, {"gpm": GPM()}, "false with gpm:"),
        ({}, {"fot": FOT()}, "false with fot:"),
        ({"exposure": "cumulative"}, {}, "false with data.exposure: cumulative"),
        ({"stream": split(2), "scenario": "class"}, {}, "false with data.scenario: class"),
    ],
)
def test_features_are_not_encoded_where_tasks_mix(
    options: dict[str, Any], methods: dict[str, Method], names: str
) -> None:
    """Samples of an earlier task would pass through the current task's order. Without encoding, these runs work."""
    data = tiny_data(schedule={"rounds_per_task": 1}, **options)
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, mlp, sgd, {"rgo": RGO(), **methods}), data)
    assert caught.value.key == "methods.rgo.feature_encoding"
    assert names in str(caught.value)
    fit(tiny_client(data, mlp, sgd, {"rgo": RGO(feature_encoding=False), **methods}), data)
