"""Ways in which the content of a file is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable


def flip(content: bytearray, draw: random.Random) -> bytearray:
    """Flip a bit."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def flips(content: bytearray, draw: random.Random) -> bytearray:
    """Flip a bit, eight times."""
    for _ in range(8):
        flip(content, draw)
    return content


def zeros(content: bytearray, draw: random.Random) -> bytearray:
    """Set a part to zeros, as on a disk that has lost a block."""
    start, size = _part(content, draw)
    content[start : start + size] = bytes(size)
    return content


def cut(content: bytearray, draw: random.Random) -> bytearray:
    """Cut off the end, or everything."""
    return content[: 0 if draw.random() < 0.2 else draw.randrange(len(content))]


def doubled(content: bytearray, draw: random.Random) -> bytearray:
    """Repeat a part, or everything."""
    start, size = (0, len(content)) if draw.random() < 0.3 else _part(content, draw)
    return content[: start + size] + content[start:]


def swapped(content: bytearray, draw: random.Random) -> bytearray:
    """Swap two parts of equal length."""
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
"""Name -> function that damages a content, given the content and a generator that draws places."""


def damaged(content: bytes, way: str, draw: random.Random) -> bytes:
    """Return a damaged content; it differs from ``content`` unless ten tries find no difference."""
    for _ in range(10):
        found = bytes(WAYS[way](bytearray(content), draw))
        if found != content:
            break
    return found
