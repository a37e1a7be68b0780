"""Read and check ``summary.json``, the figures of a finished run.

It is an object with the keys of :data:`SUMMARY_KEYS`. ``acc``, ``fgt``, ``fgt_max``, ``bwt`` and ``fwt`` are those of
:attr:`cfl.metrics.measures.accuracy.Accuracy.formulas`, null where undefined. ``used_space`` (percent or null),
``rounds_to_accuracy`` (target in percent -> rounds or null), ``stopped_early`` and ``measures`` (a user's: name ->
``higher`` or ``lower``) may be absent. A run with another measure has the figure of that measure, such as ``nll``,
instead of the five accuracies. Other keys are kept as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from cfl.metrics.base import Better
from cfl.metrics.measure import ACCURACY, MEASURES, Measure
from cfl.reporting.checksums import check_unchanged
from cfl.reporting.csv_file import RunFolderError, open_file
from cfl.reporting.measures import CURVES
from cfl.reporting.names import is_method_name
from cfl.runtime.run_files import SUMMARY

_LARGEST = 1e100
"""Bound on the magnitude of fractional numbers in a summary: squares of larger ones might not be finite."""
_TEXT, _COUNT, _NUMBER, _NUMBER_OR_NULL = "text", "an integer from 0", "a number from 0", "a number or null"
SUMMARY_KEYS: dict[str, str] = {
    "method": _TEXT,
    "benchmark": _TEXT,
    "partition": _TEXT,
    "scenario": _TEXT,
    "seed": _COUNT,
    "acc": _NUMBER_OR_NULL,
    "fgt": _NUMBER_OR_NULL,
    "fgt_max": _NUMBER_OR_NULL,
    "bwt": _NUMBER_OR_NULL,
    "fwt": _NUMBER_OR_NULL,
    "uplink_bytes": _COUNT,
    "downlink_bytes": _COUNT,
    "seconds": _NUMBER,
    "rounds": _COUNT,
    "tasks": _COUNT,
    "clients": _COUNT,
    "config_hash": _TEXT,
}
"""Keys of ``summary.json`` and the kinds of their values. Only runs with a measure other than accuracy may lack
``acc``, ``fgt``, ``fgt_max``, ``bwt`` and ``fwt``."""
_OF_ACCURACY = ("acc", "fgt", "fgt_max", "bwt", "fwt")


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's ``summary.json`` with all entries.

    Raises:
        RunFolderError: the file is missing, broken or changed since the run ended, a key is missing or of the wrong
            type, or the figure of the run's measure is outside its bounds.
    """
    path = folder / SUMMARY
    check_unchanged(folder, SUMMARY)
    with open_file(path) as file:
        try:
            summary = json.load(
                file,
                parse_constant=_refuse_constant,
                parse_int=_int64,
                parse_float=_finite,
                object_pairs_hook=_without_repetitions,
            )
            json.dumps(summary, ensure_ascii=False).encode()  # refuses lone surrogates
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise RunFolderError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path}: must hold an object with the keys {', '.join(SUMMARY_KEYS)}")
    measure = measure_in(summary)
    optional = () if measure.is_accuracy else _OF_ACCURACY
    missing = [key for key in SUMMARY_KEYS if key not in summary and key not in optional]
    if missing:
        raise RunFolderError(f"{path}: missing {', '.join(missing)}")
    for key in (*SUMMARY_KEYS, "used_space", *CURVES.values()):
        kind = SUMMARY_KEYS.get(key, _NUMBER_OR_NULL)
        if not _is(summary.get(key), kind):
            raise _refused(path, summary, key, kind)
    targets, own = summary.get("rounds_to_accuracy", {}), summary.get("measures", {})
    if not isinstance(targets, dict) or not all(
        _is_number(name) and (rounds is None or _is(rounds, _COUNT)) for name, rounds in targets.items()
    ):
        raise _refused(path, summary, "rounds_to_accuracy", "target in percent -> an integer or null")
    if not isinstance(summary.get("stopped_early", False), bool):
        raise _refused(path, summary, "stopped_early", "true or false")
    if not isinstance(own, dict) or not all(is_method_name(n) and of in get_args(Better) for n, of in own.items()):
        raise _refused(path, summary, "measures", "names -> higher or lower")
    check_bounds(path, [summary.get(measure.figure)], measure)
    return summary


def _refused(path: Path, summary: Mapping[str, Any], key: str, valid: str) -> RunFolderError:
    return RunFolderError(f"{path}: {key} = {json.dumps(summary[key])} cannot be; valid: {valid}")


def measure_in(summary: Mapping[str, Any]) -> Measure:
    """The measure of a run, which has its figure in the summary."""
    return next((measure for measure in MEASURES if measure.figure in summary), ACCURACY)


def check_bounds(path: Path, values: Iterable[float | None], measure: Measure) -> None:
    """Refuse values outside the bounds of a measure.

    Raises:
        RunFolderError: names the file and the value.
    """
    low, high = measure.bounds or (-math.inf, math.inf)
    for value in values:
        if value is not None and not low <= value <= high + 1e-6:  # a mean may exceed 100 by rounding
            raise RunFolderError(
                f"{path}: {measure.one} of {value:g} {measure.unit} cannot be; valid: {low:g} to {high:g}"
            )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value, use null")


def _int64(text: str) -> int:
    if len(text) > 18:
        raise ValueError(f"{text:.20}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not abs(value := float(text)) < _LARGEST:
        raise ValueError(f"{text:.20} is too large")
    return value


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return kind == _NUMBER_OR_NULL
    if kind == _TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind == _COUNT else (int, float)):
        return False
    return kind == _NUMBER_OR_NULL or value >= 0
