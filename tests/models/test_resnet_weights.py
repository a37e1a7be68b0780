"""ResNet-18 with blocks loaded from a weight file of torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from cfl.models import ResNet18, convert_batchnorm
from cfl.runtime.errors import ConfigError

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    """torchvision's network with random weights and running statistics in its BatchNorm layers."""
    from torchvision.models import resnet18

    torch.manual_seed(3)
    network = resnet18()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                for values in (module.weight, module.bias, module.running_mean, module.running_var):
                    assert values is not None
                    values.uniform_(0.5, 1.5)
    assert isinstance(network, nn.Module)
    return network.eval()


@pytest.fixture(scope="module")
def file(theirs: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(theirs.state_dict(), path)
    return str(path)


def ours(**options: Any) -> ResNet18:
    torch.manual_seed(0)
    return ResNet18(SHAPE, 10, **{"width": 64, "norm": "batch", "pool": 4, "head_bias": True, **options})


def blocks_of(network: Any, x: Tensor) -> Tensor:
    """The output of torchvision's four stages."""
    found: Tensor = network.layer4(network.layer3(network.layer2(network.layer1(x))))
    return found


@pytest.mark.parametrize("norm", ["batch", "batch_no_stats"])
def test_blocks_compute_what_torchvisions_do(norm: str, theirs: nn.Module, file: str) -> None:
    network = convert_batchnorm(ours(weights=file, norm=norm)).eval()
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        inner = relu(network.stem_norm(network.stem(x)))
        expected = blocks_of(theirs if norm == "batch" else theirs.train(), inner)
        theirs.eval()
        torch.testing.assert_close(network.blocks(inner), expected)


def test_stem_and_head_start_as_without_a_file(file: str) -> None:
    network, random = ours(weights=file), ours()
    assert torch.equal(network.stem.weight, random.stem.weight)
    assert torch.equal(network.head.weight, random.head.weight)
    changed = [n for n, w in random.blocks.state_dict().items() if not torch.equal(w, network.blocks.state_dict()[n])]
    assert {name.rpartition(".")[2] for name in changed} >= {"weight", "bias", "running_mean", "running_var"}
    assert len([name for name in changed if name.endswith("weight")]) == 2 * 16 + 2 * 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("layer3.1.bn2.bias"), "Missing key"),
        (lambda state: state.update({"layer2.0.conv1.weight": torch.zeros(3)}), "size mismatch"),
        (lambda state: state.clear(), "Missing key"),
        (
            lambda state: state.update({"fc.bias": torch.zeros(1, 1).expand(2**21, 2**21)}),
            "more than the .* of the file",
        ),
    ],
)
def test_files_that_do_not_fit(change: Any, says: str, theirs: nn.Module, tmp_path: Path) -> None:
    state = dict(theirs.state_dict())
    change(state)
    torch.save(state, tmp_path / "changed.pth")
    with pytest.raises(ConfigError, match=says) as caught:
        ours(weights=str(tmp_path / "changed.pth"))
    assert caught.value.key == "model.network.weights"
    assert "resnet18-f37072fd.pth" in caught.value.valid


@pytest.mark.parametrize("options", [{"width": 20}, {"norm": "none"}, {"weights": "/nowhere/resnet18.pth"}])
def test_settings_that_cannot_work(options: dict[str, Any], file: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(**{"weights": file, **options})
    assert caught.value.key == "model.network.weights"
