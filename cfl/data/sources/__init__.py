"""Data sets by the names used in configurations. Only ``load`` reads files and imports heavy libraries."""

from cfl.data.sources.arrays import Arrays
from cfl.data.sources.base import Source
from cfl.data.sources.binarised import Binarised
from cfl.data.sources.binary_sets import BinarySet
from cfl.data.sources.coco_boxes import CocoBoxes
from cfl.data.sources.csv_table import CsvTable
from cfl.data.sources.digits import Digits
from cfl.data.sources.features import Features
from cfl.data.sources.folder import ImageFolder
from cfl.data.sources.from_dataset import FromDataset
from cfl.data.sources.mini_imagenet import MiniImageNet
from cfl.data.sources.notmnist import NotMNIST
from cfl.data.sources.recorded_frames import RecordedFrames
from cfl.data.sources.root import data_root
from cfl.data.sources.synthetic import Synthetic
from cfl.data.sources.tiny_imagenet import TinyImageNet
from cfl.data.sources.usps import USPS
from cfl.data.sources.vision import CIFAR10, CIFAR100, KMNIST, MNIST, SVHN, EMNISTLetters, FashionMNIST
from cfl.data.sources.voc_boxes import VocBoxes
from cfl.data.sources.yahoo_answers import YahooAnswers

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "KMNIST",
    "MNIST",
    "SVHN",
    "USPS",
    "Arrays",
    "Binarised",
    "BinarySet",
    "CocoBoxes",
    "CsvTable",
    "Digits",
    "EMNISTLetters",
    "FashionMNIST",
    "Features",
    "FromDataset",
    "ImageFolder",
    "MiniImageNet",
    "NotMNIST",
    "RecordedFrames",
    "Source",
    "Synthetic",
    "TinyImageNet",
    "VocBoxes",
    "YahooAnswers",
    "data_root",
]
