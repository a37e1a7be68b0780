"""How many local steps are taken in one go, without Lightning's loop in between."""

from __future__ import annotations

BLOCK_SECONDS = 1.0
"""Approximate duration of a block of local steps. Progress and signals are handled between blocks."""


def steps_per_block(seconds_per_step: float) -> int:
    """Number of local steps that take about :data:`BLOCK_SECONDS`, at least 1.

    Args:
        seconds_per_step: duration of a step of a whole cohort.
    """
    return max(1, int(BLOCK_SECONDS / max(seconds_per_step, 1e-6)))
