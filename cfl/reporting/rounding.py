"""How numbers are rounded wherever they are shown: in tables, in pictures, and by the same rule in ``page.js``."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Context, Decimal

_SURE = 12  # significant digits; those behind them are rounding errors
_WIDE = Context(prec=400, rounding=ROUND_HALF_UP)  # any float has its digits before the point


def rounded(value: float, decimals: int, style: str = "") -> str:
    """A number as text, rounded half away from zero, and never as a negative zero.

    0.125 is 0.13 with two decimals, and so is a mean that misses 0.125 by a rounding error. It is what readers get who
    round by hand the number that a CSV file shows; half to even, or rounding the binary number, would surprise them.

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
    """A number as text with so many significant digits, rounded likewise."""
    return f"{float(Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(f'{value:.{_SURE}g}')):.{digits}g}"
