"""The options of classes that a configuration can name."""

from __future__ import annotations

from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters


def options_of(kind: type) -> dict[str, Any]:
    """A class's options by name, as the command line finds them: with those that it passes on to its base classes."""
    return {option.name: option for option in get_signature_parameters(kind, "__init__")}
