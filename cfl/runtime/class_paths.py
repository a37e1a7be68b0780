"""Classes by their dotted paths, without running anybody's code to find them."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

PACKAGE = __name__.partition(".")[0]


def named_class(path: str) -> type | None:
    """The class of a dotted path, or None.

    Only this project's own modules are imported for it; a class of another package is found where its module has been
    imported already. So it may be asked of paths in any file.
    """
    parts = path.split(".")
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
