"""Networks with the sizes and parameter counts of the papers, and the layers and functions to train them."""

from cfl.models.acgan import ACGAN
from cfl.models.alexnet import AlexNet
from cfl.models.base import Network, num_parameters
from cfl.models.batchnorm import (
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    batch_mask,
    convert_batchnorm,
    unmaskable_layers,
)
from cfl.models.cnn import DropoutCNN, MnistCNN, SmallCNN
from cfl.models.lenet import LeNet
from cfl.models.made import MADE
from cfl.models.mlp import MLP
from cfl.models.resnet import ResNet18
from cfl.models.tiny_yolo import TinyYOLO
from cfl.models.vit import PromptedViT

__all__ = [
    "ACGAN",
    "MADE",
    "MLP",
    "AlexNet",
    "DropoutCNN",
    "LeNet",
    "MaskedBatchNorm1d",
    "MaskedBatchNorm2d",
    "MnistCNN",
    "Network",
    "PromptedViT",
    "ResNet18",
    "SmallCNN",
    "TinyYOLO",
    "batch_mask",
    "convert_batchnorm",
    "num_parameters",
    "unmaskable_layers",
]
