"""cfl: train and compare continual federated learning methods."""

import cfl.torchvision_ops  # noqa: F401  first: see the module

__version__ = "0.1.0"
