"""How wide LaTeX tables are, and how they are divided to fit any article, in one column or two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cfl.runtime.printable import LATEX_BREAK, in_latex

SIZE = r"\fontsize{8pt}{9.5pt}\selectfont\setlength{\tabcolsep}{3pt}"
"""Of tables; not ``\\footnotesize``, which is larger in articles of 11 and 12 points."""
SMALL = r"\scriptsize"
"""Of what stands below a number."""

# In points. Two columns of an article on A4 have 221 each, one column has 345.
_COLUMN, _PAGE = 218.0, 340.0
HEADING = "method"
"""Of the column of names."""
_GAP = 6.0  # between two columns of a table
_NAMES_AT_LEAST = 55.0
_LINES = 46  # of a table on one page, beside its caption

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
        below: what stands in a second line of each row; empty where there is none.
    """

    heading: str
    cells: Sequence[str]
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Layout:
    """One of the tabulars of a table, beneath each other.

    Attributes:
        columns: places of its columns.
        names: width in points in which names of rows are broken; None where they stand on one line.
        wide: whether it needs both columns of an article.
    """

    columns: Sequence[int]
    names: int | None
    wide: bool

    @property
    def name_column(self) -> str:
        """For the argument of ``tabular``."""
        return "l" if self.names is None else rf">{{\raggedright\arraybackslash}}p{{{self.names}pt}}"


def width(latex: str) -> float:
    """About how many points a text takes at 8 points, rather too many."""
    plain = re.sub(r"\$.*?\$", lambda maths: maths[0].replace(" ", ""), latex.replace(LATEX_BREAK, ""))
    plain = re.sub(r"(?<=[${])-", "+", plain)  # a minus sign is as wide as a plus sign
    tokens = re.findall(r"\\[A-Za-z]+|\\.|.", plain)
    return sum(
        _COMMANDS.get(token, _LETTERS.get(token[-1:] if len(token) == 2 else token, _OTHERS)) for token in tokens
    )


def layouts(names: Sequence[str], columns: Sequence[Column]) -> list[Layout]:
    """One tabular in a column of an article, or in both, or several where all columns fit neither.

    Args:
        names: of the rows, plain text.
        columns: the others.
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
    """Width that a column of names needs if they are broken."""
    widest = _widest(names)
    pieces = (piece for name in names for piece in in_latex(name).replace(LATEX_BREAK, " ").split())
    return min(widest, max(_NAMES_AT_LEAST, *map(width, pieces)))


def _broken(names: Sequence[str], room: float) -> int | None:
    return None if _widest(names) <= room else math.floor(room)


def _widest(names: Sequence[str]) -> float:
    return max(width(in_latex(name)) for name in (HEADING, *names))


def parts_of(names: Sequence[str], columns: Sequence[Column], found: Sequence[Layout]) -> Iterator[list[int]]:
    """The places of rows that fit on a page together.

    Args:
        names: of the rows.
        columns: the others.
        found: the tabulars of each part.
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
