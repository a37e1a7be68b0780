"""Silences warnings of libraries about what is intended, or what a user cannot change."""

from __future__ import annotations

import logging
import warnings


def silence_libraries() -> None:
    """Silence such warnings and messages of Lightning and torch, from now on in this process."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")  # a row per round, always
    warnings.filterwarnings("ignore", message=".*across ranks is zero, but local rank has zero.*")  # test sets' shares
    warnings.filterwarnings("ignore", message=".*EvaluationLoader` across ranks is zero.*")  # of tasks nobody learns
    # Under vmap on a CPU, torch computes attention for one client after another, and asks for an issue about it.
    warnings.filterwarnings("ignore", message=".*aten::_scaled_dot_product_flash_attention_for_cpu")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # a profiler's report
