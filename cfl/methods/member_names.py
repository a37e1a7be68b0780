"""Refuses methods whose members cannot be called as they are: misspelt, incomplete, hidden, or overwritten."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from types import FunctionType
from typing import Any

from cfl.engines.scaled_steps import ELEMENTWISE_OPTIMIZERS
from cfl.methods import capabilities, declared_state
from cfl.methods.base import Method
from cfl.runtime.errors import ConfigError

ALIKE = 0.85
"""Likeness of two names, by :class:`difflib.SequenceMatcher`, at or above which one counts as the other misspelt."""


SET_BY_SETUP = ("context", "name", "source")
"""Attributes that :meth:`Method.setup` sets; it would overwrite an option that is kept in one of them."""


@cache
def called_names() -> frozenset[str]:
    """Public names of :class:`Method`, moments included, and names of the members of capabilities."""
    of_capabilities = {name for kind in _protocols() for name in capabilities.members(kind)}
    return frozenset({name for name in dir(Method) if name[0] != "_"} | of_capabilities)


def _protocols() -> list[type]:
    return [kind for kind in vars(capabilities).values() if getattr(kind, "_is_protocol", False)]


@cache
def _declared() -> dict[str, Callable[..., Any]]:
    """Name -> the function as :class:`Method` or a capability declares it."""
    members = {name: member for kind in (*_protocols(), Method) for name, member in vars(kind).items()}
    return {name: one for name, one in members.items() if isinstance(one, FunctionType) and name[0] != "_"}


def check_members(methods: Mapping[str, Method]) -> None:
    """Refuse members that are never called or lack the declared parameters, and options that ``setup`` overwrites.

    Raises:
        ConfigError: naming the member or the option, and what would be valid.
    """
    _check_names(methods)
    for key, method in methods.items():
        _check_declarations(key, method)
        kind = type(method)
        if kind.task_free is True and not capabilities.has(method, capabilities.FoundTasks):
            for name in ("begin_task", "end_task"):
                if getattr(kind, name) is not getattr(Method, name):
                    valid = "no such function while task_free is true: nobody calls it"
                    raise ConfigError(f"methods.{key}", f"{kind.__name__}.{name}", valid)
        for name, declared in _declared().items():
            own = getattr(kind, name, None)
            if isinstance(own, FunctionType) and own is not declared and not _takes(own, declared):
                value, valid = (f"{name}({', '.join(inspect.signature(one).parameters)})" for one in (own, declared))
                raise ConfigError(f"methods.{key}", f"{kind.__name__}.{value}", f"{valid}, as it is called")
        for option in inspect.signature(kind).parameters:
            if option in SET_BY_SETUP and option in vars(method):
                valid = f"another name in {kind.__name__}, whose self.{option} setup overwrites"
                raise ConfigError(f"methods.{key}.{option}", vars(method)[option], valid)


def _check_declarations(key: str, method: Method) -> None:
    """Refuse halves of capabilities, functions hidden by attributes, and class attributes with other values."""
    kind = type(method)
    for protocol in _protocols():
        wanted = capabilities.members(protocol)
        lacking = [name for name in wanted if not capabilities.has_member(method, name)]
        if any(hasattr(kind, name) for name in lacking):
            continue  # switched off by None
        if lacking and len(lacking) < len(wanted):
            there = next(name for name in wanted if name not in lacking)
            valid = f"{lacking[0]} beside it: without, it is never called"
            raise ConfigError(f"methods.{key}", f"{kind.__name__}.{there}", valid)
    for name in sorted(set(_declared()) & set(vars(method))):
        if not callable(vars(method)[name]):
            valid = f"another name for this attribute: self.{name} is called as a function"
            raise ConfigError(f"methods.{key}", f"{kind.__name__}.{name} = {vars(method)[name]!r:.40}", valid)
    if "state" in vars(method):
        raise ConfigError(f"methods.{key}", "self.state", f"state as an attribute of the class {kind.__name__}")
    declared_state.check_declaration(f"methods.{key}", kind)
    check_optimizer_names(key, method)
    if method.kind not in ("add", "project", "look"):
        raise ConfigError(f"methods.{key}", f"{kind.__name__}.kind = {method.kind!r:.40}", "add, project or look")


def check_optimizer_names(key: str, method: Method) -> None:
    """Refuse a declaration of optimizers that is no set, or that names one with which no run trains.

    Raises:
        ConfigError: naming the method and what would be valid.
    """
    kind = type(method)
    if method.optimizers is not None and not isinstance(method.optimizers, frozenset | set):
        valid = "null or a frozenset of names of optimizers"
        raise ConfigError(f"methods.{key}", f"{kind.__name__}.optimizers = {method.optimizers!r:.40}", valid)
    if unknown := sorted(map(str, set(method.optimizers or ()) - ELEMENTWISE_OPTIMIZERS)):
        valid = f"names among {', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}"
        raise ConfigError(f"methods.{key}", f"{kind.__name__}.optimizers with {unknown[0]}", valid)


def _takes(own: Callable[..., Any], declared: Callable[..., Any]) -> bool:
    """Whether a function can be called with the parameters that are declared."""
    wanted = inspect.signature(declared).parameters.values()
    by_place = [one for one in wanted if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = {one.name: None for one in wanted if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(own).bind(*by_place, **by_name)
    except TypeError:
        return False
    return True


def _check_names(methods: Mapping[str, Method]) -> None:
    """Refuse a function, a property or a switch whose name is nearly, but not quite, one of :func:`called_names`.

    A switch is a class attribute that is True or False. Names with a leading underscore are free.
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
