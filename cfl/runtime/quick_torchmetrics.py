"""Lets ``import lightning`` do without most of torchmetrics, which halves the time until a command begins to work.

Lightning imports torchmetrics for its version and two classes. The package then imports all its domains, and with them
scipy and torchvision. Here those three names are served alone; whatever else is asked of the package completes it.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_PACKAGE = "torchmetrics"
_SERVED = {
    "Metric": f"{_PACKAGE}.metric",
    "MetricCollection": f"{_PACKAGE}.collections",
    "__version__": f"{_PACKAGE}.__about__",
}


class _Incomplete(ModuleType):
    """The package before its own code has run."""

    def __getattr__(self, name: str) -> Any:
        if name in _SERVED:
            importlib.import_module(f"{_PACKAGE}.utilities")  # it and the module of Metric import each other
            return getattr(importlib.import_module(_SERVED[name]), name)
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = PathFinder.find_spec(_PACKAGE)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Quick(Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Incomplete
        vars(module)["_logger"] = logging.getLogger(_PACKAGE)  # its modules import this from it


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name)
        if spec is not None:
            spec.loader = _Quick()
        return spec


def serve_when_imported() -> None:
    """Serve torchmetrics as described when it is about to be imported for the first time."""
    if _PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())
