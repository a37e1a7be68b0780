"""The best of several settings, by the mean over seeds of a value of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cfl.reporting.compare.statistics import Spread
from cfl.reporting.text_table import TextTable
from cfl.running.finished import R, Results
from cfl.running.grid import Values, named

Scores = Mapping[int, float | str]
"""Seed -> the value of a setting's run, or why it has none."""


def scores_of(
    experiment: Mapping[str, Any], seeds: Iterable[int], results: Results[R], value: Callable[[R], float | str]
) -> dict[int, float | str]:
    """The values of an experiment's runs, without the seeds that are still to be run.

    Args:
        experiment: the settings that decide the results.
        seeds: the seeds that count.
        results: finished and diverged runs.
        value: the value of a finished run, or why it has none.
    """
    runs, diverged = results.of(experiment), results.diverged_seeds(experiment)
    return {
        seed: value(runs[seed]) if seed in runs else "diverged" for seed in seeds if seed in runs or seed in diverged
    }


def mean_of(scores: Scores, seeds: int) -> float | None:
    """The mean over seeds: None while a seed is to be run, NaN if a run has no value.

    Args:
        scores: as :func:`scores_of` returns them.
        seeds: number of seeds that count, at least 1.
    """
    if len(scores) < seeds:
        return None
    numbers = [value for value in scores.values() if not isinstance(value, str)]
    spread = Spread.of(numbers)
    return spread.mean if spread and len(numbers) == len(scores) else math.nan


def best_of(means: Sequence[tuple[Values, float | None]], highest: bool) -> Values | None:
    """The settings with the best mean, of equals the first. NaN is worse than any number.

    Args:
        means: settings with their :func:`mean_of`.
        highest: whether the highest or the lowest mean is the best.

    Returns:
        None while a mean is not known, and if all are NaN.
    """
    if any(mean is None for _, mean in means):
        return None
    sign = 1.0 if highest else -1.0
    known = [(values, sign * mean) for values, mean in means if mean is not None and not math.isnan(mean)]
    return max(known, key=lambda entry: entry[1])[0] if known else None


def at_an_end(chosen: Values, candidates: Iterable[Values]) -> Values:
    """The chosen numbers that are the smallest or largest ones tried, so that a better one may lie beyond."""
    every = list(candidates)
    found = []
    for key, value in chosen:
        tried = {number for values in every for k, v in values if k == key and (number := _number(v)) is not None}
        if len(tried) > 1 and _number(value) in (min(tried), max(tried)):
            found.append((key, value))
    return tuple(found)


def _number(value: Any) -> float | None:
    """A finite number, also as a text of the command line; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def score_text(scores: Scores, decimals: int = 2) -> str:
    """The mean over the seeds with a value, and the reasons why others have none: ``81.25 ± 0.40; diverged``."""
    reasons = dict.fromkeys(value for value in scores.values() if isinstance(value, str))
    spread = Spread.of([value for value in scores.values() if not isinstance(value, str)])
    return "; ".join([*([spread.shown(decimals) if spread else "-"] if spread or not reasons else []), *reasons])


def candidates_table(
    candidates: Sequence[tuple[Values, Scores]], chosen: Values | None, value: str, decimals: int = 2
) -> TextTable:
    """The table of settings, in which the chosen one is marked.

    Args:
        candidates: settings with their scores.
        chosen: the best one, if it is known.
        value: heading of the scores.
        decimals: digits of the scores behind the point.
    """
    rows = [
        [named(values) + (" **chosen**" if values == chosen else ""), score_text(scores, decimals), str(len(scores))]
        for values, scores in candidates
    ]
    return TextTable(["setting", value, "seeds"], rows)
