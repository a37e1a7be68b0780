"""Lets a package or module be imported without its own code, which runs when other than a few names are used.

Libraries import large packages for one or two names. Serving only these names takes a fraction of the time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from threading import RLock
from types import ModuleType
from typing import Any

_INCOMPLETE: dict[str, _Quick] = {}
"""Name of an incomplete package -> its loader."""


class _Incomplete(ModuleType):
    """The package before its own code has run."""

    def __getattr__(self, name: str) -> Any:
        return _INCOMPLETE[self.__name__].answer(self, name)


class _Quick(Loader):
    """Imports a package without running its own code.

    Args:
        whole: the loader that runs its code.
        served: names that are served without running the package's code.
        serve: returns the object that is served under a name.
        beforehand: name -> object that the package's modules use before its code has run.
    """

    def __init__(
        self, whole: Loader, served: Collection[str], serve: Callable[[str], Any], beforehand: Mapping[str, Any]
    ) -> None:
        self._whole, self._served, self._serve, self._beforehand = whole, served, serve, beforehand
        self._lock = RLock()  # other threads wait until the package is complete; its own code uses names of it, too

    def exec_module(self, module: ModuleType) -> None:
        _INCOMPLETE[module.__name__] = self
        module.__class__ = _Incomplete
        vars(module).update(self._beforehand)

    def answer(self, module: ModuleType, name: str) -> Any:
        """Return the package's object of this name; unless the name is served, run the package's own code first."""
        if name in self._served and module.__loader__ is self:
            return self._serve(name)
        if not name.startswith("__"):
            self.complete(module)
            if type(module) is ModuleType:
                return getattr(module, name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    def complete(self, module: ModuleType) -> None:
        """Run the package's own code, unless it has run or this thread is running it."""
        with self._lock:
            if module.__loader__ is self:
                assert module.__spec__ is not None
                module.__loader__ = module.__spec__.loader = self._whole
                self._whole.exec_module(module)
                module.__class__ = ModuleType


def is_incomplete(package: str) -> bool:
    """Whether the package has been imported without its own code, which has not run since."""
    return package in _INCOMPLETE and sys.modules[package].__loader__ is _INCOMPLETE[package]


def fully_imported(package: str) -> ModuleType:
    """Import a package, run its own code if it has not run yet, and return the package."""
    module = importlib.import_module(package)
    if package in _INCOMPLETE:
        _INCOMPLETE[package].complete(module)
    return module


class _Loaded(Loader):
    """Loader of a module that was imported while its loader was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def __init__(self, package: str, loader: Callable[[Loader], _Quick], submodules: bool) -> None:
        self._package, self._loader, self._submodules = package, loader, submodules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self._package:
            if self._submodules:
                sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = self._loader(spec.loader)
            return spec
        if name.startswith(f"{self._package}.") and not self._submodules:
            sys.meta_path.remove(self)
            fully_imported(self._package)
            if name in sys.modules:
                return spec_from_loader(name, _Loaded(sys.modules[name]))
        return None


def serve_when_imported(
    package: str,
    served: Collection[str],
    serve: Callable[[str], Any],
    beforehand: Mapping[str, Any] | None = None,
    submodules: bool = True,
) -> None:
    """Serve only some names of a package, without running its own code, when it is imported for the first time.

    Args:
        package: name of the package or module.
        served: names that are served as long as the package's own code has not run.
        serve: returns the object that is served under such a name.
        beforehand: name -> object that the package's modules use if they are imported before its own code has run.
        submodules: whether its modules can be imported from the incomplete package; if not, the first such import
            completes the package.
    """
    if package not in sys.modules:
        loader = partial(_Quick, served=served, serve=serve, beforehand=beforehand or {})
        sys.meta_path.insert(0, _Finder(package, loader, submodules))
