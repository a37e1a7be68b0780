"""Every engine computes the same local steps. Engines differ in speed only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import (
    DECAY,
    MOMENTUM,
    ConvNet,
    PoolNet,
    StridedNet,
    double,
    dropping,
    fit,
    mlp,
    needs_onednn,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    unequal,
    weights,
)
from torch import Tensor, nn

from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted
from cfl.engines import (
    EngineChoice,
    EngineOptions,
    WorkerEngine,
    base,
    batch_last,
    build_engine,
    layers,
    products,
    recorded,
    workers,
)
from cfl.engines.against_autograd import SAMPLES
from cfl.engines.batch_last import BatchLastChain
from cfl.engines.chain import Chain
from cfl.engines.products import Products
from cfl.methods.base import Method
from cfl.models import MLP, AlexNet, LeNet, MnistCNN, Network, ResNet18, SmallCNN
from cfl.models.dropout import convert_dropout
from cfl.runtime.errors import ConfigError, EngineCannot

VMAP = EngineOptions("vmap")
ADAM = partial(torch.optim.Adam, lr=0.02)


class Branches(Network):
    """A network that is no chain of layers: two layers side by side, one of half weight, and an unused layer."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        inputs = input_shape[0] * input_shape[1] * input_shape[2]
        self.left, self.right, self.idle = nn.Linear(inputs, 5), nn.Linear(inputs, 5), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.drop(torch.tanh(self.left(x)) + 0.5 * torch.relu(self.right(x)))


class Thinned(Network):
    """A network with 1 x 1 kernels and a pooling of 1 x 1 windows with stride 2, which only drops pixels."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv1, self.conv2 = nn.Conv2d(input_shape[0], 3, 1), nn.Conv2d(3, 2, 1, stride=2)
        self.pool = nn.MaxPool2d(1, 2)
        height, width = ((side + 3) // 4 for side in input_shape[1:])
        self.head = nn.Linear(2 * height * width, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return self.pool(torch.relu(self.conv2(torch.relu(self.conv1(x))))).flatten(1)


def trained(
    engine: EngineOptions, width: int, network: Any, optimizer: Any = sgd, stream: Any = None, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    data = unequal(width, stream, local_epochs=2, rounds_per_task=1)
    client = tiny_client(data, network, optimizer, options.pop("methods", None), engine)
    federation = fit(client, data, **options)
    return weights(federation), torch.as_tensor(client.mean_loss)


def assert_same(one: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor]) -> None:
    for name in one[0]:
        torch.testing.assert_close(one[0][name], other[0][name], rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [sgd, DECAY, MOMENTUM, ADAM], ids=["sgd", "decay", "momentum", "adam"])
@pytest.mark.parametrize(
    "network", [mlp, dropping, ConvNet, double(norm_net), Branches], ids=["mlp", "dropout", "conv", "norm", "branches"]
)
def test_workers_agree_with_vmap(network: Any, optimizer: Any) -> None:
    """Workers train to the weights of vmap for any cohort width, also with dropout: masks depend on the client only.

    The network with BatchNorm is tested in float64. The true gradient of a bias before BatchNorm is zero, and Adam
    would amplify its rounding error in float32.
    """
    expected = trained(VMAP, 7, network, optimizer)
    engine = EngineOptions("workers", 2, batch_last=False)
    for width in (1, 3, 7):
        assert_same(trained(engine, width, network, optimizer), expected)


@pytest.mark.parametrize("network", [dropping, PoolNet], ids=["mlp", "pool"])
def test_who_fetches_samples_and_masks_does_not_matter(monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    """Samples and masks fetched for all clients at once or by each thread give the same weights, bit for bit."""
    engine = EngineOptions("workers", 2, stack=1, batch_last=network is PoolNet)
    together = trained(engine, 7, network, DECAY)
    monkeypatch.setattr(workers, "FETCHED_TOGETHER", 0)
    apart = trained(engine, 7, network, DECAY)
    for name in apart[0]:
        assert torch.equal(apart[0][name], together[0][name])


@pytest.mark.parametrize("optimizer", [DECAY, ADAM], ids=["decay", "adam"])
@pytest.mark.parametrize(
    "network", [ConvNet, partial(StridedNet, dropout=0.4), PoolNet], ids=["conv", "strided", "pool"]
)
def test_the_batch_last_agrees_with_the_batch_first(network: Any, optimizer: Any) -> None:
    """Both layouts agree for batches of 1 to 4 samples, stride, padding, and dropout of maps and units."""
    expected = trained(EngineOptions("workers", 2, batch_last=False), 7, network, optimizer)
    assert_same(trained(EngineOptions("workers", 2, batch_last=True), 3, network, optimizer), expected)
    assert_same(trained(VMAP, 7, network, optimizer), expected)


@pytest.fixture
def calls_of_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes (m, k, n) of products that oneDNN computes, while products of all sizes count as worth it."""
    shapes: list[tuple[int, ...]] = []
    call = products._linear()

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((int(x.shape[0]), int(x.shape[1]), int(weight.shape[0])))
        return call(x, weight, bias)

    monkeypatch.setattr(products, "WORTH_ONEDNN", 1)
    monkeypatch.setattr(products, "_linear", lambda: noted)
    return shapes


