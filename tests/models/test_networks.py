import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import avg_pool2d, conv2d, max_pool2d, relu

import cfl.models
from cfl.models import (
    ACGAN,
    MADE,
    MLP,
    AlexNet,
    DropoutCNN,
    LeNet,
    MnistCNN,
    Network,
    PromptedViT,
    ResNet18,
    SmallCNN,
    TinyYOLO,
    num_parameters,
)
from cfl.models.lenet import local_response_norm, same_max_pool2d
from cfl.models.vit import PromptPool
from cfl.runtime.errors import ConfigError
from cfl.testing import check_network

# (class, options, input shape, outputs): small networks of every class and option value that changes the computation.
CASES: list[tuple[type[Network], dict[str, Any], tuple[int, int, int], int]] = [
    (MLP, {}, (1, 5, 6), 10),
    (MLP, {"hidden": [7, 9], "dropout": 0.1}, (2, 3, 4), 4),
    (MLP, {"hidden": []}, (1, 4, 4), 3),
    (TinyYOLO, {"width": 3}, (1, 32, 48), 3 * (5 + 2) * 2 * 3),
    (MADE, {"hidden": [7, 9], "direct": True, "conditioning": True, "mask_seed": 1}, (1, 3, 4), 12),
    (AlexNet, {}, (3, 19, 22), 6),
    (ResNet18, {"width": 4}, (3, 16, 16), 6),
    (ResNet18, {"width": 3, "norm": "batch", "pool": 1, "head_bias": True}, (3, 12, 9), 5),
    (ResNet18, {"width": 3, "norm": "batch_no_stats", "stem_stride": 2}, (3, 18, 20), 5),
    (SmallCNN, {}, (1, 16, 20), 10),
    (MnistCNN, {}, (1, 17, 16), 10),
    (DropoutCNN, {}, (3, 6, 9), 5),
    (LeNet, {}, (3, 8, 11), 10),
    (LeNet, {"initial": "variance_scaling"}, (3, 8, 11), 10),
    (ACGAN, {"classifier": partial(MLP, hidden=[7]), "widths": [5]}, (1, 4, 6), 4),
    (
        PromptedViT,
        {"pool_size": 4, "prompt_length": 2, "top_k": 3, "image_size": 8, "patch_size": 4, "num_layers": 2}
        | {"num_heads": 2, "hidden_dim": 6, "mlp_dim": 7, "weights": None},
        (1, 4, 6),
        4,
    ),
    (ACGAN, {"classifier": SmallCNN, "generator_kind": "conv", "noise_dim": 3, "bound": 2.0}, (2, 17, 19), 5),
]
IDS = [f"{case[0].__name__}-{index}" for index, case in enumerate(CASES)]


def build(case: tuple[type[Network], dict[str, Any], tuple[int, int, int], int], seed: int = 0) -> Network:
    """Build a network. BatchNorm layers, if any, get random weights and statistics."""
    torch.manual_seed(seed)
    network_class, options, shape, outputs = case
    network = network_class(shape, outputs, **options)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.weight is not None
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.uniform_(-0.5, 0.5)
                    module.running_var.uniform_(0.5, 1.5)
    return network


def images(case: tuple[type[Network], dict[str, Any], tuple[int, int, int], int], *lead: int) -> Tensor:
    return torch.randn(*lead, *case[2], generator=torch.Generator().manual_seed(1))


def all_subclasses(parent: type) -> set[type]:
    return {parent}.union(*(all_subclasses(child) for child in parent.__subclasses__()))


def test_every_network_of_the_package_has_a_case() -> None:
    for module in pkgutil.iter_modules(cfl.models.__path__):
        importlib.import_module(f"cfl.models.{module.name}")
    ours = {c for c in all_subclasses(Network) if c.__module__.startswith("cfl.models.") and not inspect.isabstract(c)}
    assert ours == {case[0] for case in CASES}, f"add the network to CASES in {__file__}"


