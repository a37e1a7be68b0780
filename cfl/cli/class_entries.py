"""Entries of a configuration that name a class: ``class_path`` with its options below ``init_args``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from cfl.runtime.class_paths import KEYS_OF_A_CLASS, OPTIONS_OF_A_CLASS
from cfl.runtime.errors import ConfigError


def class_entries(node: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted key and entry of every class that plain values or a parsed section name, outer classes first."""
    return ((key, entry) for key, entry in _entries(node, key) if isinstance(entry["class_path"], str))


def _entries(node: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """As :func:`class_entries`, also entries in which ``class_path`` is no text."""
    node = vars(node) if isinstance(node, Namespace) else node
    if isinstance(node, list):
        for one in node:
            yield from _entries(one, key)
    if not isinstance(node, Mapping):
        return
    if "class_path" in node:
        yield key, node
    for name, value in node.items():
        yield from _entries(value, key if name in OPTIONS_OF_A_CLASS else f"{key}.{name}".lstrip("."))


def check_entries(content: Mapping[str, Any]) -> None:
    """Refuse options that are beside ``class_path`` instead of below ``init_args``, and entries of other types.

    Args:
        content: the content of a configuration file.

    Raises:
        ConfigError: an option is refused, and the error says where it belongs; ``class_path`` is neither text nor null,
            or ``init_args`` is no mapping.
    """
    for key, entry in _entries(content, ""):
        if not isinstance(entry["class_path"], str | None):
            raise ConfigError(key, entry["class_path"], "the name of a class")
    for key, entry in class_entries(content):
        path = entry["class_path"]
        for name, value in entry.items():
            if name not in KEYS_OF_A_CLASS:
                raise ConfigError(f"{key}.{name}", value, f"{name} below init_args, as an option of {path}")
        for name in OPTIONS_OF_A_CLASS:
            if name in entry and not isinstance(entry[name], Mapping):
                raise ConfigError(f"{key}.{name}", entry[name], f"options of {path} below it, or no {name}")
