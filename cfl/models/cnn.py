"""Small convolutional networks for digits, letters and small colour images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from cfl.models.base import Network, dropout_rates, final_map


def _side_after_two_stages(side: int) -> int:
    """Side of the maps after two 5 x 5 convolutions without padding, each with 2 x 2 pooling: 4 for a side of 28."""
    return ((side - 4) // 2 - 4) // 2


class SmallCNN(Network):
    """Two 5 x 5 convolutions to 10 and 20 maps and a layer of 50 units, all with biases.

    The network of Fed-A-GEM's code (Dai et al., 2024) on rotated and permuted MNIST: 21,840 parameters on
    ``(1, 28, 28)`` images with 10 outputs. (The paper cites McMahan et al., whose network has 1.66 million.) Whole maps
    are dropped after the second convolution, units after the wide layer.

    Args:
        input_shape: ``(C, H, W)`` of one image, H and W at least 16.
        num_outputs: outputs of all tasks together.
        dropout: probability in [0, 1) of dropping a map and of dropping a unit, a list of the two or one number for
            both; default 0.5.

    Raises:
        ConfigError: the images are too small.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], num_outputs: int, dropout: list[float] | float | None = None
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.dropout = dropout_rates(dropout, default=[0.5, 0.5])
        height, width = final_map(self, _side_after_two_stages)

        self.conv1 = nn.Conv2d(self.input_shape[0], 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.map_dropout = nn.Dropout2d(self.dropout[0])
        self.fc = nn.Linear(20 * height * width, 50)
        self.unit_dropout = nn.Dropout(self.dropout[1])
        self.head = nn.Linear(50, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the wide layer ``[B, 50]``."""
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.map_dropout(self.conv2(x)), 2))
        units: Tensor = self.unit_dropout(relu(self.fc(x.flatten(1))))
        return units


class MnistCNN(Network):
    """Two 5 x 5 convolutions to 20 and 50 maps and a layer of 500 units, all with biases, no dropout.

    PyTorch's MNIST example as it was in October 2019, the network of FedCurv (Shoham et al., 2019): 431,080
    parameters on ``(1, 28, 28)`` images with 10 outputs.

    Args:
        input_shape: ``(C, H, W)`` of one image, H and W at least 16.
        num_outputs: outputs of all tasks together.

    Raises:
        ConfigError: the images are too small.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        height, width = final_map(self, _side_after_two_stages)

        self.conv1 = nn.Conv2d(self.input_shape[0], 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc = nn.Linear(50 * height * width, 500)
        self.head = nn.Linear(500, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the wide layer ``[B, 500]``."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return relu(self.fc(x.flatten(1)))


class DropoutCNN(Network):
    """Two 3 x 3 convolutions to 32 and 64 maps, one pooling, a layer of 128 units, all with biases, and dropout.

    TensorFlow Federated's network for EMNIST (``create_conv_dropout_model``): 1,199,882 parameters on ``(1, 28, 28)``
    images with 10 outputs. On ``(3, 32, 32)`` images with 10 outputs it is the network of the CIFAR-10 benchmark of
    pfl-research (Granqvist et al., 2024; ``simple_cnn``): 1,626,442 parameters. Weights start from PyTorch's defaults
    here, and from Glorot's in the originals.

    Args:
        input_shape: ``(C, H, W)`` of one image, H and W at least 6.
        num_outputs: outputs of all tasks together.
        dropout: probability in [0, 1) of dropping an activation after the pooling and a unit of the wide layer, a list
            of the two or one number for both; default ``[0.25, 0.5]``.

    Raises:
        ConfigError: the images are too small.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], num_outputs: int, dropout: list[float] | float | None = None
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.dropout = dropout_rates(dropout, default=[0.25, 0.5])
        height, width = final_map(self, lambda side: (side - 4) // 2)

        self.conv1 = nn.Conv2d(self.input_shape[0], 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.map_dropout = nn.Dropout(self.dropout[0])
        self.fc = nn.Linear(64 * height * width, 128)
        self.unit_dropout = nn.Dropout(self.dropout[1])
        self.head = nn.Linear(128, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the wide layer ``[B, 128]``."""
        x = relu(self.conv2(relu(self.conv1(x))))
        x = self.map_dropout(max_pool2d(x, 2))
        units: Tensor = self.unit_dropout(relu(self.fc(x.flatten(1))))
        return units
