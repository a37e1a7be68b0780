"""Facts read from data sets' files that checkpoints keep, so that a model is used with those of its own run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_NONE: Mapping[str, Mapping[str, Any]] = {}
_known: ContextVar[Mapping[str, Mapping[str, Any]]] = ContextVar("files", default=_NONE)


@contextmanager
def facts_of_run(kept: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, give these sizes, names and moments to the data sets that are made, which keep them.

    Args:
        kept: :meth:`cfl.data.sources.base.Source.facts_for_checkpoint` of the data sets of a checkpoint's run; empty
            for a new run.
    """
    token = _known.set(kept)
    try:
        yield
    finally:
        _known.reset(token)


def known_of(name: str) -> Mapping[str, Any]:
    """Return the facts about a data set from :func:`facts_of_run`; empty if there are none."""
    return _known.get().get(name, {})
