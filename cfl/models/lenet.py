"""The LeNet of FedWeIT, with TensorFlow's local response normalisation and "same" max-pooling."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, relu

from cfl.models.base import Network
from cfl.models.initial_weights import variance_scaled
from cfl.runtime.option_checks import check_choices


def local_response_norm(x: Tensor) -> Tensor:
    """Local response normalisation as ``tf.nn.local_response_normalization`` defines it, with FedWeIT's settings.

    ``y[c] = x[c] / (1 + 0.001 / 9 * sum_{|j - c| <= 4} x[j]^2)^0.75`` over existing channels j, for maps
    ``[B, C, H, W]``. It is ``torch.nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1)``. The sum over channels is a
    1 x 1 convolution with a band matrix here: pooling over the channel axis, torch's way, takes about ten times as long
    on a CPU, more than the convolution before it.
    """
    channel = torch.arange(x.shape[1], device=x.device)
    near = ((channel[:, None] - channel).abs() <= 4).to(x.dtype)
    root = conv2d(x.square(), 0.001 / 9 * near[:, :, None, None], x.new_ones(channel.shape)).rsqrt()
    return x * (root * root.sqrt())  # several times as fast as a power


def same_max_pool2d(x: Tensor) -> Tensor:
    """3 x 3 max-pooling with stride 2 and TensorFlow's "same" padding.

    ``[B, C, H, W]`` to ``[B, C, ceil(H / 2), ceil(W / 2)]``. TensorFlow pads one row on each side of an odd height and
    one row below an even one (columns likewise), and padding is never the maximum. Letting the last window run over the
    edge (``ceil_mode``) has the same effect as the row below.
    """
    return max_pool2d(x, 3, stride=2, padding=(x.shape[-2] % 2, x.shape[-1] % 2), ceil_mode=True)


class LeNet(Network):
    """LeNet as in FedWeIT (Yoon et al., 2021): 5 x 5 convolutions to 20 and 50 maps, layers of 800 and 500 units.

    Convolutions keep the size of the maps; each is followed by ReLU, local response normalisation over 9 channels and 3
    x 3 max-pooling with stride 2, both as TensorFlow defines them (the paper's Table 3 and the code; its text has 2 x 2
    pooling, and normalisation in every layer). All layers have biases. On ``(3, 32, 32)`` images with 50 outputs (10
    tasks of 5 classes) it has 3,012,920 parameters.

    Args:
        input_shape: ``(C, H, W)`` of one image, of any size.
        num_outputs: outputs of all tasks together.
        initial: initial weights and biases: ``torch``, its layers' default, of variance 1 / (3 n) for n inputs; or
            ``variance_scaling``, as in the paper for all layers and in the published code for decomposed ones
            (:func:`cfl.models.initial_weights.variance_scaled`).

    Raises:
        ConfigError: another ``initial``.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        initial: Literal["torch", "variance_scaling"] = "torch",
    ) -> None:
        super().__init__(input_shape, num_outputs)
        check_choices("model.network", ("torch", "variance_scaling"), initial=initial)
        self.initial = initial
        channels, height, width = self.input_shape
        self.conv1 = nn.Conv2d(channels, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc1 = nn.Linear(50 * -(-height // 4) * -(-width // 4), 800)
        self.fc2 = nn.Linear(800, 500)
        self.head = nn.Linear(500, num_outputs)
        if initial == "variance_scaling":
            with torch.no_grad():
                for values in self.parameters():
                    values.copy_(variance_scaled(values))

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the second wide layer ``[B, 500]``."""
        for conv in (self.conv1, self.conv2):
            x = same_max_pool2d(local_response_norm(relu(conv(x))))
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))
