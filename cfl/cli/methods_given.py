"""Which method an error of the parser is about: of a mapping's entries, the parser does not tell the name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import yaml

UNKNOWN = "methods.<name>"
"""What stands for a method in a message as long as its name is not known."""
NO_CLASS = "options without a class"
"""What stands for the value of a method whose class nobody has named."""
_OPTION = "--methods"


class Given(NamedTuple):
    """One thing that was said of a method.

    Attributes:
        name: the method's.
        option: dotted, without ``init_args`` and ``class_path``; empty where it is the class.
        value: as it was given.
    """

    name: str
    option: str
    value: Any


def in_file(methods: Any) -> Iterator[Given]:
    """What a configuration's ``methods`` say, in order."""
    for name, method in methods.items() if isinstance(methods, Mapping) else ():
        yield from _flat(str(name), (), method)


def _flat(name: str, path: tuple[str, ...], value: Any) -> Iterator[Given]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(name, (*path, str(key)), inner)
    else:
        yield _given(name, path, value)


def _given(name: str, path: Sequence[str], value: Any) -> Given:
    return Given(name, ".".join(part for part in path if part not in ("init_args", "class_path")), value)


def on_command_line(arguments: Sequence[str]) -> Iterator[Given]:
    """What the options of a command line say of methods, in order."""
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        value = value if equals else following
        if option == _OPTION:
            try:
                yield from in_file(yaml.safe_load(value))
            except yaml.YAMLError:
                continue
        elif option.startswith(f"{_OPTION}."):
            name, *path = option.removeprefix(f"{_OPTION}.").split(".")
            yield _given(name, path, value)


def with_name(text: str, message: str, given: Sequence[Given]) -> str:
    """A text about ``methods.<name>`` with the method's name, where what was given tells it.

    Args:
        text: begins with the key of an option, ``methods.<name>.threshold``, or of the class, ``methods.<name>``.
        message: the parser's own, which says of which class the option is.
        given: all that was said of methods.
    """
    if not text.startswith(UNKNOWN):
        return text
    if NO_CLASS in text:
        classes = {one.name for one in given if not one.option}
        names = [one.name for one in given if one.name not in classes]
    else:
        names = _matching(text, message, given)
    return text.replace(UNKNOWN, f"methods.{names[0]}", 1) if names else text


def _matching(text: str, message: str, given: Sequence[Given]) -> list[str]:
    """Names of the methods to which the option was given, in order; of the text's value and class where some are.

    An option that is missing was given to none: the names are then of those with the class that needs it.
    """
    if missing := re.match(rf"{UNKNOWN}\.(\S+) is missing; (\w+) needs", text):
        option, needing = missing.groups()
        complete = {one.name for one in given if one.option == option}
        above = [one for one in given if one.option == option.rpartition(".")[0] and one.name not in complete]
        return [one.name for one in above if str(one.value).rpartition(".")[2] == needing]
    option = re.match(rf"{UNKNOWN}\.?([\w.]*)", text)
    value = re.match(r"\S+ = (?:'(.*?)'|(\S+)) cannot work", text)
    of_class = re.search(r"given class_path '(?:\S+\.)?(\w+)'", message)
    found = [one for one in given if option and one.option == option[1]]
    if value:
        found = [one for one in found if str(one.value) == (value[1] or value[2])] or found
    if of_class:
        classes = {one.name: str(one.value).rpartition(".")[2] for one in given if not one.option}
        found = [one for one in found if classes.get(one.name) == of_class[1]] or found
    return [one.name for one in found]
