"""Refuses values for keys that cannot be set: options that follow from other options, and groups of options.

The parser would accept such a value and ignore it silently.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable

from cfl.cli.given import Given
from cfl.runtime.errors import ConfigError

FOLLOWING = {
    "model.methods": "methods",
    "federated.measures": "measures",
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
"""Option -> the section or attribute that it follows from, once this has been built."""
_SOURCES = {
    **FOLLOWING,
    **BUILT_FROM,
    **dict.fromkeys(("model.input_shape", "model.num_outputs"), "data.stream"),  # what decides the shapes
}


NAMED = {
    "methods": "names with classes, e.g. --methods.fot FOT, in YAML methods: {fot: {class_path: FOT}}",
    "measures": "names with classes, e.g. --measures.top5 my_measures.TopFive, in YAML "
    "measures: {top5: {class_path: my_measures.TopFive}}",
}
"""Options whose values have names that the user gives -> valid values, for error messages."""


def check_given(given: Iterable[Given], groups: Collection[str] = ()) -> None:
    """Refuse values for keys that cannot be set, and values that no option can have.

    Args:
        given: options with their values.
        groups: keys that hold options only.

    Raises:
        ConfigError: a value is refused. The error says what to set instead.
    """
    for key, value, _ in given:
        source = next((source for target, source in _SOURCES.items() if f"{key}.".startswith(f"{target}.")), None)
        if source and value is not None:
            raise ConfigError(key, value, f"unset: it follows from {source}")
        if key in groups:
            options = f"its options, as those that begin with --{key}. in --help"
            raise ConfigError(key, value, NAMED.get(key, options))
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(key, value, "a text without the character NUL")
        if isinstance(value, str) and _is_pipe(value):  # the parser would wait for what comes out of it
            raise ConfigError(key, value, "anything but the name of a pipe")


def _is_pipe(text: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(text).st_mode)
    except OSError:
        return False
