"""Finds classes of other installed packages that configurations name by their short names, like the project's own.

A package offers such classes as entry points, each with the name of its class::

    [project.entry-points."cfl.methods"]
    MAS = "my_package.mas:MAS"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from jsonargparse._common import check_import_path

from cfl.data.partitions import Partition
from cfl.data.sources import Source
from cfl.methods import Method
from cfl.models import Network
from cfl.runtime.errors import ConfigError

GROUPS: Mapping[type, str] = {
    Method: "cfl.methods",
    Network: "cfl.networks",
    Source: "cfl.sources",
    Partition: "cfl.partitions",
}
"""Base class -> group of entry points."""


def offered(kind: type) -> Mapping[str, EntryPoint]:
    """Short name -> entry point of the classes of a kind that installed packages offer; nothing is imported."""
    return _in_group(GROUPS[kind]) if kind in GROUPS else {}


@cache
def _in_group(group: str) -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


def import_named_in(text: str) -> None:
    """Import the offered classes whose short names are in a text, so that the parser knows them.

    Args:
        text: a configuration, or the words of a command line.

    Raises:
        ConfigError: a class cannot be imported, or is not of its group's kind.
    """
    for kind, group in GROUPS.items():
        for name, entry in offered(kind).items():
            if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text):
                _import(entry, kind, group)


def _import(entry: EntryPoint, kind: type, group: str) -> None:
    try:
        check_import_path(f"{entry.module}.{entry.attr}")
    except ValueError:  # the configuration may not name it, so it stays unknown
        return
    valid = f"a subclass of {kind.__name__} with that name, as an installed package says in its entry points"
    try:
        found = entry.load()
    except Exception as error:
        raise ConfigError(f"{group}.{entry.name}", entry.value, f"{valid} ({error})") from error
    if not (isinstance(found, type) and issubclass(found, kind) and found.__name__ == entry.name):
        raise ConfigError(f"{group}.{entry.name}", entry.value, valid)
