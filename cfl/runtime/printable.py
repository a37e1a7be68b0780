"""Text of unknown origin, made safe to show."""

from __future__ import annotations

import re

_KEPT = "\n\t"
_ENTITY = re.compile(r"&(?=#?\w+;)")  # elsewhere the sign stands for itself


def printable(text: str) -> str:
    """A text whose characters a terminal shows and does not obey.

    Escape sequences, other control characters and marks that turn the direction of writing are spelled out, ``\\x1b``.
    Line breaks and tabs stay.
    """
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text)


def on_one_line(text: str) -> str:
    """As :func:`printable`, with every run of white space as one blank."""
    return printable(" ".join(text.split()))


def in_markdown(text: str) -> str:
    """A text as one line of Markdown that shows it: no HTML, no link, no picture comes of it."""
    plain = _ENTITY.sub("&amp;", on_one_line(text)).replace("<", "&lt;")
    return plain.replace("](", "]\\(").replace("|", "\\|")


def fenced(text: str, language: str) -> str:
    """A text as a block of code in Markdown, behind a fence that nothing in it can close."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text).strip()}\n{fence}"
