"""Makes text of unknown origin safe to show."""

from __future__ import annotations

import re
import unicodedata

_KEPT = "\n\t"
_ENTITY = re.compile(r"&(?=#?\w+;)")  # elsewhere the sign stands for itself

_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after the end of a row it would begin an option
    "*": "{*}",  # likewise
    "±": r"$\pm$",
    "…": r"\dots{}",
    "–": "--",
    "—": "---",
    "ß": r"\ss{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
}
_LATEX_ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": ".",
    "\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0327": "c",
}  # fmt: skip
_BREAKS_AFTER = frozenset("_/.,:;=+|)]}")
_UNBROKEN = 12  # characters that LaTeX holds together
LATEX_BREAK = r"\penalty1000{}"
"""Text that :func:`in_latex` inserts where a line may end if it can end nowhere else."""


def printable(text: str) -> str:
    """Spell out the control characters of a text, so that a terminal shows them and they have no effect.

    Escape sequences, other control characters and marks that change the direction of writing become, e.g., ``\\x1b``.
    Line breaks and tabs stay.
    """
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode() for c in text)


def encodable(text: str) -> str:
    """Spell out characters that UTF-8 does not have, such as bytes of a file's name in another encoding."""
    return text.encode(errors="backslashreplace").decode()


def on_one_line(text: str) -> str:
    """As :func:`printable`, with every sequence of white space replaced by one blank."""
    return printable(" ".join(text.split()))


def in_markdown(text: str) -> str:
    """Format a text as one line of Markdown that shows it as it is, without HTML, links or pictures."""
    plain = _ENTITY.sub("&amp;", on_one_line(text)).replace("<", "&lt;")
    return plain.replace("](", "]\\(").replace("|", "\\|")


def in_latex(text: str) -> str:
    """Format a text as one line of LaTeX that shows it in any font encoding, and may be broken within long words.

    Characters beyond Latin letters with accents are spelled out, such as ``U+4E2D``.
    """
    return " ".join(map(_word_in_latex, unicodedata.normalize("NFC", on_one_line(text)).split(" ")))


def _word_in_latex(word: str) -> str:
    parts: list[str] = []
    unbroken = 0
    for before, character in zip(f" {word}", word, strict=False):
        if before == character == "-":
            parts.append("{}")  # two hyphens are no dash
        unbroken = 0 if before == "-" else unbroken  # there LaTeX itself may end a line
        if len(word) > _UNBROKEN and ((before in _BREAKS_AFTER and unbroken) or unbroken == _UNBROKEN):
            parts.append(LATEX_BREAK)
            unbroken = 0
        parts.append(_one_in_latex(character))
        unbroken += 1
    return "".join(parts)


def _one_in_latex(character: str) -> str:
    if character in _LATEX or character.isascii():
        return _LATEX.get(character, character)
    letter, *marks = list(unicodedata.normalize("NFD", character))
    if len(marks) == 1 and letter.isascii() and letter.isalpha() and marks[0] in _LATEX_ACCENTS:
        return rf"\{_LATEX_ACCENTS[marks[0]]}{{{letter}}}"
    return f"U+{ord(character):04X}"


def fenced(text: str, language: str) -> str:
    """Format a text as a code block in Markdown, with a fence that the text cannot close."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text).strip()}\n{fence}"
