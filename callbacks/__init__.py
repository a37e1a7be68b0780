"""Lightning callbacks that run, record and show an experiment."""

import cfl  # noqa: F401  before lightning: see cfl/torchvision_ops.py
from callbacks.checkpoint import RoundCheckpoint
from callbacks.dashboards import DashboardLog
from callbacks.federated import FederatedOrchestrator
from callbacks.local_models import LocalModels
from callbacks.progress import RoundProgress
from callbacks.record import RunRecord
from callbacks.targets import AccuracyTargets

__all__ = [
    "AccuracyTargets",
    "DashboardLog",
    "FederatedOrchestrator",
    "LocalModels",
    "RoundCheckpoint",
    "RoundProgress",
    "RunRecord",
]
