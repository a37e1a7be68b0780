"""Ways in which the content of a file is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable


def flip(content: bytearray, draw: random.Random) -> bytearray:
    """One bit is another one."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def flips(content: bytearray, draw: random.Random) -> bytearray:
    """Eight bits are others."""
    for _ in range(8):
        flip(content, draw)
    return content


def zeros(content: bytearray, draw: random.Random) -> bytearray:
    """A part is zeros, as on a disk that has lost a block."""
    start, size = _part(content, draw)
    content[start : start + size] = bytes(size)
    return content


def cut(content: bytearray, draw: random.Random) -> bytearray:
    """The end is missing, or all of it."""
    return content[: 0 if draw.random() < 0.2 else draw.randrange(len(content))]


def doubled(content: bytearray, draw: random.Random) -> bytearray:
    """A part is there twice, or all of it."""
    start, size = (0, len(content)) if draw.random() < 0.3 else _part(content, draw)
    return content[: start + size] + content[start:]


def swapped(content: bytearray, draw: random.Random) -> bytearray:
    """Two parts of equal length have changed places."""
    size = draw.randint(1, max(1, len(content) // 4))
    first = draw.randrange(len(content) - 2 * size + 1) if len(content) >= 2 * size else 0
    second = draw.randint(first + size, max(first + size, len(content) - size))
    one, other = content[first : first + size], content[second : second + size]
    return content[:first] + other + content[first + size : second] + one + content[second + size :]


def _part(content: bytearray, draw: random.Random) -> tuple[int, int]:
    size = draw.randint(1, max(1, len(content) // 3))
    return draw.randrange(max(1, len(content) - size)), size


WAYS: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    way.__name__: way for way in (flip, flips, zeros, cut, doubled, swapped)
}
"""Name -> what is done; takes the content and what draws places."""


def damaged(content: bytes, way: str, draw: random.Random) -> bytes:
    """A content that differs from what was given, unless ten tries find none."""
    for _ in range(10):
        found = bytes(WAYS[way](bytearray(content), draw))
        if found != content:
            break
    return found
