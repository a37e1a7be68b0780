"""Lightning callbacks that run, record and display an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cfl  # noqa: F401  before lightning: see cfl/runtime/torchvision_ops.py
from cfl.callbacks.accuracy_targets import AccuracyTargets
from cfl.callbacks.checkpoint import RoundCheckpoint
from cfl.callbacks.federated_orchestrator import FederatedOrchestrator
from cfl.callbacks.local_evaluation import LocalModels
from cfl.callbacks.metric_logging import DashboardLog
from cfl.callbacks.privacy_budget import PrivacyBudget
from cfl.callbacks.progress import RoundProgress
from cfl.callbacks.run_record import RunRecord

if TYPE_CHECKING:
    from lightning.pytorch import Callback

OF_SECTIONS: dict[str, type[Callback]] = {
    "local_models": LocalModels,
    "federated": FederatedOrchestrator,
    "targets": AccuracyTargets,
    "privacy": PrivacyBudget,
    "run": RunRecord,
    "dashboards": DashboardLog,
    "progress": RoundProgress,
    "checkpoint": RoundCheckpoint,
}
"""Section of a configuration -> the callback that it builds, in the order in which callbacks are called."""

__all__ = [
    "OF_SECTIONS",
    "AccuracyTargets",
    "DashboardLog",
    "FederatedOrchestrator",
    "LocalModels",
    "PrivacyBudget",
    "RoundCheckpoint",
    "RoundProgress",
    "RunRecord",
]
