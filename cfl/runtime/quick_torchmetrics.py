"""Lets ``import lightning`` do without most of torchmetrics, which halves the time until a command begins to work.

Lightning imports torchmetrics for its version and two classes. The package then imports all its domains, and with them
scipy and torchvision. Here only those three names are served; any other name completes the package. The two classes
import the module that draws metrics, and with it matplotlib. Stand-ins for its names are served without matplotlib.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from cfl.runtime import incomplete_package

_PACKAGE = "torchmetrics"
_SERVED = {
    "Metric": f"{_PACKAGE}.metric",
    "MetricCollection": f"{_PACKAGE}.collections",
    "__version__": f"{_PACKAGE}.__about__",
}
_PLOT = f"{_PACKAGE}.utilities.plot"


def _served(name: str) -> Any:
    importlib.import_module(f"{_PACKAGE}.utilities")  # first, because it and the module of Metric import each other
    return getattr(importlib.import_module(_SERVED[name]), name)


def _plot(*arguments: Any, **options: Any) -> Any:
    """Stand-in for ``plot_single_or_multi_val`` that completes its module and calls it."""
    return incomplete_package.fully_imported(_PLOT).plot_single_or_multi_val(*arguments, **options)


def serve_when_imported() -> None:
    """Serve torchmetrics as described when it is about to be imported for the first time."""
    beforehand = {"_logger": logging.getLogger(_PACKAGE)}
    incomplete_package.serve_when_imported(_PACKAGE, _SERVED, _served, beforehand)
    of_plot = {"_AX_TYPE": object, "_PLOT_OUT_TYPE": object, "plot_single_or_multi_val": _plot}
    incomplete_package.serve_when_imported(_PLOT, of_plot, of_plot.__getitem__)
