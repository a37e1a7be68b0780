"""What was said on a command line and in its files: the parser's errors tell neither which method nor which value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import yaml


class Given(NamedTuple):
    """One value that was given.

    Attributes:
        key: dotted, without ``init_args`` and ``class_path``: that of a class's options, or the class itself.
        value: as it was given.
        file: the configuration file that holds it; None where it was on the command line.
    """

    key: str
    value: Any
    file: str | None = None


def in_content(content: Any, file: str | None = None, key: str = "") -> Iterator[Given]:
    """What a configuration or a part of it says, in order; of lists, what each of its items does, too."""
    if isinstance(content, Mapping):
        for name, inner in content.items():
            plain = [part for part in str(name).split(".") if part not in ("init_args", "class_path")]
            yield from in_content(inner, file, ".".join([*([key] if key else []), *plain]))
        return
    yield Given(key, content, file)
    for item in content if isinstance(content, list) else ():
        if isinstance(item, Mapping):
            yield from in_content(item, file, key)


def on_command_line(words: Sequence[str]) -> Iterator[Given]:
    """What the options of a command line say, in order."""
    for option, value in options_in(words):
        try:
            content = yaml.safe_load(value)
        except yaml.YAMLError:
            content = value
        yield from in_content({option: content if isinstance(content, Mapping) else value})


def options_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options without their dashes, ``--key value`` or ``--key=value``."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            yield option.removeprefix("--"), value if equals else following
