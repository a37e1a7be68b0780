"""One HTML page with everything in it: data, style, program and drawing library; it opens without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from cfl.reporting.compare.groups import Compared
from cfl.reporting.compare.page_data import page_data
from cfl.reporting.compare.reading import LeftOut
from cfl.runtime.printable import encodable

PLOTLY = "plotly-cartesian-4.1.1.min.js"
"""The drawing library: plotly.js's cartesian bundle as npm's ``plotly.js-cartesian-dist-min`` ships it, under the MIT
licence (``plotly-LICENSE.txt`` beside it). To renew it, put the new file there and change this name."""


SIZE_LIMIT = 5_000_000
"""Bytes that a page may have. It is the drawing library's 1.5 MB, and data."""


def page_of(
    comparisons: Compared,
    left_out: Sequence[LeftOut] = (),
    warnings: Sequence[str] = (),
) -> str:
    """The page of a comparison, its curves and matrices thinned as far as :data:`SIZE_LIMIT` asks for.

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
    # In one pass: what is put in is not searched for further places.
    return re.sub(r"/\*(DATA|STYLE|PROGRAM|PLOTLY)\*/", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("cfl.reporting.compare") / "assets" / name).read_text(encoding="utf-8")
