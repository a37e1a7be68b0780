"""Partitions: rules that deal training samples to clients."""

from cfl.data.partitions.assignment import client_indices
from cfl.data.partitions.base import Partition
from cfl.data.partitions.classes_per_client import ClassesPerClient
from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.data.partitions.dirichlet import Dirichlet
from cfl.data.partitions.iid import IID
from cfl.data.partitions.label_blocks import LabelBlocks
from cfl.data.partitions.natural import Natural
from cfl.data.partitions.shards import Shards

__all__ = [
    "IID",
    "ClassesPerClient",
    "ClientShares",
    "Dirichlet",
    "LabelBlocks",
    "Natural",
    "Partition",
    "Shards",
    "Shares",
    "client_indices",
]
