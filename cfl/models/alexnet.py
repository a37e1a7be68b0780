"""The AlexNet-like network of FOT and related papers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from cfl.models.base import Network, dropout_rates, final_map


class AlexNet(Network):
    """Three convolutions and two wide layers without any bias: FOT (Bakman et al., ICLR 2024) on split CIFAR-100.

    Convolutions without padding, kernels 4, 3, 2 to 64, 128, 256 maps, each followed by ReLU, dropout and 2 x 2
    max-pooling; then 2048 and 2048 units with ReLU and dropout. On ``(3, 32, 32)`` images the maps have sides
    32-29-14-12-6-5-2 and the layers before the head have input dimensions 48, 576, 512, 1024, 2048. With 100 outputs
    (10 tasks of 10 classes) it has 6,704,128 parameters.

    Args:
        input_shape: ``(C, H, W)`` of one image, H and W at least 19.
        num_outputs: outputs of all tasks together.
        dropout: probability in [0, 1) after each of the five layers, a list of five or one number for all; default
            ``[0.2, 0.2, 0.5, 0.5, 0.5]``.

    Raises:
        ConfigError: the images are too small.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], num_outputs: int, dropout: list[float] | float | None = None
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.dropout = dropout_rates(dropout, default=[0.2, 0.2, 0.5, 0.5, 0.5])
        height, width = final_map(self, lambda side: (((side - 3) // 2 - 2) // 2 - 1) // 2)

        self.conv1 = nn.Conv2d(self.input_shape[0], 64, 4, bias=False)
        self.conv2 = nn.Conv2d(64, 128, 3, bias=False)
        self.conv3 = nn.Conv2d(128, 256, 2, bias=False)
        self.fc1 = nn.Linear(256 * height * width, 2048, bias=False)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        self.dropouts = nn.ModuleList(nn.Dropout(rate) for rate in self.dropout)
        self.head = nn.Linear(2048, num_outputs, bias=False)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the second wide layer ``[B, 2048]``."""
        for conv, dropout in zip((self.conv1, self.conv2, self.conv3), self.dropouts[:3], strict=True):
            x = max_pool2d(dropout(relu(conv(x))), 2)
        x = x.flatten(1)
        for layer, dropout in zip((self.fc1, self.fc2), self.dropouts[3:], strict=True):
            x = dropout(relu(layer(x)))
        return x