@needs_onednn
@pytest.mark.parametrize("optimizer", [sgd, DECAY, ADAM], ids=["sgd", "decay", "adam"])
@pytest.mark.parametrize(
    "network", [dropping, ConvNet, partial(StridedNet, dropout=0.4), PoolNet], ids=["mlp", "conv", "strided", "pool"]
)
def test_onednn_agrees_with_blas(
    monkeypatch: pytest.MonkeyPatch, calls_of_onednn: list[tuple[int, ...]], network: Any, optimizer: Any
) -> None:
    """oneDNN and BLAS train to the same weights, with products of all sizes. oneDNN gets only whole batches of 4."""
    asked: dict[int, bool] = {}
    of_step = products.OneDnnProducts.of_step

    def noted(self: products.OneDnnProducts, samples: int) -> products.Products:
        found = of_step(self, samples)
        asked[samples] = found is self
        return found

    monkeypatch.setattr(products.OneDnnProducts, "of_step", noted)
    layout = None if network is dropping else True
    expected = trained(EngineOptions("workers", 2, stack=1, batch_last=layout, products="blas"), 7, network, optimizer)
    assert not calls_of_onednn
    library = EngineOptions("workers", 2, stack=1, batch_last=layout, products="onednn")
    assert_same(trained(library, 3, network, optimizer), expected)
    assert calls_of_onednn
    assert asked.keys() > {4}  # smaller last batches, too
    assert all(by_onednn is (samples % 4 == 0) for samples, by_onednn in asked.items())
    if network is dropping:  # 16 pixels to 12 to 8 units, 4 samples
        forward, inner, weights = (4, 16, 12), (4, 8, 12), (12, 4, 16)
        assert {forward, inner, weights} <= set(calls_of_onednn)
        assert all(4 in shape for shape in calls_of_onednn)


@needs_onednn
@pytest.mark.parametrize("network", [mlp, SmallCNN])
def test_engines_multiply_by_the_library_of_their_choice(network: Any) -> None:
    """An engine multiplies whole batches and multiples of them by its library, also with the batch last."""
    built = convert_dropout(network((1, 16, 16), 4))
    for library in ("blas", "onednn"):
        last = network is SmallCNN
        choice = EngineChoice("workers", 2, 1, batch_last=last, products=library)
        engine = build_engine(choice, built, (1, 16, 16), EngineOptions(), 6)
        assert isinstance(engine, WorkerEngine)
        assert engine.chain is not None
        assert isinstance(engine.chain, BatchLastChain) is last
        of_steps = {samples: engine.chain.products.of_step(samples).library for samples in (1, 5, 6, 12, 13)}
        assert of_steps == {1: "blas", 5: "blas", 6: library, 12: library, 13: "blas"}


@needs_onednn
def test_trials_are_of_the_runs_batch_size(calls_of_onednn: list[tuple[int, ...]]) -> None:
    """Trials use the run's batch size: with another one they would time the products of partial batches."""
    data = tiny_data(num_clients=2, schedule={"batch_size": 3, "cohort_width": "auto", "rounds_per_task": 1})
    client = tiny_client(data, mlp, engine=EngineOptions("workers", 1, stack=1, products="onednn"))
    trained: list[int] = []
    client.training_step = lambda *_: trained.append(len(calls_of_onednn))  # type: ignore[method-assign]
    fit(client, data)
    assert trained
    assert trained[0] == len(calls_of_onednn) > 0
    assert all(3 in shape for shape in calls_of_onednn)


