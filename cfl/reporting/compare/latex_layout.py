"""Estimate the width of LaTeX tables, and divide them so that they fit an article in one column or two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cfl.runtime.printable import LATEX_BREAK, in_latex

SIZE = r"\fontsize{8pt}{9.5pt}\selectfont\setlength{\tabcolsep}{3pt}"
"""Size of letters and gaps in tables. ``\\footnotesize`` would be larger in articles of 11 and 12 points."""
SMALL = r"\scriptsize"
"""Size of the letters below a number."""

# Usable widths in points. On A4, a column has 221 points in two-column articles and 345 in one-column articles.
_COLUMN, _PAGE = 218.0, 340.0
HEADING = "method"
"""Heading of the column of names."""
_GAP = 6.0  # between two columns of a table
_NAMES_AT_LEAST = 55.0
_LINES = 46  # lines of a table on one page, without its caption

# Widths of letters of Computer Modern at 8 points, rounded up.
_LETTERS = {
    character: width
    for width, characters in {
        0.0: "{}$",
        2.4: "il.,:;'!`[]",
        2.9: "fj- ",
        3.4: "rstI()_",
        3.8: "cez",
        4.3: "0123456789ago/?*",
        4.5: 'kqvxyJ"',
        4.8: "bdhnpuS",
        5.8: "EFLPZ",
        6.2: "BCTw",
        7.2: "m%",
        8.8: "MW@",
    }.items()
    for character in characters
}
_OTHERS = 6.8
_COMMANDS = {r"\pm": 10.5, r"\uparrow": 4.4, r"\downarrow": 4.4, r"\,": 1.5, r"\mathbf": 3.4}


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        heading: LaTeX.
        cells: LaTeX, one per row.
        below: LaTeX of a second line in each row; empty without second lines.
    """

    heading: str
    cells: Sequence[str]
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Layout:
    """One of the tabulars of a table, which are placed beneath each other.

    Attributes:
        columns: indices of its columns.
        names: width in points at which names of rows are broken into lines; None if each fits on one line.
        wide: whether it needs both columns of an article.
    """

    columns: Sequence[int]
    names: int | None
    wide: bool

    @property
    def name_column(self) -> str:
        """Specification of the column of names in the argument of ``tabular``."""
        return "l" if self.names is None else rf">{{\raggedright\arraybackslash}}p{{{self.names}pt}}"


def width(latex: str) -> float:
    """Estimate the width in points of a text in letters of 8 points; the estimate is rather too large."""
    plain = re.sub(r"\$.*?\$", lambda maths: maths[0].replace(" ", ""), latex.replace(LATEX_BREAK, ""))
    plain = re.sub(r"(?<=[${])-", "+", plain)  # a minus sign is as wide as a plus sign
    tokens = re.findall(r"\\[A-Za-z]+|\\.|.", plain)
    return sum(
        _COMMANDS.get(token, _LETTERS.get(token[-1:] if len(token) == 2 else token, _OTHERS)) for token in tokens
    )


def layouts(names: Sequence[str], columns: Sequence[Column]) -> list[Layout]:
    """Return one tabular that fits a column of an article or both, or several if one would be too wide.

    Args:
        names: names of the rows, as plain text.
        columns: the columns of numbers.
    """
    needed = [_GAP + max(map(width, (column.heading, *column.cells, *column.below))) for column in columns]
    for wide in (False, True):
        room = (_PAGE if wide else _COLUMN) - sum(needed)
        if room >= _least(names):
            return [Layout(range(len(columns)), _broken(names, room), wide)]
    found: list[list[int]] = [[]]
    room = _PAGE - _least(names)
    for place, width_of_column in enumerate(needed):
        if found[-1] and sum(needed[k] for k in found[-1]) + width_of_column > room:
            found.append([])
        found[-1].append(place)
    return [Layout(places, _broken(names, _PAGE - sum(needed[k] for k in places)), wide=True) for places in found]


def _least(names: Sequence[str]) -> float:
    """Return the least width of the column of names, with names broken into lines."""
    widest = _widest(names)
    pieces = (piece for name in names for piece in in_latex(name).replace(LATEX_BREAK, " ").split())
    return min(widest, max(_NAMES_AT_LEAST, *map(width, pieces)))


def _broken(names: Sequence[str], room: float) -> int | None:
    return None if _widest(names) <= room else math.floor(room)


def _widest(names: Sequence[str]) -> float:
    return max(width(in_latex(name)) for name in (HEADING, *names))


def parts_of(names: Sequence[str], columns: Sequence[Column], found: Sequence[Layout]) -> Iterator[list[int]]:
    """Yield, for each page, the indices of the rows on it.

    Args:
        names: names of the rows.
        columns: the columns of numbers.
        found: the tabulars that each page holds.
    """
    lines = len(found) * (2 if any(column.below for column in columns) else 1)
    part: list[int] = []
    used = 0
    for place, name in enumerate(names):
        broken = sum(math.ceil(1.3 * width(in_latex(name)) / layout.names) - 1 for layout in found if layout.names)
        if part and used + lines + broken > _LINES - 5 * len(found):
            yield part
            part, used = [], 0
        part.append(place)
        used += lines + broken
    yield part
