"""Lightning callbacks that run, record and show an experiment."""

from callbacks.checkpoint import RoundCheckpoint
from callbacks.dashboards import DashboardLog
from callbacks.federated import FederatedOrchestrator
from callbacks.progress import RoundProgress
from callbacks.record import RunRecord

__all__ = ["DashboardLog", "FederatedOrchestrator", "RoundCheckpoint", "RoundProgress", "RunRecord"]