@pytest.mark.parametrize("library", ["blas", pytest.param("onednn", marks=needs_onednn)])
@pytest.mark.parametrize("clip", [None, 100.0], ids=["at once", "kept"])
@pytest.mark.parametrize("stream", [None, split()], ids=["all outputs", "some outputs"])
@pytest.mark.parametrize("network", [dropping, PoolNet], ids=["mlp", "pool"])
def test_recorded_steps_are_the_steps(
    monkeypatch: pytest.MonkeyPatch, network: Any, stream: Any, clip: float | None, library: Any
) -> None:
    """Recorded steps give the weights of plain steps bit for bit, with dropout, weight decay and every batch size."""
    runs = []
    for worth in (1, 10**9):
        monkeypatch.setattr(products, "WORTH_ONEDNN", 1)  # else oneDNN would compute no product here
        monkeypatch.setattr(recorded, "WORTH_RECORDING", worth)
        made = []
        record = recorded.RecordedSteps._record
        monkeypatch.setattr(
            recorded.RecordedSteps, "_record", lambda *a, made=made, record=record: made.append(1) or record(*a)
        )
        engine = EngineOptions("workers", 2, stack=1, batch_last=network is PoolNet, products=library)
        runs.append(trained(engine, 7, network, DECAY, stream, gradient_clip_val=clip))
        assert bool(made) == (worth == 1)
        monkeypatch.undo()
    for name in runs[0][0]:
        assert torch.equal(runs[0][0][name], runs[1][0][name])


@pytest.mark.parametrize("network", [mlp, ConvNet])
def test_workers_leave_outputs_of_other_tasks_alone(network: Any) -> None:
    expected = trained(VMAP, 3, network, DECAY, split())
    for last in (False, True) if network is ConvNet else (None,):
        assert_same(trained(EngineOptions("workers", 2, batch_last=last), 3, network, DECAY, split()), expected)


@pytest.mark.parametrize("optimizer", [DECAY, ADAM], ids=["decay", "adam"])
@pytest.mark.parametrize("stack", [2, 7])
def test_stacks_agree_with_vmap(optimizer: Any, stack: int) -> None:
    """Stacks agree with vmap for clients of 4 to 24 samples: with padding, clients that finish early, and dropout."""
    expected = trained(VMAP, 7, dropping, optimizer)
    assert_same(trained(EngineOptions("workers", 2, stack), 7, dropping, optimizer), expected)


class Prox(Method):
    """A penalty: 0.3 / 2 of the squared distance to the received model."""

    def penalty(self, cohort: Any) -> Tensor:
        return (
            torch.stack(
                [(p - cohort.global_parameters[n]).square().flatten(1).sum(1) for n, p in cohort.parameters.items()]
            ).sum(0)
            * 0.15
        )


class Halve(Method):
    """Halves every gradient."""

    def adjust_gradients(self, cohort: Any) -> None:
        for gradient in cohort.gradients.values():
            gradient.mul_(0.5)


@pytest.mark.parametrize("network", [mlp, Branches])
@pytest.mark.parametrize("make", [lambda: {"prox": Prox()}, lambda: {"halve": Halve()}], ids=["prox", "halve"])
def test_methods_see_gradients_whatever_the_engine(network: Any, make: Callable[[], dict[str, Method]]) -> None:
    plain = trained(VMAP, 3, network)
    expected = trained(VMAP, 3, network, methods=make())
    assert not torch.allclose(plain[0]["head.weight"], expected[0]["head.weight"], atol=1e-4)
    assert_same(trained(EngineOptions("workers", 2), 3, network, methods=make()), expected)


class Asks(Method):
    """Requests a step's gradients under ``torch.no_grad`` and compares them with those of the step itself."""

    asked = 0

    def extend_batch(self, cohort: Any, batch: Any) -> Any:
        with torch.no_grad():
            self.found = {n: g.clone() for n, g in cohort.gradients_on(batch, "dropout").items()}
        return batch

    def adjust_gradients(self, cohort: Any) -> None:
        self.asked += 1
        for name, gradient in cohort.gradients.items():
            torch.testing.assert_close(self.found[name], gradient)


