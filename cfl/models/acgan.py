"""An auxiliary-classifier GAN: a classifier that also detects generated images, and a generator of given classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.models.base import Network, require_head
from cfl.models.batchnorm import MaskedBatchNorm1d, MaskedBatchNorm2d
from cfl.models.evaluation import evaluation_mode
from cfl.models.frozen_vit import FrozenViT
from cfl.models.mlp import MLP
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers, check_numbers


class ACGAN(Network):
    """AC-GAN (Odena et al., 2017): a critic, whose trunk and class outputs are any classifier, and a generator.

    The critic has two output layers on one trunk: one logit for real against generated, and the logits of the classes
    (:attr:`head`). As a classifier the network is the trunk with the class logits alone, so that it is tested, masked
    and compared like the plain classifier. A generated image is ``bound * tanh(h / bound)``, where ``h`` is the output
    of the generator's last layer, in the units of the network's input (standardised pixels).

    FedCIL (Qi et al., 2023) has other convolutional critics, for 32 x 32 images only, and transposed convolutions and
    BatchNorm in the generator. Here the trunk is the classifier that other methods train. Before each of its
    convolutions the generator enlarges maps by 2 (nearest neighbour) and cuts them to size, so that any image size
    works.

    Args:
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: outputs of all tasks together.
        classifier: class and options of the critic's trunk and class outputs; null is the MLP with its defaults.
        generator_kind: ``mlp``: fully connected layers; ``conv``: a linear layer to small maps, then enlargement and
            3 x 3 convolution in turn.
        widths: widths of the generator's hidden layers, units or maps, each >= 1; default ``[256, 512]`` (``mlp``) or
            ``[256, 128, 64]`` (``conv``: three enlargements, 4-8-16-32 or 11-21-42-84 pixels).
        generator_norm: ``batch``: BatchNorm after each of the generator's layers except the last; without BatchNorm the
            generator needs many times as many steps until its images differ by class and noise. ``none``: no BatchNorm,
            so that only weights are averaged.
        noise_dim: length of the noise vector from which, together with a class, an image is generated.
        bound: greatest absolute value of a generated pixel, > 0; 3 suits standardised images.

    Raises:
        ConfigError: an option is out of range, or the classifier cannot be the trunk.
    """

    before_options: ClassVar[dict[str, Any]] = {"generator_norm": "none"}
    """Option -> its value in runs from before the option existed."""

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        classifier: Callable[[tuple[int, int, int], int], Network] | None = None,
        generator_kind: Literal["mlp", "conv"] = "mlp",
        widths: list[int] | None = None,
        generator_norm: Literal["batch", "none"] = "batch",
        noise_dim: int = 100,
        bound: float = 3.0,
    ) -> None:
        super().__init__(input_shape, num_outputs)
        check_choices("model.network", ("mlp", "conv"), generator_kind=generator_kind)
        check_choices("model.network", ("batch", "none"), generator_norm=generator_norm)
        check_integers("model.network", 1, at_most=MOST_AT_ONCE, noise_dim=noise_dim)
        check_numbers("model.network", "(0, inf)", bound=bound)
        default = [256, 512] if generator_kind == "mlp" else [256, 128, 64]
        self.widths = default if widths is None else list(widths)
        for width in self.widths:
            check_integers("model.network", 1, at_most=MOST_AT_ONCE, widths=width)
        if generator_kind == "conv" and not self.widths:
            raise ConfigError(
                "model.network.widths", self.widths, "at least one number of maps with generator_kind: conv"
            )
        self.classifier, self.generator_kind, self.noise_dim = classifier, generator_kind, noise_dim
        self.generator_norm, self.bound = generator_norm, float(bound)

        self.trunk: Network = (MLP if classifier is None else classifier)(self.input_shape, num_outputs)
        if isinstance(self.trunk, ACGAN) or self.trunk.predicts != "vector":
            name = type(self.trunk).__name__
            raise ConfigError("model.network.classifier", name, "a network of classes without generator")
        if any(isinstance(part, FrozenViT) for part in vars(self.trunk).values()):
            name = type(self.trunk).__name__
            valid = "a network that trains all of its weights, such as MLP, SmallCNN, AlexNet or ResNet18"
            raise ConfigError("model.network.classifier", f"{name}, which has a frozen transformer", valid)
        require_head(self.trunk)
        # Class masks refer to the output layer by the name ``head``, so it has this name with every trunk.
        self.head = self.trunk.head
        del self.trunk.head
        self.realness = nn.Linear(self.head.in_features, 1)
        inputs = num_outputs + noise_dim
        self.generator: nn.Module = (MLPGenerator if generator_kind == "mlp" else ConvGenerator)(
            inputs, self.widths, self.input_shape, generator_norm == "batch"
        )

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the input ``[B, d]`` of both outputs of the critic."""
        return self.trunk.features(x)

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[B, C, H, W]`` to logits of being real ``[B]`` and of the classes ``[B, num_outputs]``."""
        features = self.features(x)
        return self.realness(features).squeeze(-1), self.head(features)

    def generate(self, noise: Tensor, y: Tensor) -> Tensor:
        """Standard normal noise ``[B, noise_dim]`` and classes ``[B]`` (int64) to images ``[B, C, H, W]``.

        In training mode the generator's BatchNorm layers, if any, use the statistics of these images.
        """
        classes = F.one_hot(y, self.num_outputs).to(noise.dtype)
        h: Tensor = self.generator(torch.cat([classes, noise], 1))
        return self.bound * torch.tanh(h / self.bound)

    @property
    def generator_names(self) -> list[str]:
        """Names of the generator's parameters, then of its buffers."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return [name for name, _ in named if name.startswith("generator.")]

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within the context the generator is in evaluation mode: images are independent, running statistics fixed."""
        with evaluation_mode(self.generator):
            yield


class MLPGenerator(nn.Module):
    """Linear layers, all except the last followed by BatchNorm (if ``normalise``) and ReLU.

    Args:
        inputs: length of the input.
        widths: widths of the hidden layers.
        shape: ``(C, H, W)`` of an image.
        normalise: whether there is BatchNorm.
    """

    def __init__(self, inputs: int, widths: list[int], shape: tuple[int, int, int], normalise: bool) -> None:
        super().__init__()
        self.shape = shape
        sizes = [inputs, *widths, shape[0] * shape[1] * shape[2]]
        self.layers = nn.ModuleList(nn.Linear(d, o) for d, o in pairwise(sizes))
        self.norms = nn.ModuleList(MaskedBatchNorm1d(width) if normalise else nn.Identity() for width in widths)

    def forward(self, z: Tensor) -> Tensor:
        """``[B, inputs]`` to ``[B, C, H, W]``."""
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            z = torch.relu(norm(layer(z)))
        image: Tensor = self.layers[-1](z)
        return image.unflatten(1, self.shape)


class ConvGenerator(nn.Module):
    """A linear layer to the smallest maps, then enlargement by 2 and a 3 x 3 convolution in turn.

    Before each enlargement there are BatchNorm (if ``normalise``) and ReLU.

    Args:
        inputs: length of the input.
        widths: numbers of maps, beginning with the smallest maps; each is followed by one enlargement.
        shape: ``(C, H, W)`` of an image. Before an enlargement, maps have half of the sides, rounded up.
        normalise: whether there is BatchNorm.
    """

    def __init__(self, inputs: int, widths: list[int], shape: tuple[int, int, int], normalise: bool) -> None:
        super().__init__()
        channels, height, width = shape
        sides = [(height, width)]
        for _ in widths:
            sides.insert(0, ((sides[0][0] + 1) // 2, (sides[0][1] + 1) // 2))
        self.start, self.sides = (widths[0], *sides[0]), sides[1:]
        self.fc = nn.Linear(inputs, widths[0] * sides[0][0] * sides[0][1])
        self.convs = nn.ModuleList(nn.Conv2d(c, o, 3, padding=1) for c, o in pairwise([*widths, channels]))
        self.norms = nn.ModuleList(MaskedBatchNorm2d(width) if normalise else nn.Identity() for width in widths)

    def forward(self, z: Tensor) -> Tensor:
        """``[B, inputs]`` to ``[B, C, H, W]``."""
        h: Tensor = self.fc(z).unflatten(1, self.start)
        for conv, norm, (height, width) in zip(self.convs, self.norms, self.sides, strict=True):
            h = conv(enlarged(torch.relu(norm(h)))[..., :height, :width])
        return h


def enlarged(maps: Tensor) -> Tensor:
    """``[B, C, h, w]`` to ``[B, C, 2 h, 2 w]``: every pixel becomes a square of four."""
    batch, channels, height, width = maps.shape
    wide = maps[..., :, None, :, None].expand(batch, channels, height, 2, width, 2)
    return wide.reshape(batch, channels, 2 * height, 2 * width)
