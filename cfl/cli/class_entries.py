"""Entries of a configuration that name a class: ``class_path`` with its options below ``init_args``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from cfl.runtime.errors import ConfigError

_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")


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
        yield from class_entries(value, key if name == "init_args" else f"{key}.{name}".lstrip("."))


def check_entries(content: Mapping[str, Any]) -> None:
    """Refuse options that are beside ``class_path`` instead of below ``init_args``, and an empty ``init_args``.

    Args:
        content: the content of a configuration file.

    Raises:
        ConfigError: an option is refused. The error says where it belongs.
    """
    for key, entry in class_entries(content):
        path = entry["class_path"]
        for name, value in entry.items():
            if name not in _OF_A_CLASS:
                raise ConfigError(f"{key}.{name}", value, f"{name} below init_args, as an option of {path}")
        if "init_args" in entry and entry["init_args"] is None:
            raise ConfigError(f"{key}.init_args", None, f"options of {path} below it, or no init_args")
