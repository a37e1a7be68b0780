"""Lightning callbacks that run, record and display an experiment."""

import cfl  # noqa: F401  before lightning: see cfl/runtime/torchvision_ops.py
from cfl.callbacks.accuracy_targets import AccuracyTargets
from cfl.callbacks.checkpoint import RoundCheckpoint
from cfl.callbacks.federated_orchestrator import FederatedOrchestrator
from cfl.callbacks.local_evaluation import LocalModels
from cfl.callbacks.metric_logging import DashboardLog
from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.callbacks.progress import RoundProgress
from cfl.callbacks.run_record import RunRecord

__all__ = [
    "AccuracyTargets",
    "DashboardLog",
    "FederatedOrchestrator",
    "LocalModels",
    "PrivacyBudget",
    "RoundCheckpoint",
    "RoundProgress",
    "RunRecord",
]
