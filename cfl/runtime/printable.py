"""Makes text of unknown origin safe to show."""

from __future__ import annotations

import re

_KEPT = "\n\t"
_ENTITY = re.compile(r"&(?=#?\w+;)")  # elsewhere the sign stands for itself


def printable(text: str) -> str:
    """Spell out the control characters of a text, so that a terminal shows them and they have no effect.

    Escape sequences, other control characters and marks that change the direction of writing become, e.g., ``\\x1b``.
    Line breaks and tabs stay.
    """
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text)


def on_one_line(text: str) -> str:
    """As :func:`printable`, with every sequence of white space replaced by one blank."""
    return printable(" ".join(text.split()))


def in_markdown(text: str) -> str:
    """A text as one line of Markdown that shows it: no HTML, no link, no picture comes of it."""
    plain = _ENTITY.sub("&amp;", on_one_line(text)).replace("<", "&lt;")
    return plain.replace("](", "]\\(").replace("|", "\\|")


def fenced(text: str, language: str) -> str:
    """Format a text as a code block in Markdown, with a fence that the text cannot close."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text).strip()}\n{fence}"
