"""How methods are drawn: each has a colour, a marker and a dash of its own, the same in every picture and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from zlib import crc32

from cfl.reporting.method_names import PRINTED, plain

COLOURS = ("#213f80", "#bf2408", "#127e56", "#be86b7", "#0aa6fa", "#ef840d", "#101018", "#5c0fa6")
"""Colours of lines, near those of Okabe and Ito, but easier to tell apart for colour-blind readers.

Purple replaces yellow, which is hard to see on white. ``page.css`` has the same colours, and lighter ones for dark
pages.
"""
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")

_STYLES = len(COLOURS) * len(DASHES) * len(MARKERS)
_PLACES = {plain(name): place for place, name in enumerate(dict.fromkeys(PRINTED.values()))}
_FREE = len(COLOURS) * len(DASHES)  # styles from here on are for methods of other packages


@dataclass(frozen=True)
class LineStyle:
    """A line's look, as places in :data:`COLOURS`, :data:`DASHES` and :data:`MARKERS`."""

    colour: int
    dash: int
    marker: int


def line_styles(lines: Mapping[str, str]) -> dict[str, LineStyle]:
    """Return a style for each line; up to 256 lines have different styles.

    A method of the project always has the same style, given by its place in
    :data:`cfl.reporting.method_names.PRINTED`. The style of any other method follows from a hash of its name; if it is
    taken, the method gets the next free one. If a method has several lines, the first in alphabetical order gets the
    method's style. All other lines get a style with the colour that is used least.

    Args:
        lines: name of the line -> its method, in any spelling; empty if the line has no method.
    """
    found: dict[str, int] = {}
    taken: set[int] = set()

    def place(line: str, wanted: Iterable[int]) -> None:
        found[line] = next((one for one in wanted if one not in taken), 0)
        taken.add(found[line])

    owners: dict[str, str] = {}
    for line in sorted(lines):
        if method := plain(lines[line]) or lines[line]:
            owners.setdefault(method, line)
    for method in sorted(owners, key=lambda method: (method not in _PLACES, method)):
        first = _PLACES.get(method, _FREE + crc32(method.encode()) % (_STYLES - _FREE))
        place(owners[method], [*range(first, _STYLES), *range(first)])
    colours = Counter(one % len(COLOURS) for one in taken)
    for line in [line for line in lines if line not in found]:
        colour = min(range(len(COLOURS)), key=lambda k: colours[k])
        colours[colour] += 1
        place(line, [*range(colour, _STYLES, len(COLOURS)), *range(_STYLES)])
    return {line: _style(found[line]) for line in lines}


def _style(place: int) -> LineStyle:
    rest, colour = divmod(place, len(COLOURS))
    layer, dash = divmod(rest, len(DASHES))
    return LineStyle(colour, dash, (colour + dash + layer) % len(MARKERS))
