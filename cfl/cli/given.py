"""The options that a command line and its files give.

Errors name method and value with them; the parser's own do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cfl.runtime.command_line import words_with_values
from cfl.runtime.errors import ConfigError
from cfl.runtime.yaml_file import BadYAML, BrokenYAML, parse_yaml, read_yaml

_MOST = 1000
_FILES = (".yaml", ".yml", ".json")


class Given(NamedTuple):
    """One value that was given.

    Attributes:
        key: dotted, without ``init_args`` and ``class_path``: of an option, or of a class, whose value is its name.
        value: as it was given.
        file: the configuration file that holds it; None where it was on the command line.
    """

    key: str
    value: Any
    file: str | None = None


def in_content(content: Any, file: str | None = None, key: str = "") -> Iterator[Given]:
    """What a configuration or a part of it says, in order; of lists, what each of its items does, too.

    Raises:
        ConfigError: see :func:`require_short`.
    """
    as_typed = ".".join(part for part in key.split(".") if part not in ("", "init_args", "class_path"))
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
    """Refuse a list or mapping that the parser, which copies it for each of its values, could not read in seconds.

    Lists of lists pass: :class:`cfl.data.sequences.FixedTasks` has one for every client, and the parser does not look
    into them.

    Raises:
        ConfigError: naming the key.
    """
    if isinstance(content, Mapping | list) and len(content) > _MOST and not all(isinstance(i, list) for i in content):
        raise ConfigError(key, content, f"at most {_MOST} values in one list or mapping")


def wrong_keys(content: Mapping[Any, Any]) -> str | None:
    """Why a file's keys are not taken, or None: sections and options have names, and each option is set once."""
    for section, options in content.items():
        for name in (section, *(options if isinstance(options, Mapping) else ())):
            if not isinstance(name, str):
                return f"the key {name} in {section} is no text"
    twice = [key for key, count in Counter(_set(content)).items() if count > 1]
    if twice:
        return f"{twice[0]} is set in its section and once more in one word"
    sections = {key for key, _, inner in _keys(content) if isinstance(inner, Mapping)}
    for key, name, _ in _keys(content):
        parts = key.split(".")
        for count in range(len(parts) - name.count("."), len(parts)):  # the sections that the key itself names
            above, rest = ".".join(parts[:count]), ".".join(parts[count:])
            if above in sections:
                return f"{key} is set beside the section {above}; set {rest} in that section"
    return None


def _set(content: Mapping[Any, Any]) -> list[str]:
    """The dotted keys of all that a file sets; one twice where it stands as ``a: {b: 1}`` and as ``a.b: 1``."""
    return [key for key, _, inner in _keys(content) if not isinstance(inner, Mapping)]


def _keys(content: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """All keys of a file, sections before what is in them: dotted, as it is written there, and what it is set to."""
    for name, inner in content.items():
        key = f"{above}{name}"
        yield key, str(name), inner
        if isinstance(inner, Mapping):
            yield from _keys(inner, f"{key}.")


def on_command_line(words: Sequence[str]) -> Iterator[Given]:
    """What the options of a command line say, ``--key value`` or ``--key=value``, in order.

    What the files of ``--config`` say is left out: others may have such names, too.
    """
    for option, value in words_with_values(words):
        if option.startswith("--"):
            key = option.removeprefix("--")
            if key != "config":
                content = _content(key, value)
                require_short(key, content)
                yield from in_content(content if isinstance(content, Mapping) and content else value, key=key)
            elif not value.endswith(_FILES):
                content = _content(key, value)
                yield from in_content(content if isinstance(content, Mapping) else {})


def _content(key: str, text: str) -> Any:
    """What a word is as YAML, or what the file holds that it names; None where neither can be read."""
    try:
        return read_yaml(Path(text)) if text.endswith(_FILES) else parse_yaml(text)
    except OSError:  # the parser says it of the option
        return None
    except BadYAML as error:
        # Other texts, such as 010, are values of options that are text, or the parser refuses them.
        collection = text.startswith(("{", "[")) or "&" in text
        if text.endswith(_FILES) or (collection and not isinstance(error, BrokenYAML)):
            raise ConfigError(key, text, f"YAML ({error})") from None
        return None


def is_written_out(text: str) -> bool:
    """Whether a word is a configuration itself, not a file's name."""
    return any(sign in text for sign in "{\n")


def value_of(key: str, given: Sequence[Given]) -> Given:
    """What was given for a key last; of a mapping, all that was given for what is in it."""
    below = {one.key.removeprefix(f"{key}."): one.value for one in given if one.key.startswith(f"{key}.")}
    return next((one for one in reversed(given) if one.key == key), Given(key, below or None))
