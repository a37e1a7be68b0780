"""Lightning callbacks that run, record and show an experiment."""

from callbacks.federated import FederatedOrchestrator

__all__ = ["FederatedOrchestrator"]
