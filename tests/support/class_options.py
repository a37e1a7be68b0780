"""The options of classes that a configuration can name."""

from __future__ import annotations

import inspect


def options_of(kind: type) -> dict[str, inspect.Parameter]:
    """A class's options by name, with those of its base class if it passes on ``**options``."""
    own = inspect.signature(kind).parameters
    named = {name: option for name, option in own.items() if option.kind is not option.VAR_KEYWORD}
    return named if len(named) == len(own) or kind.__base__ is None else options_of(kind.__base__) | named
