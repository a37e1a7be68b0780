"""Refuses methods with a member whose name is nearly one that is called, since a misspelt one never would be."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache

from cfl.methods import capabilities
from cfl.methods.base import Method
from cfl.runtime.errors import ConfigError

ALIKE = 0.85
"""Likeness from which on two names are taken for one, as of :class:`difflib.SequenceMatcher`."""


@cache
def called_names() -> frozenset[str]:
    """Names of the moments, of everything else that :class:`Method` has, and of the members of capabilities."""
    protocols = [kind for kind in vars(capabilities).values() if getattr(kind, "_is_protocol", False)]
    of_capabilities = {name for kind in protocols for name in capabilities.members(kind)}
    return frozenset({name for name in dir(Method) if name[0] != "_"} | of_capabilities)


def check_names(methods: Mapping[str, Method]) -> None:
    """Refuse a function, a property or a switch whose name is nearly, but not quite, one of :func:`called_names`.

    A switch is a class attribute that is True or False. Names with a leading underscore are free.

    Raises:
        ConfigError: with the name, and the one that is probably meant.
    """
    for key, method in methods.items():
        for kind in type(method).__mro__:
            if not issubclass(kind, Method) or kind is Method:
                continue
            for name, member in vars(kind).items():
                checked = callable(member) or isinstance(member, (property, bool))
                if name[0] == "_" or name in called_names() or not checked:
                    continue
                meant = get_close_matches(name, called_names(), 1, ALIKE)
                if meant:
                    valid = f"{meant[0]}, or a name with a leading underscore if nobody else calls it"
                    raise ConfigError(f"methods.{key}", f"{kind.__name__}.{name}", valid)