@pytest.mark.parametrize("engine", [VMAP, EngineOptions("workers", 2)], ids=["vmap", "workers"])
@pytest.mark.parametrize("network", [mlp, Branches])
def test_a_method_may_ask_for_gradients_at_any_time(network: Any, engine: EngineOptions) -> None:
    plain, asks = trained(engine, 3, network), Asks()
    assert_same(trained(engine, 3, network, methods={"asks": asks}), plain)
    assert asks.asked > 0


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.05}])
def test_clipping_sees_gradients_whatever_the_engine(options: dict[str, Any]) -> None:
    expected = trained(VMAP, 3, mlp, **options)
    assert_same(trained(EngineOptions("workers", 2), 3, mlp, **options), expected)


# The hand-written step.


def chain_case(make: Callable[..., Network], shape: tuple[int, int, int], **options: Any) -> tuple[Network, Chain]:
    torch.manual_seed(0)
    network = make(shape, 6, **options).double()
    chain = Chain.of(network)
    assert chain is not None
    return network, chain


class Collect:
    """An update that keeps gradients by name, in float64."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor, products: Products) -> None:
        self.found[name] = left @ right  # of a convolution, [O, C kh kw]

    def gradient(self, name: str, gradient: Tensor) -> None:
        self.found[name] = gradient.clone()


@pytest.mark.parametrize("outputs", [None, [0, 2, 3]], ids=["all", "some outputs"])
@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (MLP, (1, 4, 4), {"hidden": [9, 7], "dropout": 0.0}),
        (MLP, (2, 3, 3), {"hidden": [], "dropout": []}),
        (AlexNet, (3, 20, 21), {"dropout": 0.0}),
        (SmallCNN, (1, 28, 28), {"dropout": 0.0}),
        (MnistCNN, (2, 17, 16), {}),
        (StridedNet, (2, 7, 6), {}),
        (Thinned, (1, 6, 7), {}),
    ],
)
@pytest.mark.parametrize("batch_last", [False, True], ids=["batch first", "batch last"])
def test_hand_written_gradients_are_autograds(
    make: Callable[..., Network],
    shape: tuple[int, int, int],
    options: dict[str, Any],
    outputs: list[int] | None,
    batch_last: bool,
) -> None:
    """Hand-written gradients are autograd's, also for pooling windows of equal values, where the first gets all."""
    network, chain = chain_case(make, shape, **options)
    if batch_last:
        turned = BatchLastChain.of_chain(chain)
        assert turned is not None
        chain = turned
    x, y = torch.randn(5, *shape, dtype=torch.float64), torch.tensor([0, 2, 3, 3, 2])
    x[:, :, : shape[1] // 2] = 0
    allowed = None if outputs is None else torch.tensor([o in outputs for o in range(6)])
    logits = network(x)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    expected = torch.nn.functional.cross_entropy(logits, y)
    expected.backward()
    update = Collect()
    detached = {n: p.detach() for n, p in network.named_parameters()}
    loss = chain.step(x.clone(), y, None, allowed, detached, {}, update)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    assert set(update.found) == set(detached)
    for name, parameter in network.named_parameters():
        found = update.found[name].view(parameter.shape)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("pooling", "units"),
    [
        (nn.MaxPool2d(2, padding=1), 18),
        (nn.MaxPool2d(2, dilation=2), 4),
        (nn.MaxPool2d(3, 2, ceil_mode=True), 8),
        (nn.MaxPool2d((3, 1), (1, 2)), 12),
    ],
)
@pytest.mark.parametrize("samples", [1, 3, 40])
def test_the_batch_last_pools_as_torch_does(pooling: nn.Module, units: int, samples: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3), nn.ReLU(), pooling, nn.Flatten(), nn.Linear(units, 6)]
    network = nn.Sequential(*layers).double()
    chain = Chain.of(network)
    assert chain is not None
    turned = BatchLastChain.of_chain(chain)
    assert turned is not None
    x, y = torch.randn(samples, 1, 6, 7, dtype=torch.float64), torch.arange(samples) % 6
    x[:, :, :4] = 0  # of equal values in a window, the first gets the gradient
    torch.nn.functional.cross_entropy(network(x), y).backward()
    update = Collect()
    turned.step(x.clone(), y, None, None, {n: p.detach() for n, p in network.named_parameters()}, {}, update)  # type: ignore[arg-type]
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(update.found[name].view(parameter.shape), parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("convolution", "by_rows"),
    [
        (nn.Conv2d(3, 2, 3), True),
        (nn.Conv2d(3, 2, (2, 3), padding=(1, 2)), True),
        (nn.Conv2d(3, 2, (3, 2), dilation=(2, 1), stride=(1, 2)), True),
        (nn.Conv2d(3, 2, (3, 2), dilation=(1, 3), padding=2, bias=False), True),
        (nn.Conv2d(3, 2, 3, stride=2), False),
        (nn.Conv2d(3, 2, (1, 3)), False),
        (nn.Conv2d(3, 60, 3), False),
    ],
)
@pytest.mark.parametrize("once", [True, False], ids=["added at once", "added"])
def test_both_ways_to_an_inputs_gradient_are_autograds(
    convolution: nn.Conv2d, by_rows: bool, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input's gradient is autograd's, whether whole kernel rows are added or one kernel element after another.

    Rows are added for overlapping patches, single elements in all other cases.
    """
    torch.manual_seed(0)
    convolution = convolution.double()
    layer = batch_last.Conv2d(layers.Conv2d("conv", convolution))
    monkeypatch.setattr(Products, "adds_at_once", once)
    taken: list[str] = []
    for way in ("_added_by_rows", "_added_one_by_one"):
        method = getattr(batch_last.Conv2d, way)
        monkeypatch.setattr(batch_last.Conv2d, way, lambda *a, way=way, method=method: taken.append(way) or method(*a))
    x = torch.randn(5, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    z = convolution(x)
    g = torch.randn_like(z)
    z.backward(g)
    weights = {f"conv.{name}": p.detach() for name, p in convolution.named_parameters()}
    run = layers.Pass(weights, {}, Collect(), 1)  # type: ignore[arg-type]
    layer.forward(run, x.detach().permute(1, 2, 3, 0).contiguous())
    found = layer.backward(run, g.permute(1, 2, 3, 0).contiguous(), True)
    assert found is not None
    torch.testing.assert_close(found.permute(3, 0, 1, 2), x.grad, rtol=1e-10, atol=1e-12)
    assert taken == ["_added_by_rows" if by_rows and once else "_added_one_by_one"]


def test_chains_that_the_batch_last_cannot_compute() -> None:
    grouped = Chain.of(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2)))
    assert grouped is not None
    assert BatchLastChain.of_chain(grouped) is None


def test_a_stack_of_clients_is_each_client_by_itself() -> None:
    """A stacked step gives each client's own step, also with unequal batches and a client without samples."""
    network, chain = chain_case(MLP, (1, 3, 3), hidden=[8, 5], dropout=0.0)
    assert chain.stackable
    m = 3
    stacked = {n: p.detach() + 0.1 * torch.randn(m, *p.shape, dtype=p.dtype) for n, p in network.named_parameters()}
    x, y = torch.randn(m, 4, 1, 3, 3, dtype=torch.float64), torch.randint(0, 6, (m, 4))
    mask = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    update = Collect()
    losses = chain.step(x.clone(), y, mask, None, stacked, {}, update)  # type: ignore[arg-type]
    for client, used in enumerate([4, 2]):
        alone, own = Collect(), {n: w[client] for n, w in stacked.items()}
        loss = chain.step(x[client, :used].clone(), y[client, :used], None, None, own, {}, alone)  # type: ignore[arg-type]
        torch.testing.assert_close(losses[client], loss, rtol=1e-12, atol=1e-12)
        for name in own:
            torch.testing.assert_close(update.found[name][client], alone.found[name], rtol=1e-10, atol=1e-12)
    assert losses[2] == 0
    assert all(not g[2].any() for g in update.found.values())


@pytest.mark.parametrize("make", [LeNet, ResNet18, Branches, norm_net])
def test_other_networks_are_no_chains(make: Callable[..., Network]) -> None:
    assert Chain.of(make((3, 32, 32), 4)) is None


def test_linear_layers_on_maps_are_no_chains() -> None:
    """A linear layer that multiplies every row of a map makes the network no chain. Engines still train it alike."""

    class Rows(Network):
        def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
            super().__init__(input_shape, num_outputs)
            self.rows, self.head = nn.Linear(input_shape[2], 3), nn.Linear(3 * input_shape[1], num_outputs)

        def features(self, x: Tensor) -> Tensor:
            return torch.relu(self.rows(x)).flatten(1)

    assert Chain.of(Rows((1, 4, 4), 3)) is None
    assert_same(trained(EngineOptions("workers", 2), 3, Rows), trained(VMAP, 3, Rows))


def test_hooks_and_shared_weights_are_no_chains() -> None:
    hooked = MLP((1, 2, 2), 2, [3], 0.0)
    hooked.layers[0].register_forward_hook(lambda *_: None)
    assert Chain.of(hooked) is None
    shared = MLP((1, 2, 2), 2, [4, 4], 0.0)
    shared.layers[1].weight = shared.layers[0].weight
    assert Chain.of(shared) is None


class Probe(Network):
    """A head on features that are computed in ``context``: without gradients, or in another precision."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, context: Any = torch.no_grad) -> None:
        super().__init__(input_shape, num_outputs)
        self.fixed, self.head = nn.Linear(math.prod(input_shape), 8), nn.Linear(8, num_outputs)
        self.context = context

    def features(self, x: Tensor) -> Tensor:
        with self.context():
            return torch.relu(self.fixed(x.flatten(1)))


def test_what_a_graph_does_not_tell_is_no_chain() -> None:
    assert Chain.of(Probe((1, 4, 4), 3, nullcontext)) is not None
    assert Chain.of(Probe((1, 4, 4), 3)) is None
    assert Chain.of(Probe((1, 4, 4), 3, partial(torch.autocast, "cpu", torch.bfloat16))) is None
    with torch.no_grad():
        assert Chain.of(MLP((1, 2, 2), 2, [3], 0.0)) is not None


@pytest.mark.parametrize("engine", [EngineOptions(), EngineOptions("workers", 1), EngineOptions("workers", 2), VMAP])
def test_layers_without_gradients_stay(engine: EngineOptions) -> None:
    data = tiny_data()
    client = tiny_client(data, Probe, engine=engine)
    fixed, head = client.network.fixed.weight.clone(), client.network.head.weight.clone()
    fit(client, data)
    assert torch.equal(client.network.fixed.weight, fixed)
    assert not torch.equal(client.network.head.weight, head)


class Running(Network):
    """A network that keeps a running mean in a buffer."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.fc, self.head = nn.Linear(math.prod(input_shape), 8), nn.Linear(8, num_outputs)
        self.register_buffer("mean", torch.ones(8))
        self.calls = 0

    def features(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc(x.flatten(1)))
        self.calls += 1
        self.mean.mul_(0.5).add_(0.5 * h.detach().mean(0))
        return h - self.mean


def test_looking_for_a_chain_changes_nothing() -> None:
    network = Running((1, 4, 4), 3)
    assert Chain.of(network) is None
    assert network.calls == 0
    assert torch.equal(network.mean, torch.ones(8))
    assert_same(trained(EngineOptions("workers", 2), 3, Running), trained(VMAP, 1, Running))


def frozen_by_a_hook(input_shape: tuple[int, int, int], num_outputs: int) -> Network:
    network = MLP(input_shape, num_outputs, [7], 0.0)
    network.layers[0].register_full_backward_pre_hook(lambda module, gradients: (torch.zeros_like(gradients[0]),))
    return network


def test_hooks_of_the_backward_pass_are_called_or_the_engine_refused() -> None:
    for engine, width in ((EngineOptions("workers", 2), 3), (VMAP, 1), (EngineOptions(), 3)):
        data = tiny_data(schedule={"cohort_width": width})
        client = tiny_client(data, frozen_by_a_hook, engine=engine)
        before = client.network.layers[0].weight.clone()
        fit(client, data)
        assert torch.equal(client.network.layers[0].weight, before)
    with pytest.raises(EngineCannot, match=r"hooks of the backward pass of 'layers\.0'.*cohort_width: 1"):
        trained(VMAP, 3, frozen_by_a_hook)


class Wave(Network):
    """Convolutions along one axis."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv, self.head = nn.Conv2d(1, 64, (1, 9)), nn.Linear(64 * 30, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(torch.relu(self.conv(x)), (1, 4)).flatten(1)


@needs_onednn
def test_onednn_convolves_along_one_axis() -> None:
    def run(library: Any) -> dict[str, Tensor]:
        source = Synthetic(4, [1, 1, 128], 128, 8, noise=60.0)
        schedule = {"rounds_per_task": 1, "batch_size": 32, "cohort_width": 2}
        data = tiny_data(Permuted(source, 1), num_clients=2, schedule=schedule)
        client = tiny_client(data, Wave, engine=EngineOptions("workers", 1, batch_last=True, products=library))
        return weights(fit(client, data))

    onednn = run("onednn")
    torch.testing.assert_close(onednn, run("blas"), rtol=0, atol=1e-5)


# Which engine.


class Noisy(Network):
    """A network that draws random numbers in its forward pass."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) + 0.1 * torch.randn(len(x), 1)


def test_workers_are_refused_where_threads_would_mix_up_random_numbers() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind.*random numbers"):
        trained(EngineOptions("workers", 2), 3, Noisy)
    trained(EngineOptions("auto", 2), 3, Noisy)


@pytest.mark.parametrize(("width", "tolerance"), [(1, 1e-5), (3, 1e-3)])
@pytest.mark.parametrize("exposure", ["sequential", "joint"])
def test_mixed_precision_multiplies_in_bfloat16_and_keeps_weights_in_float32(
    exposure: Any, width: int, tolerance: float
) -> None:
    """A local step of every client, by plain autograd under torch's own autocast. Stacked products round otherwise.

    With ``joint`` samples are weighed one by one.
    """
    schedule = {"rounds_per_task": 1, "batch_size": 1000, "cohort_width": width}
    data = tiny_data(permuted(1), num_clients=3, schedule=schedule, exposure=exposure)
    assert any(len(own) & (len(own) - 1) for own in data.indices[0].values())  # 1 / len has no exact bfloat16
    steep = partial(torch.optim.SGD, lr=1.0)
    client = tiny_client(data, mlp, steep, {}, EngineOptions("vmap"))
    network, sums = copy.deepcopy(client.network).requires_grad_(), {}
    for number in range(3):
        x, y = data.gather(0, torch.from_numpy(data.indices[0][number]))
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(network(x), y)
        for (name, _), gradient in zip(
            network.named_parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True
        ):
            sums[name] = sums.get(name, 0) + gradient
    found = weights(fit(client, data, precision="bf16-mixed"))
    exact = weights(fit(tiny_client(data, mlp, steep, {}, EngineOptions("vmap")), data))
    for name, tensor in network.named_parameters():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], tensor.detach() - sums[name] / 3, rtol=0, atol=tolerance)
    assert max(float((found[n] - exact[n]).abs().max()) for n in exact) > 1e-4


