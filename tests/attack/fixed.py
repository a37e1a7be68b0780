"""All fixed cases: inputs that once went wrong, or that are known to break programs."""

from __future__ import annotations

from attack import fixed_data, fixed_options, fixed_runs, fixed_texts
from attack.fixed_case import Case, run

__all__ = ["CASES", "Case", "run"]

CASES: dict[str, Case] = {**fixed_texts.CASES, **fixed_options.CASES, **fixed_data.CASES, **fixed_runs.CASES}
"""Name -> case."""
