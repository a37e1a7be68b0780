"""Shows the help of a single class: options as typed, and the classes derived from it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser

from cfl.cli.linked_defaults import NAMED
from cfl.runtime.class_paths import named_class, named_subclasses
from cfl.runtime.errors import ConfigError

_SHOWN = re.compile(r"Help for --(?P<key>[\w.]+)\.help=(?P<path>[\w.]+)")
_WIDTH = 100


def show_help_asked_for(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Print the help that a word ``--KEY.help`` asks for, with or without a class behind it, and exit.

    Nothing is done if no word asks for help on an option that takes a class. The parser itself requires a class for
    options of classes, such as ``data.stream.source``, and calls them by the last part of their key.

    Args:
        parser: of the command.
        words: of the command line.

    Raises:
        ConfigError: the class cannot be found, or is not one that the option takes.
        SystemExit: help has been printed.
    """
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        option, equals, value = word.partition("=")
        if not (option.startswith("--") and option.endswith(".help")):
            continue
        if (action := _help_action(parser, option[2:-5].split("."))) is not None:
            base = action._help_types[0]
            named = value if equals else "" if following.startswith("-") else following
            parser.args = action.option_strings[:1]  # no words behind this one
            shown = (parser, None, named or f"{base.__module__}.{base.__name__}", action.option_strings[0])
            try:
                action.print_help(shown)
            except TypeError as error:
                names = ", ".join(sorted({one.__name__ for one in named_subclasses(base)}))
                raise ConfigError(option.removeprefix("--"), named, f"one of {names}") from error


def _help_action(parser: ArgumentParser, key: Sequence[str]) -> Any:
    """The parser's action that prints the help of the option at a key; None if the option takes no class."""
    above = list(key)
    while above and f"--{'.'.join(above)}.help" not in parser._option_string_actions:
        above.pop()
    if not above:
        return None
    action: Any = parser._option_string_actions[f"--{'.'.join(above)}.help"]
    for number in range(len(above), len(key)):
        if len(key[:number]) == 1 and key[0] in NAMED:  # the next part is a name that the user gives
            continue
        kinds = [kind for base in action._help_types for kind in (base, *named_subclasses(base))]
        options = (_options(type(parser)(), kind, ".".join(key[:number])) for kind in kinds)
        action = next((found for one in options if (found := one.get(f"--{'.'.join(key[: number + 1])}.help"))), None)
        if action is None:
            return None
    return action


def _options(parser: ArgumentParser, kind: type, key: str) -> dict[str, Any]:
    parser.add_class_arguments(kind, key)
    return parser._option_string_actions


def with_list_of_classes(text: str, description: str | None) -> str:
    """Return the help of a class with its methods' options as typed, and with the classes derived from it.

    Args:
        text: the parser's help.
        description: the parser's description. Without ``Help for --KEY.help=CLASS`` the text is returned unchanged.
    """
    shown = _SHOWN.search(description or "")
    if shown is None:
        return text
    text = re.sub(r":::$", ":", text, flags=re.M)  # a docstring's first line before an equation ends with two colons
    if (section := shown["key"]) in NAMED:
        text = re.sub(rf"--{section}\.(?!help\b)", f"--{section}.NAME.", text)
    found = named_class(shown["path"])
    classes = [] if found is None else sorted(named_subclasses(found), key=lambda one: one.__name__)
    if not classes:
        return text
    lines = [f"classes (--{shown['key']}.help CLASS shows the options of one):"]
    for one in classes:
        said = (inspect.getdoc(one) or "").partition("\n")[0].rstrip(".:")
        lines += [f"  {one.__name__}", *textwrap.wrap(said, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return text.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"
