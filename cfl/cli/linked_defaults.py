"""Keys that nobody sets: options that follow from other ones, and groups of options, which have no value of their own.

The parser would take such a value and drop it without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from cfl.cli.given import options_in
from cfl.runtime.errors import ConfigError

FOLLOWING = {
    "model.methods": "methods",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
}
"""Target -> the option that it follows from, as typed."""
BUILT_FROM = {
    "data.schedule": "schedule",
    "model.engine": "engine",
    "model.buffer": "buffer",
    "model.input_shape": "data.input_shape",
    "model.num_outputs": "data.num_outputs",
}
"""The same, of what follows from something that has been built."""
_SOURCES = {
    **FOLLOWING,
    **BUILT_FROM,
    **dict.fromkeys(("model.input_shape", "model.num_outputs"), "data.stream"),  # what decides the shapes
}


def check_content(content: Mapping[str, Any], groups: Collection[str] = ()) -> None:
    """Refuse a configuration that sets what nobody sets.

    Args:
        content: keys and values, nested or dotted.
        groups: keys that hold options only.

    Raises:
        ConfigError: naming the key, its value and what to set instead.
    """
    for key, value in _nodes(content):
        if value is not None:
            _check(key, value)
        if key in groups and not isinstance(value, Mapping):
            raise ConfigError(key, value, f"its options, as those that begin with --{key}. in --help")


def check_words(words: Sequence[str]) -> None:
    """The same of a command line's options, ``--model.seed 3`` as ``--model '{"seed": 3}'``."""
    for key, value in options_in(words):
        _check(key, value)
        if any(target.startswith(f"{key}.") for target in _SOURCES):
            content = _mapping(value)
            if content is not None:
                check_content({key: content})


def _check(key: str, value: Any) -> None:
    for target, source in _SOURCES.items():
        if key == target or key.startswith(f"{target}."):
            raise ConfigError(key, value, f"unset: it follows from {source}")


def _nodes(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, groups before what they hold."""
    for name, value in content.items():
        key = f"{above}{name}"
        yield key, value
        if isinstance(value, Mapping):
            yield from _nodes(value, f"{key}.")


def _mapping(text: str) -> Mapping[str, Any] | None:
    """What a group is given as, a mapping or the name of a file that holds one; None for anything else."""
    try:
        content = yaml.safe_load(text)
        if isinstance(content, str):
            with open(content, encoding="utf-8") as file:
                content = yaml.safe_load(file)
    except (yaml.YAMLError, OSError, ValueError):  # the parser says it of the option
        return None
    return content if isinstance(content, Mapping) else None
