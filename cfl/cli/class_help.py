"""Completes the parser's help of a single class: keys of options as typed, and the classes derived from it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

from cfl.runtime.class_paths import named_class

_SHOWN = re.compile(r"Help for --(?P<key>[\w.]+)\.help=(?P<path>[\w.]+)")
_WIDTH = 100


def completed(text: str, description: str | None) -> str:
    """Return the help of a class with its methods' options as typed, and with the classes derived from it.

    Args:
        text: the parser's help.
        description: the parser's description. Without ``Help for --KEY.help=CLASS`` the text is returned unchanged.
    """
    shown = _SHOWN.search(description or "")
    if shown is None:
        return text
    text = re.sub(r":::$", ":", text, flags=re.M)  # a docstring's first line before an equation ends with two colons
    if shown["key"] == "methods":
        text = re.sub(r"--methods\.(?!help\b)", "--methods.NAME.", text)
    found = named_class(shown["path"])
    classes = sorted(set(_derived(found)), key=_name) if found is not None else []
    if not classes:
        return text
    lines = [f"classes (--{shown['key']}.help CLASS shows the options of one):"]
    for one in classes:
        said = (inspect.getdoc(one) or "").partition("\n")[0].rstrip(".:")
        lines += [f"  {one.__name__}", *textwrap.wrap(said, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return text.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


def _name(one: type) -> str:
    return one.__name__


def _derived(base: type) -> Iterator[type]:
    """The classes derived from a class that can be named in a configuration."""
    one: type
    for one in base.__subclasses__():
        public = not any(part.startswith("_") for part in f"{one.__module__}.{one.__qualname__}".split("."))
        if public and "<locals>" not in one.__qualname__ and not inspect.isabstract(one):
            yield one
        yield from _derived(one)
