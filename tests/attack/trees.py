"""Configurations as trees, as in a file, and by dotted keys, as errors name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat(tree: Any) -> dict[str, Any]:
    """Dotted key, without ``init_args``, -> value; a class is the value of its option."""
    return dict(_flat(tree, ""))


def _flat(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, inner in node.items():
            own = str(name) not in ("init_args", "class_path")
            yield from _flat(inner, f"{key}.{name}".strip(".") if own else key)
    elif isinstance(node, list) and any(isinstance(one, Mapping) for one in node):
        for one in node:
            yield from _flat(one, key)
    else:
        yield key, node


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """A tree whose values have these keys."""
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        *above, last = key.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def laid_over(below: Any, above: Any) -> Any:
    """Merge two trees; values of ``above`` win, and a class takes over nothing from another class."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if above.get("class_path", below.get("class_path")) != below.get("class_path"):
        return above
    return {**below, **{key: laid_over(below.get(key), value) for key, value in above.items()}}