def test_workers_are_refused_in_mixed_precision() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind.*32-true"):
        trained(EngineOptions("workers", 2), 3, mlp, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"kind": "threads"}, "engine.kind"),
        ({"workers": 0}, "engine.workers"),
        ({"kind": "vmap", "workers": 3}, "engine.workers"),
        ({"kind": "workers", "stack": 0}, "engine.stack"),
        ({"kind": "auto", "stack": 2}, "engine.stack"),
        ({"kind": "vmap", "batch_last": True}, "engine.batch_last"),
        ({"products": "mkl"}, "engine.products"),
        ({"kind": "auto", "products": "onednn"}, "engine.products"),
        ({"kind": "vmap", "products": "onednn"}, "engine.products"),
        ({"compile": "fast"}, "engine.compile"),
        ({"kind": "workers", "compile": "default"}, "engine.compile"),
        ({"matmul_precision": "low"}, "engine.matmul_precision"),
    ],
)
def test_bad_engine_options(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        EngineOptions(**options)


def test_onednn_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "available", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.products.*no oneDNN"):
        EngineOptions("workers", products="onednn")
    EngineOptions("workers", products="blas")


def test_a_failure_in_a_worker_names_round_and_clients() -> None:
    class Broken(Branches):
        def features(self, x: Tensor) -> Tensor:
            if self.training and torch.is_grad_enabled() and len(x) > SAMPLES:
                raise ArithmeticError("no such layer")
            return super().features(x)

    with pytest.raises(RuntimeError, match=r"local step 0 of clients .* failed in round 0 .*no such layer"):
        trained(EngineOptions("workers", 2), 3, Broken)


def test_worker_threads_end_with_the_fit() -> None:
    import threading

    before = threading.active_count()
    trained(EngineOptions("workers", 3), 7, mlp)
    for thread in threading.enumerate():
        if thread.name.startswith("client-"):
            thread.join(timeout=5)
    assert threading.active_count() <= before


def test_engines_built_alone_know_their_shape() -> None:
    engine = WorkerEngine(MLP((1, 2, 2), 2, [3], 0.0), (1, 2, 2), threads=1, stack=4)
    assert engine.stack == 4
    assert WorkerEngine(SmallCNN((1, 16, 16), 2, 0.0), (1, 16, 16), stack=4).stack == 1
