"""A quick look at a configuration, to spare resolving it where no finished run can be one of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.models.weights_file import KEY
from cfl.runtime.errors import ConfigError

_OPTIONS = "init_args"
_CLASS = "class_path"
_DIFFERS_BY_RUN = "seed_everything"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]")
_UNSURE = object()
"""In the place of a value that the parser may read in another way."""


@dataclass(frozen=True)
class Rough:
    """What the files of a configuration say without the classes' defaults.

    Attributes:
        said: values written for keys, the last word on each; keys without ``init_args``.
        surely: names of methods that the resolved configuration has.
        methods: names of all methods mentioned: at least those of the resolved configuration.
        words: texts of the task stream and of the methods that the resolved configuration surely has, among them the
            names of their data sets, and that of the file with which the network's weights start.
    """

    said: Mapping[str, Any]
    surely: frozenset[str]
    methods: frozenset[str]
    words: frozenset[str]

    def may_be(self, experiment: Mapping[str, Any]) -> bool:
        """False only if the resolved configuration differs from an experiment."""
        if not self.surely <= set(experiment["methods"]) <= self.methods:
            return False
        leaves = _leaves(experiment)
        return not any(key in self.said and _surely_differ(self.said[key], value) for key, value in leaves)


def rough(arguments: Sequence[str]) -> Rough:
    """Look at arguments of ``cfl fit``, each ``--config=FILE`` or ``--key=value``."""
    said: dict[str, Any] = {}
    surely: set[str] = set()
    methods: set[str] = set()
    words: set[str] = set()
    for key, layer in [("config", _file(DEFAULT_CONFIG)), *map(_layer, arguments)]:
        _say(said, layer)
        if "methods" in layer:
            named = set(layer["methods"]) if isinstance(layer["methods"], Mapping) else set()
            # Files' methods join those of the files before; an argument takes their place, --methods.name adds to them.
            surely = surely | named if named and key != "methods" else named
            methods |= named
        stream = _at(layer, "data.stream")
        # Another class takes the place of the whole stream, an option of it does not.
        words = set(_texts(stream)) | (set() if isinstance(stream, dict) and _CLASS in stream else words)
    for name in surely:
        words |= {text for key, value in said.items() if key.startswith(f"methods.{name}.") for text in _texts(value)}
    weights = said.get(KEY)
    words |= {Path(weights).name} if isinstance(weights, str) else set()
    return Rough(said, frozenset(surely), frozenset(methods), frozenset(words))


def _say(said: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lay a layer over what was said."""
    for key, value in _leaves(layer):
        for other in list(said):
            # Of an object named anew, as of one that a plain value takes the place of, nothing said before is sure;
            # that plain value may have been the class's name alone.
            above = key.removesuffix(_CLASS) if key.endswith(f".{_CLASS}") else f"{key}."
            if f"{other}.".startswith(above):
                del said[other]
        said[key] = value
    said.pop(_DIFFERS_BY_RUN, None)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys without ``init_args``, so that both ways to write an option are one; a class before its options."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key in sorted(tree, key=lambda key: key != _CLASS):
        yield from _leaves(tree[key], prefix if key == _OPTIONS else f"{prefix}.{key}".lstrip("."))


def _surely_differ(said: Any, resolved: Any) -> bool:
    """Only of what no parser would turn into one another; a class may be written with or without its module."""
    if isinstance(said, bool) or isinstance(resolved, bool):
        return isinstance(said, bool) and isinstance(resolved, bool) and said != resolved
    if isinstance(said, int | float) and isinstance(resolved, int | float):
        return said != resolved and not (math.isnan(said) and math.isnan(resolved))
    if isinstance(said, str) and isinstance(resolved, str):
        return said.rpartition(".")[2] != resolved.rpartition(".")[2]
    return False


def _layer(argument: str) -> tuple[str, dict[str, Any]]:
    """An argument's key, and what it says."""
    key, _, value = argument.removeprefix("--").partition("=")
    if key == "config" and not any(sign in value for sign in "{\n"):
        return key, _file(Path(value))
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = _UNSURE
    if _LEADING_ZERO.match(value):  # octal for some, decimal for others
        parsed = _UNSURE
    return key, parsed if key == "config" and isinstance(parsed, dict) else _nested(key, parsed)


@cache
def _file(path: Path) -> dict[str, Any]:
    entry = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(entry, dict):
        raise ConfigError("--config", str(path), "a file that holds a mapping")
    return entry


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield from (tree, tree.rpartition(".")[2])  # a file's name, or a class without its module
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else []:
        yield from _texts(part)
