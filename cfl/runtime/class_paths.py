"""Finds classes by their dotted paths without importing code of other packages."""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import suppress
from typing import Any

PACKAGE = __name__.partition(".")[0]
OPTIONS_OF_A_CLASS = ("init_args", "dict_kwargs")
"""Keys of a class's entry in a configuration below which its options are."""
KEYS_OF_A_CLASS = ("class_path", *OPTIONS_OF_A_CLASS)
"""Keys of a class's entry in a configuration."""


def named_class(path: str) -> type | None:
    """The class of a dotted path, or None.

    Only modules of this project are imported, except its programs (``__main__``). A class of another package is found
    only if its module is already imported. It is therefore safe for paths from any file.
    """
    parts = path.split(".")
    if parts[0] == PACKAGE and "__main__" in parts:
        return None
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if parts[0] == PACKAGE:
            with suppress(ImportError):
                importlib.import_module(module)
        if module in sys.modules:
            found: Any = sys.modules[module]
            for name in parts[end:]:
                found = getattr(found, name, None)
            return found if isinstance(found, type) else None
    return None


def short_path(path: str) -> str:
    """A class's name as it is shown: short for classes of this project and torch's optimizers, else the whole path.

    The short names of these classes differ, while two modules of a user's may each have a class of one name.
    """
    name = path.rpartition(".")[2]
    return name if path.startswith((f"{PACKAGE}.", "torch.optim.")) else path


def own_parameter(kind: type, option: str) -> inspect.Parameter | None:
    """The parameter of the ``__init__`` that a class itself defines, without those of its base classes."""
    own = vars(kind).get("__init__")
    return inspect.signature(own).parameters.get(option) if inspect.isfunction(own) else None


def named_subclasses(base: type) -> list[type]:
    """The direct and indirect subclasses that a configuration can name: public, not abstract, and not nested."""
    found: list[type] = []
    one: type
    for one in base.__subclasses__():
        hidden = any(part.startswith("_") for part in one.__module__.split(".")) and one.__module__ != "__main__"
        nested = one.__qualname__ != one.__name__
        if not (hidden or nested or one.__name__.startswith("_") or inspect.isabstract(one)):
            found.append(one)
        found += named_subclasses(one)
    return list(dict.fromkeys(found))
