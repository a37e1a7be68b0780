"""One HTML page with everything in it: data, style, program and drawing library; it opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.reading import LeftOut
from cfl.reporting.compare.rows import Compared
from cfl.runtime.printable import encodable

PLOTLY = "plotly-cartesian-4.1.1.min.js"
"""The drawing library: plotly.js's cartesian bundle as npm's ``plotly.js-cartesian-dist-min`` ships it, under the MIT
licence (``plotly-LICENSE.txt`` beside it). To renew it, put the new file there and change this name."""


SIZE_LIMIT = 5_000_000
"""Largest size of a page in bytes. The drawing library takes 1.5 MB of it, the rest is data."""


def page_of(
    comparisons: Compared,
    left_out: Sequence[LeftOut] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Return the page of a comparison, with curves and matrices thinned until it fits :data:`SIZE_LIMIT`.

    The amount of data is halved at most five times. A page that is still larger is returned as it is.

    Args:
        comparisons: the tables, each with the row against which its differences are taken.
        left_out: folders that are not compared.
        warnings: lines about parts of runs that could not be read.
    """
    html = ""
    for halvings in range(6):
        html = page(page_data(comparisons, left_out, warnings, share=0.5**halvings))
        if len(html.encode()) <= SIZE_LIMIT:
            break
    return html


def page(data: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        data: as :func:`cfl.reporting.compare.page_data.page_data` gives it.
    """
    text = encodable(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
    # Inside a script element a name like </script> or <!-- would end or change it; in JSON < only stands in strings.
    parts = {"DATA": text.replace("<", "\\u003c"), "STYLE": _asset("page.css"), "PROGRAM": _asset("page.js")}
    parts["PLOTLY"] = _asset(PLOTLY)
    # In one pass, so that inserted text is not searched for placeholders.
    return re.sub(r"/\*(DATA|STYLE|PROGRAM|PLOTLY)\*/", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("cfl.reporting.compare") / "assets" / name).read_text(encoding="utf-8")
