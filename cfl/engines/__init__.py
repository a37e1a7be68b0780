"""Engines: how a cohort's local steps are computed."""

from cfl.engines.base import Engine, EngineOptions, StepContext
from cfl.engines.choice import EngineChoice, build_engine
from cfl.engines.open_choices import candidates
from cfl.engines.vmapped import VmapEngine
from cfl.engines.workers import WorkerEngine

__all__ = [
    "Engine",
    "EngineChoice",
    "EngineOptions",
    "StepContext",
    "VmapEngine",
    "WorkerEngine",
    "build_engine",
    "candidates",
]
