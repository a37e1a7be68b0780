"""Round numbers that are shown in tables and pictures; ``page.js`` follows the same rule."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Context, Decimal

_SURE = 12  # significant digits; further ones may be rounding errors
_WIDE = Context(prec=400, rounding=ROUND_HALF_UP)  # digits; a float has at most 309 before the point


def rounded(value: float, decimals: int, style: str = "") -> str:
    """A number as text, rounded half away from zero, and never as a negative zero.

    0.125 becomes 0.13 with two decimals, and so does a mean that differs from 0.125 by a rounding error only. Readers
    who round the number in a CSV file by hand get the same digits. Rounding half to even, or rounding the binary
    number, would give other digits.

    Args:
        value: the number.
        decimals: digits behind the point.
        style: ``+`` for a sign in front of positive numbers, ``,`` between thousands, or both.
    """
    if not math.isfinite(value):
        return str(value)
    shown = Decimal(f"{value:.{_SURE}g}").quantize(Decimal(1).scaleb(-decimals), context=_WIDE)
    return f"{abs(shown) if shown == 0 else shown:{style}f}"


def significant(value: float, digits: int) -> str:
    """Return a number as text with a number of significant digits, rounded as in :func:`rounded`."""
    return f"{float(Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(f'{value:.{_SURE}g}')):.{digits}g}"
