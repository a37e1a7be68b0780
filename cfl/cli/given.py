"""Collects the options that a command line and its files give.

With them, error messages can name the method and the given value, which the parser's own messages do not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cfl.runtime.class_paths import OPTIONS_OF_A_CLASS
from cfl.runtime.command_line import words_with_values
from cfl.runtime.errors import ConfigError
from cfl.runtime.yaml_file import BadYAML, BrokenYAML, parse_yaml, read_yaml

_KEY = re.compile(r"(?!__)[\w.-]+")
_MOST = 1000
_FILES = (".yaml", ".yml", ".json")
_WHOLE = "federated.codecs"


class Given(NamedTuple):
    """One value that was given.

    Attributes:
        key: dotted key of an option or of a class, without ``init_args`` and ``class_path``.
        value: the value as it was given; for a class, its name.
        file: the configuration file that holds the value; None if it was on the command line.
    """

    key: str
    value: Any
    file: str | None = None


def in_content(content: Any, file: str | None = None, key: str = "") -> Iterator[Given]:
    """All values that a configuration or a part of it gives, in order. For a list, also those in each of its mappings.

    Raises:
        ConfigError: see :func:`require_short`.
    """
    as_typed = ".".join(part for part in key.split(".") if part not in ("", "class_path", *OPTIONS_OF_A_CLASS))
    require_short(as_typed, content)
    if isinstance(content, Mapping):
        for name, inner in content.items():
            yield from in_content(inner, file, f"{key}.{name}")
        return
    yield Given(as_typed, content, file)
    for item in content if isinstance(content, list) else ():
        if isinstance(item, Mapping):
            yield from in_content(item, file, key)


def require_short(key: str, content: Any) -> None:
    """Refuse a list or mapping of more than 1000 values. The parser copies it once per value, which would take long.

    Lists of lists are accepted: :class:`cfl.data.sequences.FixedTasks` has one for every client, and the parser does
    not look into them.

    Raises:
        ConfigError: the list or mapping is too long.
    """
    if isinstance(content, Mapping | list) and len(content) > _MOST and not all(isinstance(i, list) for i in content):
        raise ConfigError(key, content, f"at most {_MOST} values in one list or mapping")


def wrong_keys(content: Mapping[Any, Any]) -> str | None:
    """The reason why a file's keys are refused, or None. Keys must be texts, and each option may be set only once."""
    for above, name in _names(content):
        if not isinstance(name, str):
            return f"the key {name} in {above or name} is no text"
        if not _KEY.fullmatch(name):
            return f"the key {name!r} is no name; a key ends with a colon and a blank, as in num_clients: 5"
    keys = list(_keys(content))
    # A key of a value is there twice if it is set as ``a: {b: 1}`` and as ``a.b: 1``.
    times = Counter(key for key, _, inner in keys if not isinstance(inner, Mapping))
    if twice := [key for key, count in times.items() if count > 1]:
        return f"{twice[0]} is set in its section and once more in one word"
    sections = {key for key, _, inner in keys if isinstance(inner, Mapping)}
    for key, name, _ in keys:
        parts = key.split(".")
        for count in range(len(parts) - name.count("."), len(parts)):  # sections that are part of the written key
            above, rest = ".".join(parts[:count]), ".".join(parts[count:])
            if above in sections:
                return f"{key} is set beside the section {above}; set {rest} in that section"
    return None


def _names(node: Any, above: str = "", levels: int = 2) -> Iterator[tuple[str, Any]]:
    """Keys that have to be names, each with the dotted key above it: of sections, options, and options of classes."""
    if isinstance(node, list):
        for one in node:
            yield from _names(one, above, 0)
    for name, inner in node.items() if isinstance(node, Mapping) else ():
        if levels > 0:
            yield above, name
        yield from _names(inner, f"{above}.{name}".lstrip("."), 1 if name in OPTIONS_OF_A_CLASS else levels - 1)


def _keys(content: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """All keys of a file, sections before their options: the dotted key, the key as written, and its value."""
    for name, inner in content.items():
        key = f"{above}{name}"
        yield key, str(name), inner
        if isinstance(inner, Mapping):
            yield from _keys(inner, f"{key}.")


def on_command_line(words: Sequence[str]) -> Iterator[Given]:
    """The values that the options of a command line give, ``--key value`` or ``--key=value``, in order.

    The key of ``--key+=value``, which adds to a list, is ``key``. The content of ``--config`` files is left out.

    Raises:
        ConfigError: a part of ``federated.codecs``, of which the parser would drop the other parts; see also
            :func:`require_short`.
    """
    for option, value in words_with_values(words):
        if option.startswith("--"):
            key = option.removeprefix("--").removesuffix("+")
            if key.startswith(f"{_WHOLE}."):
                topic, _, name = key.removeprefix(f"{_WHOLE}.").partition(".")
                inner = f"{{{name}: {value}}}" if name else value
                raise ConfigError(key, value, f"one mapping of all topics, e.g. --{_WHOLE} '{{{topic}: {inner}}}'")
            if key != "config":
                content = _content(key, value)
                require_short(key, content)
                yield from in_content(content if isinstance(content, Mapping) and content else value, key=key)
            elif not value.endswith(_FILES):
                content = _content(key, value)
                yield from in_content(content if isinstance(content, Mapping) else {})


def _content(key: str, text: str) -> Any:
    """The value of a word as YAML, or the content of the file that it names; None if it cannot be read."""
    try:
        return read_yaml(Path(text)) if text.endswith(_FILES) else parse_yaml(text)
    except OSError:  # the parser reports it with the option
        return None
    except BadYAML as error:
        # Other texts, such as 010, may be values of options that take text; otherwise the parser refuses them.
        collection = text.startswith(("{", "[")) or "&" in text
        if text.endswith(_FILES) or (collection and not isinstance(error, BrokenYAML)):
            raise ConfigError(key, text, f"YAML ({error})") from None
        return None


def is_written_out(text: str) -> bool:
    """Whether a word is a configuration itself, not a file's name."""
    return any(sign in text for sign in "{\n")


def last_given(key: str, given: Sequence[Given]) -> Given:
    """The last value that was given for a key. If only keys below it were given, the value is a mapping of these."""
    below = {one.key.removeprefix(f"{key}."): one.value for one in given if one.key.startswith(f"{key}.")}
    return next((one for one in reversed(given) if one.key == key), Given(key, below or None))
