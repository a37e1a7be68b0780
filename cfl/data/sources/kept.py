"""Facts read from data sets' files that checkpoints keep, so that a model is used with those of its own run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_known: dict[str, Mapping[str, Any]] = {}


def remember(kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Give these sizes, names and moments to the data sets that are made from now on, until the next call.

    Args:
        kept: :meth:`cfl.data.sources.base.Source.kept` of the data sets of a checkpoint's run; empty for a new run.
    """
    _known.clear()
    _known.update(kept)


def known_of(name: str) -> Mapping[str, Any]:
    """Return the facts about a data set from the last :func:`remember`; empty if there are none."""
    return _known.get(name, {})
