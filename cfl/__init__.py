"""cfl: train and compare continual federated learning methods."""

import os

# Before torch is first imported, which reads it once. Waiting math threads then sleep instead of spinning: on a machine
# whose cores are also used by others, spinning made small networks several times slower. A value of the user's stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import cfl.runtime.torchvision_ops  # noqa: F401  before anything that imports torchvision: see the module

__version__ = "0.1.0"
