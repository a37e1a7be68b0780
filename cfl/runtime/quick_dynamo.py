"""Spares commands that do not compile the import of torch._dynamo, a third of the time of ``import lightning``.

Lightning imports a class from it, only to check whether a model is compiled. Lightning and torch's optimizers mark
functions that must not be compiled. Only the names for this are served; any other name, as ``torch.compile`` uses,
completes the package.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from cfl.runtime import incomplete_package

_PACKAGE = "torch._dynamo"


class _AsTheRealOne(type):
    """Checks whether something is a compiled module; nothing is before torch._dynamo's own code has run."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _real())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _real())


def _real() -> type | tuple[()]:
    found: type | tuple[()] = vars(sys.modules[_PACKAGE]).get("OptimizedModule", ())
    return found


class OptimizedModule(metaclass=_AsTheRealOne):
    """Stand-in for ``torch._dynamo.OptimizedModule`` in modules that import it early."""


def _disable(function: Callable[..., Any] | None = None, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Stand-in for ``torch._dynamo.disable``: nothing is compiled before torch._dynamo's own code has run."""
    if function is None:
        return functools.partial(_disable, *arguments, **options)
    if not inspect.isroutine(function):  # a module or a class, which must stay one
        return incomplete_package.fully_imported(_PACKAGE).disable(function, *arguments, **options)
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if not disabled:
            if incomplete_package.is_incomplete(_PACKAGE):
                return function(*given, **named)
            disabled.append(incomplete_package.fully_imported(_PACKAGE).disable(function, *arguments, **options))
        return disabled[0](*given, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # so that it is not traced either
    return call


def _graph_break(*_: Any, **__: Any) -> None:
    """Stand-in for ``torch._dynamo.graph_break``, which ends a trace."""


def serve_when_imported() -> None:
    """Serve torch._dynamo as described when it is about to be imported for the first time."""
    served = {"OptimizedModule": OptimizedModule, "disable": _disable, "graph_break": _graph_break}
    incomplete_package.serve_when_imported(_PACKAGE, served, served.__getitem__, submodules=False)
