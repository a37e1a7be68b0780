"""Entries of a configuration that name a class: ``class_path`` with its options below ``init_args``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from cfl.cli.given import OPTIONS_OF_A_CLASS
from cfl.runtime.errors import ConfigError

_OF_A_CLASS = ("class_path", *OPTIONS_OF_A_CLASS)


def class_entries(node: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted key and entry of every class that plain values or a parsed section name, outer classes first."""
    node = vars(node) if isinstance(node, Namespace) else node
    if isinstance(node, list):
        for one in node:
            yield from class_entries(one, key)
    if not isinstance(node, Mapping):
        return
    if isinstance(node.get("class_path"), str):
        yield key, node
    for name, value in node.items():
        yield from class_entries(value, key if name in OPTIONS_OF_A_CLASS else f"{key}.{name}".lstrip("."))


def check_entries(content: Mapping[str, Any]) -> None:
    """Refuse options that are beside ``class_path`` instead of below ``init_args``, and entries of other types.

    Args:
        content: the content of a configuration file.

    Raises:
        ConfigError: an option is refused, and the error says where it belongs; ``class_path`` is neither text nor null,
            or ``init_args`` is no mapping.
    """
    for key, path in _class_paths(content):
        if not isinstance(path, str | None):
            raise ConfigError(key, path, "the name of a class")
    for key, entry in class_entries(content):
        path = entry["class_path"]
        for name, value in entry.items():
            if name not in _OF_A_CLASS:
                raise ConfigError(f"{key}.{name}", value, f"{name} below init_args, as an option of {path}")
        for name in OPTIONS_OF_A_CLASS:
            if name in entry and not isinstance(entry[name], Mapping):
                raise ConfigError(f"{key}.{name}", entry[name], f"options of {path} below it, or no {name}")


def _class_paths(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every ``class_path``, of any type."""
    if isinstance(node, list):
        for one in node:
            yield from _class_paths(one, key)
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if name == "class_path":
            yield key, value
        else:
            yield from _class_paths(value, key if name in OPTIONS_OF_A_CLASS else f"{key}.{name}".lstrip("."))
