"""How a configuration file writes a class with its options."""

from __future__ import annotations

from typing import Any

from cfl.runtime.errors import ConfigError

_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")


def check_entries(node: Any, key: str = "") -> None:
    """Refuse options that stand beside ``class_path`` instead of below ``init_args``, and an empty ``init_args``.

    Args:
        node: content of a file.
        key: dotted, of the node.

    Raises:
        ConfigError: naming the option, and where it belongs.
    """
    if isinstance(node, list):
        for one in node:
            check_entries(one, key)
    if not isinstance(node, dict):
        return
    if isinstance(path := node.get("class_path"), str):
        for name, value in node.items():
            if name not in _OF_A_CLASS:
                raise ConfigError(f"{key}.{name}", value, f"{name} below init_args, as an option of {path}")
        if "init_args" in node and node["init_args"] is None:
            raise ConfigError(f"{key}.init_args", None, f"options of {path} below it, or no init_args")
    for name, value in node.items():
        check_entries(value, key if name == "init_args" else f"{key}.{name}".lstrip("."))
