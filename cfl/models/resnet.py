"""ResNet-18 for small images, in the widths and normalisations of the papers."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu

from cfl.models.base import Network, final_map
from cfl.models.batchnorm import MaskedBatchNorm2d
from cfl.models.weights_file import take_weights
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers

Norm = Literal["none", "batch", "batch_no_stats"]

HOW_TO_GET = (
    "the file of a state dict of torchvision's resnet18, such as resnet18-f37072fd.pth, its "
    "ResNet18_Weights.IMAGENET1K_V1, from https://download.pytorch.org/models/resnet18-f37072fd.pth"
)


def _normalisation(norm: Norm, channels: int) -> nn.Module:
    if norm == "none":
        return nn.Identity()
    return MaskedBatchNorm2d(channels, track_running_stats=norm == "batch")


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut (He et al., 2016), a 1 x 1 convolution if the shape changes.

    Args:
        channels_in: number of input maps.
        channels_out: number of output maps.
        stride: of the first convolution and of the shortcut, in pixels.
        norm: after each convolution, see :class:`ResNet18`.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels_out, 3, stride)
        self.norm1 = _normalisation(norm, channels_out)
        self.conv2 = _conv(channels_out, channels_out, 3, 1)
        self.norm2 = _normalisation(norm, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        self.shortcut_norm: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = _conv(channels_in, channels_out, 1, stride)
            self.shortcut_norm = _normalisation(norm, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels_in, H, W]`` to ``[B, channels_out, ceil(H / stride), ceil(W / stride)]``."""
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(inner + self.shortcut_norm(self.shortcut(x)))


class ResNet18(Network):
    """ResNet-18 with a 3 x 3 stem, no max-pooling and convolutions without biases.

    Four stages of two blocks with ``width``, 2, 4 and 8 times ``width`` maps; stages two to four halve the maps. The
    papers' variants:

    ======================================  ==================================================  ==========
    paper, images, outputs                  options                                             parameters
    ======================================  ==================================================  ==========
    FOT 5-Datasets, (3, 32, 32), 5 x 10     the defaults                                         1,122,140
    FOT miniImageNet, (3, 84, 84), 20 x 5   width 32, norm batch_no_stats, stem_stride 2         3,025,440
    Fed-A-GEM CIFAR-10, (3, 32, 32), 10     width 64, norm batch, pool 4, head_bias true        11,173,962
    Fed-A-GEM CIFAR-100, (3, 32, 32), 100   width 64, norm batch, pool 4, head_bias true        11,220,132
    ======================================  ==================================================  ==========

    Args:
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: outputs of all tasks together.
        width: maps of the first stage, >= 1.
        norm: ``none``; ``batch`` for BatchNorm with running statistics; ``batch_no_stats`` for BatchNorm that uses the
            statistics of the batch in training and in evaluation, so that a prediction depends on its test batch.
        stem_stride: stride of the stem, >= 1, in pixels.
        pool: side of the average-pooling windows before the head, >= 1, in pixels of the last map.
        head_bias: whether the head has a bias.
        weights: file of a state dict of torchvision's ``resnet18``, ``~`` is expanded: the eight blocks start from it.
            Stem and head, whose shapes differ, start from random weights. Needs width 64 and normalisation.

    Raises:
        ConfigError: the images are too small, an option is out of range, or the file cannot be used.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        width: int = 20,
        norm: Norm = "none",
        stem_stride: int = 1,
        pool: int = 2,
        head_bias: bool = False,
        weights: str | None = None,
    ) -> None:
        super().__init__(input_shape, num_outputs)
        check_integers("model.network", 1, width=width, stem_stride=stem_stride, pool=pool)
        check_choices("model.network", ("none", "batch", "batch_no_stats"), norm=norm)
        self.width, self.norm, self.stem_stride, self.pool, self.head_bias = width, norm, stem_stride, pool, head_bias
        self.weights = weights
        # Rounding up after each of the three halvings is rounding up after a division by eight.
        rows, columns = final_map(self, lambda side: -(-side // (8 * stem_stride)) // pool)

        self.stem = _conv(self.input_shape[0], width, 3, stem_stride)
        self.stem_norm = _normalisation(norm, width)
        blocks, channels = [], width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(BasicBlock(channels, width * 2**stage, stride, norm))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels * rows * columns, num_outputs, bias=head_bias)
        if weights is not None:
            if width != 64 or norm == "none":
                raise ConfigError(
                    "model.network.weights", weights, "null, or width: 64 and norm: batch or batch_no_stats"
                )
            take_weights(weights, HOW_TO_GET, self._take_blocks)

    def _take_blocks(self, state: dict[str, Tensor]) -> None:
        """Load the blocks of torchvision's network, whose stages are ``layer1`` to ``layer4``."""
        here = {"conv1": "conv1", "bn1": "norm1", "conv2": "conv2", "bn2": "norm2"}
        here |= {"downsample.0": "shortcut", "downsample.1": "shortcut_norm"}
        own, found = self.blocks.state_dict(), {}
        for stage in range(4):
            for block in range(2):
                for theirs, ours in here.items():
                    start = f"layer{stage + 1}.{block}.{theirs}."
                    for name in (name for name in state if name.startswith(start)):
                        found[f"{2 * stage + block}.{ours}.{name.removeprefix(start)}"] = state[name]
        # Running statistics may be missing; any other missing or surplus tensor is an error.
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        self.blocks.load_state_dict({n: w for n, w in found.items() if n in own or not n.endswith(statistics)})

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the pooled maps of the last stage ``[B, 8 * width * rows * columns]``."""
        x = self.blocks(relu(self.stem_norm(self.stem(x))))
        return avg_pool2d(x, self.pool).flatten(1)
