"""Options of classes that are not the package's, as far as the parser does not check them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from cfl.cli.refusals import without_type
from cfl.runtime.errors import ConfigError


def check_given(config: Mapping[str, Any]) -> None:
    """Refuse options without a type and a default that nobody has given a value: the parser would make them null.

    Args:
        config: plain values, whose classes have been imported.

    Raises:
        ConfigError: with the key of the class.
    """
    _check(config, "")


def _check(node: Any, key: str) -> None:
    if isinstance(node, list):
        for one in node:
            _check(one, key)
    if not isinstance(node, Mapping):
        return
    path, options = node.get("class_path"), node.get("init_args") or {}
    if isinstance(path, str) and isinstance(options, Mapping):
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        for one in _parameters(kind):
            bare = one.annotation is one.empty and one.default is one.empty
            if bare and one.name in options and options[one.name] is None:
                raise ConfigError(key, path, without_type(name, one.name))
    for name, value in node.items():
        _check(value, key if name == "init_args" else f"{key}.{name}".lstrip("."))


def _parameters(kind: object) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(kind).parameters.values()) if isinstance(kind, type) else []
    except ValueError:  # a class that is not written in Python
        return []