@pytest.mark.parametrize(
    ("network_class", "options", "shape", "outputs", "parameters"),
    [
        (MLP, {}, (1, 28, 28), 10, 638_810),
        (AlexNet, {}, (3, 32, 32), 100, 6_704_128),
        (ResNet18, {}, (3, 32, 32), 50, 1_122_140),
        (ResNet18, {"width": 32, "norm": "batch_no_stats", "stem_stride": 2}, (3, 84, 84), 100, 3_025_440),
        (ResNet18, {"width": 64, "norm": "batch", "pool": 4, "head_bias": True}, (3, 32, 32), 10, 11_173_962),
        (ResNet18, {"width": 64, "norm": "batch", "pool": 4, "head_bias": True}, (3, 32, 32), 100, 11_220_132),
        (SmallCNN, {}, (1, 28, 28), 10, 21_840),
        (MnistCNN, {}, (1, 28, 28), 10, 431_080),
        (DropoutCNN, {}, (1, 28, 28), 10, 1_199_882),
        (DropoutCNN, {}, (3, 32, 32), 10, 1_626_442),
        (LeNet, {}, (3, 32, 32), 50, 3_012_920),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    network_class: type[Network], options: dict[str, Any], shape: tuple[int, int, int], outputs: int, parameters: int
) -> None:
    with torch.device("meta"):
        network = network_class(shape, outputs, **options)
        assert network(torch.empty(2, *shape)).shape == (2, outputs)
    assert num_parameters(network) == parameters


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_contract_of_every_network(case: tuple[type[Network], dict[str, Any], tuple[int, int, int], int]) -> None:
    network_class, options, shape, outputs = case
    network = build(case).eval()
    x = images(case, 5)
    features = network.features(x)
    logits = network(x)
    assert logits.shape == (5, outputs)
    if network.predicts == "vector":
        assert isinstance(network.head, nn.Linear)
        assert features.shape == (5, network.head.in_features)
        expected = features @ network.head.weight.T + (0 if network.head.bias is None else network.head.bias)
        torch.testing.assert_close(logits, expected)
    owners = [module for module in network.modules() if list(module.parameters(recurse=False))]
    assert all(
        isinstance(module, (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, PromptPool)) for module in owners
    )
    # Options given in YAML are readable as attributes.
    given = {"input_shape": shape, "num_outputs": outputs, **options}
    for name in list(inspect.signature(network_class.__init__).parameters)[1:]:
        value = getattr(network, name)
        assert name == "dropout" or name not in given or value == given[name]
    # A sample's logits do not depend on its batch, except with batch statistics.
    if options.get("norm") != "batch_no_stats":
        torch.testing.assert_close(network(x[2:3]), logits[2:3])


SMALL = [case for case in CASES if case[0] in (MLP, SmallCNN, MnistCNN, DropoutCNN)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_classifiers_pass_the_kits_checks(
    case: tuple[type[Network], dict[str, Any], tuple[int, int, int], int],
) -> None:
    network_class, options, shape, outputs = case
    check_network(partial(network_class, **options), shape, outputs)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_stacked_networks_equal_separate_ones(
    case: tuple[type[Network], dict[str, Any], tuple[int, int, int], int],
) -> None:
    networks = [build(case, seed).eval() for seed in range(3)]
    for network in networks:
        if isinstance(network, PromptedViT):  # clients share the frozen transformer
            network.backbone = networks[0].backbone  # type: ignore[assignment]
    x = images(case, 3, 4)
    parameters, buffers = stack_module_state(networks)  # type: ignore[arg-type]

    def one(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(networks[0], (p, b), (x,))

    stacked = vmap(one, randomness="different")(parameters, buffers, x)
    separate = torch.stack([network(each) for network, each in zip(networks, x, strict=True)])
    torch.testing.assert_close(stacked, separate, rtol=1e-5, atol=1e-5)
    weight = torch.randn(stacked.shape)
    # Logits do not depend on an AC-GAN's generator and realness, and on prompts' keys only by the choice of prompts.
    without = ("generator.", "realness.", "pool.keys")
    classifying = [name for name in parameters if not name.startswith(without)]
    gradients = torch.autograd.grad((stacked * weight).sum(), [parameters[name] for name in classifying])
    (separate * weight).sum().backward()
    for name, gradient in zip(classifying, gradients, strict=True):
        expected = torch.stack([network.get_parameter(name).grad for network in networks])
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("norm", ["batch", "batch_no_stats"])
def test_stacked_training_moves_each_clients_running_statistics(norm: str) -> None:
    case = (ResNet18, {"width": 3, "norm": norm, "pool": 1}, (3, 9, 9), 5)
    networks = [build(case, seed) for seed in range(3)]
    parameters, buffers = stack_module_state(networks)  # type: ignore[arg-type]
    for step in range(2):
        x = images(case, 3, 4) + step
        stacked = vmap(lambda p, b, x: functional_call(networks[0], (p, b), (x,)))(parameters, buffers, x)
        separate = torch.stack([network(each) for network, each in zip(networks, x, strict=True)])
        torch.testing.assert_close(stacked, separate, rtol=1e-4, atol=1e-5)
    assert len(buffers) == (60 if norm == "batch" else 0)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, torch.stack([network.get_buffer(name) for network in networks]))


def float64_state(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.double() for name, value in network.state_dict().items()}


def mlp_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    a = x.numpy().reshape(len(x), -1)
    for layer in ("layers.0", "layers.1", "layers.2"):
        a = np.maximum(a @ w[f"{layer}.weight"].numpy().T + w[f"{layer}.bias"].numpy(), 0)
    return torch.from_numpy(a @ w["head.weight"].numpy().T + w["head.bias"].numpy())


def alexnet_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    for conv in ("conv1", "conv2", "conv3"):
        x = max_pool2d(conv2d(x, w[f"{conv}.weight"]).clamp(min=0), 2)
    x = (x.flatten(1) @ w["fc1.weight"].T).clamp(min=0)
    x = (x @ w["fc2.weight"].T).clamp(min=0)
    return x @ w["head.weight"].T


def digits_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    for conv in ("conv1", "conv2"):
        x = max_pool2d(conv2d(x, w[f"{conv}.weight"], w[f"{conv}.bias"]).clamp(min=0), 2)
    x = (x.flatten(1) @ w["fc.weight"].T + w["fc.bias"]).clamp(min=0)
    return x @ w["head.weight"].T + w["head.bias"]


def dropout_cnn_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    for conv in ("conv1", "conv2"):
        x = conv2d(x, w[f"{conv}.weight"], w[f"{conv}.bias"]).clamp(min=0)
    x = max_pool2d(x, 2).flatten(1)
    x = (x @ w["fc.weight"].T + w["fc.bias"]).clamp(min=0)
    return x @ w["head.weight"].T + w["head.bias"]


def naive_response_norm(x: Tensor) -> Tensor:
    """The formula in TensorFlow's documentation, channel by channel, for x ``[B, C, H, W]`` float64."""
    radius, bias, alpha, beta = 4, 1.0, 0.001 / 9, 0.75
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        power = (x[:, max(0, c - radius) : c + radius + 1] ** 2).sum(1)
        out[:, c] = x[:, c] / (bias + alpha * power) ** beta
    return out


def naive_same_pool(x: Tensor) -> Tensor:
    """TensorFlow's rule for padding "same", window by window, for x ``[B, C, H, W]``."""
    height, width = x.shape[2:]
    out = torch.empty(*x.shape[:2], -(-height // 2), -(-width // 2), dtype=x.dtype)

    def window(i: int, size: int, outputs: int) -> slice:
        pad_before = max((outputs - 1) * 2 + 3 - size, 0) // 2
        return slice(max(2 * i - pad_before, 0), min(2 * i - pad_before + 3, size))

    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            rows, columns = window(i, height, out.shape[2]), window(j, width, out.shape[3])
            out[:, :, i, j] = x[:, :, rows, columns].amax((2, 3))
    return out


def lenet_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    for conv in ("conv1", "conv2"):
        x = conv2d(x, w[f"{conv}.weight"], w[f"{conv}.bias"], padding=2).clamp(min=0)
        x = naive_same_pool(naive_response_norm(x))
    for layer in ("fc1", "fc2"):
        x = ((x.flatten(1) if layer == "fc1" else x) @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).clamp(min=0)
    return x @ w["head.weight"].T + w["head.bias"]


def resnet_without_norm_reference(w: dict[str, Tensor], x: Tensor) -> Tensor:
    x = relu(conv2d(x, w["stem.weight"], padding=1))
    for block, stride in enumerate([1, 1, 2, 1, 2, 1, 2, 1]):
        inner = relu(conv2d(x, w[f"blocks.{block}.conv1.weight"], stride=stride, padding=1))
        inner = conv2d(inner, w[f"blocks.{block}.conv2.weight"], padding=1)
        shortcut = conv2d(x, w[f"blocks.{block}.shortcut.weight"], stride=stride) if stride == 2 else x
        x = relu(inner + shortcut)
    return avg_pool2d(x, 2).flatten(1) @ w["head.weight"].T


@pytest.mark.parametrize(
    ("network_class", "options", "shape", "reference"),
    [
        (MLP, {}, (1, 28, 28), mlp_reference),
        (AlexNet, {}, (3, 32, 32), alexnet_reference),
        (ResNet18, {}, (3, 32, 32), resnet_without_norm_reference),
        (SmallCNN, {}, (1, 28, 28), digits_reference),
        (MnistCNN, {}, (1, 28, 28), digits_reference),
        (DropoutCNN, {}, (3, 13, 10), dropout_cnn_reference),
        (LeNet, {}, (3, 32, 32), lenet_reference),
        (LeNet, {}, (3, 9, 15), lenet_reference),
    ],
)
def test_logits_equal_the_formula(
    network_class: type[Network],
    options: dict[str, Any],
    shape: tuple[int, int, int],
    reference: Callable[[dict[str, Tensor], Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    network = network_class(shape, 10, **options).eval()
    x = torch.randn(3, *shape)
    with torch.no_grad():
        expected = reference(float64_state(network), x.double())
        torch.testing.assert_close(network.double()(x.double()), expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(network.float()(x), expected.float(), rtol=1e-4, atol=1e-5)


def test_resnet_with_batchnorm_equals_torchvisions() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    theirs = resnet18(num_classes=7)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    ours = build((ResNet18, {"width": 64, "norm": "batch", "pool": 2, "head_bias": True}, (3, 16, 16), 7))
    # Both networks register layers in the same order.
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(4, 3, 16, 16)
    for train in (False, True):
        torch.testing.assert_close(ours.train(train)(x), theirs.train(train)(x), rtol=1e-4, atol=1e-4)


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


def map_sides(network: Network) -> list[tuple[int, int]]:
    """Sides of the input and output maps of each convolution, in the order of execution, for square images."""
    sides: list[tuple[int, int]] = []
    for conv in convolutions(network):
        conv.register_forward_hook(lambda _, x, y: sides.append((x[0].shape[-1], y.shape[-1])))
    network.eval()(torch.zeros(1, *network.input_shape, device=network.head.weight.device))
    return sides


def test_alexnet_maps_and_layer_inputs() -> None:
    with torch.device("meta"):
        network = AlexNet((3, 32, 32), 100)
    layers = [network.conv1, network.conv2, network.conv3, network.fc1, network.fc2]
    assert [layer.weight[0].numel() for layer in layers] == [48, 576, 512, 1024, 2048]
    assert map_sides(network) == [(32, 29), (14, 12), (6, 5)]
    assert network.fc1.in_features == 256 * 2 * 2
    assert all(layer.bias is None for layer in [*layers, network.head])


@pytest.mark.parametrize(
    ("shape", "options", "sides", "features"),
    [((3, 32, 32), {}, (32, 16, 8, 4), 640), ((3, 84, 84), {"width": 32, "stem_stride": 2}, (42, 21, 11, 6), 2304)],
)
def test_resnet_maps(
    shape: tuple[int, int, int], options: dict[str, Any], sides: tuple[int, ...], features: int
) -> None:
    with torch.device("meta"):
        network = ResNet18(shape, 50, **options)
    assert len(convolutions(network)) == 20  # the layers FOT protects
    assert all(conv.bias is None for conv in convolutions(network))
    a, b, c, d = sides
    stages = [(a, a)] * 4
    for before, after in ((a, b), (b, c), (c, d)):
        stages += [(before, after), (after, after), (before, after), (after, after), (after, after)]
    assert map_sides(network) == [(shape[-1], a), *stages]
    assert network.head.in_features == features


def test_dropout_sits_where_the_papers_put_it() -> None:
    def order(network: Network) -> list[str]:
        called: list[str] = []
        for name, module in network.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(lambda *_, name=name: called.append(name))
            if isinstance(module, (nn.Dropout, nn.Dropout2d)):
                entry = f"{type(module).__name__} {module.p}"
                module.register_forward_hook(lambda *_, entry=entry: called.append(entry))
        network(torch.zeros(1, *network.input_shape))
        return called

    assert order(MLP((1, 28, 28), 10)) == (
        ["layers.0", "Dropout 0.2", "layers.1", "Dropout 0.5", "layers.2", "Dropout 0.5", "head"]
    )
    convolutions_first = ["conv1", "Dropout 0.2", "conv2", "Dropout 0.2", "conv3", "Dropout 0.5"]
    wide_layers = ["fc1", "Dropout 0.5", "fc2", "Dropout 0.5", "head"]
    assert order(AlexNet((3, 32, 32), 10)) == [*convolutions_first, *wide_layers]
    assert order(SmallCNN((1, 28, 28), 10)) == ["conv1", "conv2", "Dropout2d 0.5", "fc", "Dropout 0.5", "head"]
    assert order(MnistCNN((1, 28, 28), 10)) == ["conv1", "conv2", "fc", "head"]
    wide = ["Dropout 0.25", "fc", "Dropout 0.5", "head"]
    assert order(DropoutCNN((3, 32, 32), 10)) == ["conv1", "conv2", *wide]


@pytest.mark.parametrize("network_class", [MLP, AlexNet, SmallCNN, DropoutCNN])
def test_dropout_differs_between_clients_and_can_be_turned_off(network_class: type[Network]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 20, 20)

    def logits_of_two_clients(**options: Any) -> tuple[Tensor, Tensor]:
        network = network_class((3, 20, 20), 10, **options).train()
        stacked = {name: torch.stack([p, p]).detach() for name, p in network.named_parameters()}
        both = vmap(lambda p: functional_call(network, p, (x,)), randomness="different")(stacked)
        return both, network.eval()(x)

    both, without = logits_of_two_clients()
    assert not torch.allclose(both[0], both[1])
    both, without = logits_of_two_clients(dropout=0)
    torch.testing.assert_close(both, torch.stack([without, without]), rtol=1e-4, atol=1e-5)


def test_dropped_maps_are_dropped_whole_for_each_client_and_sample() -> None:
    network = SmallCNN((1, 28, 28), 10)
    torch.manual_seed(0)
    kept = vmap(network.map_dropout, randomness="different")(torch.ones(3, 40, 20, 8, 8)).flatten(3)
    assert torch.equal(kept.amin(-1), kept.amax(-1))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    # 2400 fair coins: five standard deviations are 0.051.
    assert abs(float((kept[..., 0] > 0).float().mean()) - 0.5) < 0.051


@pytest.mark.parametrize("channels", [1, 3, 20])
def test_response_norm(channels: int) -> None:
    torch.manual_seed(0)
    x = 10 * torch.randn(2, 3, channels, 4, 5, dtype=torch.float64)
    expected = torch.stack([naive_response_norm(each) for each in x])
    torch.testing.assert_close(local_response_norm(x[0]), expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(vmap(local_response_norm)(x), expected, rtol=1e-12, atol=0)
    torchs = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
    torch.testing.assert_close(local_response_norm(x[0]), torchs(x[0]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("height", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_same_max_pool(height: int, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, height, width) - 5  # negative, so that padding with zeros would show
    expected = torch.stack([naive_same_pool(each) for each in x])
    assert torch.equal(same_max_pool2d(x[0]), expected[0])
    assert torch.equal(vmap(same_max_pool2d)(x), expected)


@pytest.mark.parametrize(
    ("network_class", "options", "smallest"),
    [
        (AlexNet, {}, 19),
        (SmallCNN, {}, 16),
        (MnistCNN, {}, 16),
        (DropoutCNN, {}, 6),
        (ResNet18, {"width": 2}, 9),
        (ResNet18, {"width": 2, "pool": 4}, 25),
        (ResNet18, {"width": 2, "stem_stride": 3, "pool": 2}, 25),
        (LeNet, {}, 1),
    ],
)
def test_images_that_are_too_small_are_refused(
    network_class: type[Network], options: dict[str, Any], smallest: int
) -> None:
    with torch.device("meta"):
        network = network_class((3, smallest, smallest + 1), 4, **options)
        assert network(torch.empty(1, 3, smallest, smallest + 1)).shape == (1, 4)
        for shape in [(3, smallest - 1, 40), (3, 40, smallest - 1)]:
            if smallest > 1:
                with pytest.raises(ConfigError, match=re.escape(f"at least {smallest} x {smallest}")) as error:
                    network_class(shape, 4, **options)
                assert error.value.key == "model.network"


def test_images_too_small_for_the_largest_strides_are_refused() -> None:
    """Rounded up quotients by 8 s are at least p from 8 s (p - 1) + 1 pixels on."""
    most = 2**32 - 1
    with torch.device("meta"), pytest.raises(ConfigError, match=rf"at least {8 * most * (most - 1) + 1} x "):
        ResNet18((1, 8, 8), 4, pool=most, stem_stride=most)


@pytest.mark.parametrize(
    ("network_class", "arguments", "key"),
    [
        (MLP, {"input_shape": (1, 28, 0)}, "input_shape"),
        (MLP, {"input_shape": (28, 28)}, "input_shape"),
        (MLP, {"num_outputs": 0}, "num_outputs"),
        (MLP, {"hidden": [10, 0]}, "hidden"),
        (MLP, {"hidden": [10, 10], "dropout": [0.5]}, "dropout"),
        (MLP, {"dropout": 1.0}, "dropout"),
        (AlexNet, {"dropout": [0.2, 0.2, 0.5, 0.5, -0.1]}, "dropout"),
        (SmallCNN, {"dropout": [0.5]}, "dropout"),
        (ResNet18, {"width": 0}, "width"),
        (ResNet18, {"pool": 0}, "pool"),
        (ResNet18, {"stem_stride": 0}, "stem_stride"),
        (ResNet18, {"norm": "group"}, "norm"),
    ],
)
def test_bad_options_are_refused(network_class: type[Network], arguments: dict[str, Any], key: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError) as error:
        network_class(**{"input_shape": (1, 28, 28), "num_outputs": 10, **arguments})
    assert error.value.key == f"model.network.{key}"
