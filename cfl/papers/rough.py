"""A quick look at a configuration, to spare resolving it where no finished run can be one of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cfl.cli import DEFAULT_CONFIG
from cfl.errors import ConfigError

_PLAIN = ("data.num_clients", "schedule.rounds_per_task")


@dataclass(frozen=True)
class Rough:
    """What the files of a configuration say without the classes' defaults.

    Attributes:
        plain: values of plain keys, as JSON: those of the resolved configuration.
        methods: names of all methods mentioned: at least those of the resolved configuration.
        words: texts of the task stream, among them the names of its data sets.
    """

    plain: tuple[str, ...]
    methods: frozenset[str]
    words: frozenset[str]

    def may_be(self, experiment: Mapping[str, Any]) -> bool:
        """False only if the resolved configuration differs from an experiment."""
        values = tuple(json.dumps(_at(experiment, key)) for key in _PLAIN)
        return values == self.plain and set(experiment["methods"]) <= self.methods


def rough(arguments: Sequence[str]) -> Rough:
    """Look at arguments of ``cfl fit``, each ``--config=FILE`` or ``--key=value``."""
    plain: dict[str, Any] = dict.fromkeys(_PLAIN)
    methods: set[str] = set()
    words: set[str] = set()
    layers = [_file(DEFAULT_CONFIG)]
    for argument in arguments:
        key, _, value = argument.removeprefix("--").partition("=")
        layers.append(_file(Path(value)) if key == "config" else _nested(key, yaml.safe_load(value)))
    for layer in layers:
        for key in _PLAIN:
            found = _at(layer, key)
            plain[key] = plain[key] if found is None else found
        methods |= set(layer.get("methods") or {})
        stream = _at(layer, "data.stream")
        # Another class takes the place of the whole stream, an option of it does not.
        words = set(_texts(stream)) | (set() if isinstance(stream, dict) and "class_path" in stream else words)
    return Rough(tuple(json.dumps(plain[key]) for key in _PLAIN), frozenset(methods), frozenset(words))


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
        yield tree.rpartition(".")[2]
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else []:
        yield from _texts(part)
