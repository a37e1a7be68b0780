"""What checkpoints keep of data sets' files: the model of a run is used with what the files of that run said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_known: dict[str, Mapping[str, Any]] = {}


def remember(kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Data sets that are made from now on, until the next call, have these sizes, names and moments.

    Args:
        kept: :meth:`cfl.data.sources.base.Source.kept` of the data sets of a checkpoint's run; empty for a new run.
    """
    _known.clear()
    _known.update(kept)


def known_of(name: str) -> Mapping[str, Any]:
    """What the checkpoint that has been read says of a data set; empty if there is none."""
    return _known.get(name, {})
