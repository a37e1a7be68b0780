"""Find the measures: all objects in :mod:`cfl.metrics.measures`, by name, scenario or kind of network."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from cfl.metrics import measures
from cfl.metrics.base import Measure
from cfl.metrics.measures.accuracy import ACCURACY
from cfl.metrics.measures.likelihood import NLL

__all__ = ["ACCURACY", "MEASURES", "NLL", "Measure", "measure_named", "measure_of", "measures_for"]


def _found() -> dict[str, Measure]:
    names = sorted(module.name for module in iter_modules(measures.__path__))
    modules = [import_module(f"{measures.__name__}.{name}") for name in names]
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Measure)}


_BY_NAME = _found()
MEASURES = tuple(_BY_NAME.values())
"""All measures, in the order in which tables and pages have them."""
_BY_SCENARIO = {scenario: measure for measure in MEASURES for scenario in measure.scenarios}


def measure_of(scenario: str) -> Measure:
    """The measure of runs in a scenario; accuracy of a scenario that is not known."""
    return _BY_SCENARIO.get(scenario, ACCURACY)


def measure_named(name: str) -> Measure:
    """Return the measure with a name.

    Raises:
        KeyError: there is no such measure.
    """
    return _BY_NAME[name]


def measures_for(predicts: str) -> list[Measure]:
    """Return the measures for networks with these outputs (:attr:`cfl.models.base.Network.predicts`)."""
    return [measure for measure in MEASURES if measure.predicts == predicts]
