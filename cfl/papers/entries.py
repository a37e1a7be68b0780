"""Read and check entries of papers' and sweeps' files; an invalid entry raises ConfigError with its key and value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cfl.papers import expressions
from cfl.runtime.errors import ConfigError
from cfl.runtime.yaml_file import BadYAML, read_yaml


def load(path: Path, key: str) -> dict[str, Any]:
    """A YAML file that holds a mapping; the key is for the error."""
    try:
        entry = read_yaml(path)
    except OSError as error:
        raise ConfigError(key, str(path), f"a file that can be read ({error.strerror})") from None
    except BadYAML as error:
        raise ConfigError(key, str(path), f"a YAML file ({error})") from None
    if not isinstance(entry, dict):
        raise ConfigError(key, str(path), "a file that holds a mapping")
    return entry


def refuse_unknown(entry: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse an entry with an unknown key."""
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}, {key}", entry[key], f"one of {', '.join(known)}")


def one_of(value: Any, valid: Collection[str], key: str, what: str = "") -> str:
    """Return a text if it is one of the valid ones, which ``what`` describes in the error; else raise ConfigError."""
    if not isinstance(value, str) or value not in valid:
        raise ConfigError(key, value, f"one of {what}{', '.join(valid)}")
    return value


def count(value: Any, key: str) -> int:
    """Return a value if it is an integer of at least 1; else raise ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(key, value, "an integer of at least 1")
    return value


def mapping(value: Any, key: str) -> Mapping[str, Any]:
    """Return a value if it is a mapping whose keys are texts; else raise ConfigError."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(key, value, "a mapping from names to values")
    return value


def expression(value: Any, key: str) -> str:
    """Return a value if it is an expression over a run's figures; else raise ConfigError."""
    try:
        expressions.check(value)
    except (SyntaxError, TypeError) as error:
        raise ConfigError(key, value, f"an expression ({getattr(error, 'msg', error)})") from None
    return str(value)
