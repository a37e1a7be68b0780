"""Names from configurations that become names of files and folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST = 255
"""Bytes that the name of a file or folder may have."""
_METHOD = re.compile("[A-Za-z0-9_-]{1,100}")
_BENCHMARK = re.compile(r"[^/\\\s.][^/\\]*")


def is_method_name(text: object) -> bool:
    """Return whether a text may be the name of a method, whose table is ``<name>.csv``."""
    return isinstance(text, str) and _METHOD.fullmatch(text) is not None


def table_names(config: Mapping[str, Any]) -> list[str]:
    """The names of a configuration's methods, without those that can be no names of tables."""
    methods = config.get("methods")
    return [name for name in methods if is_method_name(name)] if isinstance(methods, Mapping) else []


def is_benchmark_name(text: object) -> bool:
    """Return whether a text may be the name of a benchmark, which also names a folder and is printed."""
    well_formed = isinstance(text, str) and _BENCHMARK.fullmatch(text) is not None and text.isprintable()
    return well_formed and len(str(text).encode()) <= LONGEST
