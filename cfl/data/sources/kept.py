"""What checkpoints keep of data sets' files, so that a run's model can be used where these are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_known: dict[str, Mapping[str, Any]] = {}


def remember(kept: Mapping[str, Mapping[str, Any]]) -> None:
    """From now on data sets whose files are missing have these sizes.

    Args:
        kept: :meth:`cfl.data.sources.base.Source.kept` of the data sets of a checkpoint's run.
    """
    _known.update(kept)


def known_of(name: str) -> Mapping[str, Any]:
    """What a checkpoint that has been read says of a data set; empty if none has."""
    return _known.get(name, {})
