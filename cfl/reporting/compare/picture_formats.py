"""The option ``--pictures`` of the commands that compare runs."""

from __future__ import annotations

import argparse
from functools import partial

FORMATS = ("png", "pdf", "svg")


def add_pictures(parser: argparse.ArgumentParser, condition: str = "", hint: str = "") -> None:
    """Add the option ``--pictures``, whose value is a sequence of formats, empty by default.

    Args:
        parser: the command's parser.
        condition: begins the help of the option, such as another option that it needs.
        hint: ends the error message.
    """
    parser.add_argument(
        "--pictures",
        metavar="FORMAT,...",
        nargs="?",
        const=("png",),
        default=(),
        type=partial(_formats, hint),
        help=f"{condition}also draw curves and heatmaps, as wide as a column or a page of an article: as png (unless "
        "given), pdf or svg, or several with commas between",
    )


def _formats(hint: str, text: str) -> list[str]:
    formats = [part for part in (part.strip() for part in text.split(",")) if part]
    if not formats or not {*formats} <= {*FORMATS}:
        valid = f"some of {', '.join(FORMATS)}, with commas between them{hint}"
        raise argparse.ArgumentTypeError(f"{text!r} cannot work; valid: {valid}")
    return formats
