"""Joins the methods, and the loggers, of configurations that are given one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from cfl.runtime.class_paths import OPTIONS_OF_A_CLASS


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Methods of two configurations by name, those of the first one first.

    If a name is in both with the same class, options of the second configuration replace those of the first. If the
    classes differ, the second configuration's method replaces the first one's.
    """
    found = dict(before)
    for name, method in after.items():
        old, new = _plain(before.get(name)), _plain(method)
        same = "class_path" in old and "class_path" in new and _short(old) == _short(new)
        groups = {group: {**(old.get(group) or {}), **(new.get(group) or {})} for group in OPTIONS_OF_A_CLASS}
        options = {group: values for group, values in groups.items() if values}
        found[name] = {**new, **options} if same and options else method
    return found


def joined_loggers(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Loggers of two configurations, those of the first one first.

    If each configuration has one logger of a class, their options are joined as in :func:`joined`. If one of them has
    several of a class that both have, the second configuration's loggers of this class replace the first one's.
    """
    ours, theirs = ([_short(_plain(logger)) for logger in loggers] for loggers in (before, after))
    one_each = {name for name in ours if ours.count(name) == theirs.count(name) == 1}
    found = []
    for name, logger in zip(ours, before, strict=True):
        if name in one_each:
            logger = joined({name: logger}, {name: after[theirs.index(name)]})[name]
        if name in one_each or name not in theirs:
            found.append(logger)
    return [*found, *(logger for name, logger in zip(theirs, after, strict=True) if name not in one_each)]


def named_classes(loggers: Any) -> list[Any]:
    """Those of a configuration's loggers that name their classes."""
    return [one for one in (loggers if isinstance(loggers, list) else [loggers]) if "class_path" in _plain(one)]


def _plain(method: Any) -> dict[str, Any]:
    method = method.as_dict() if isinstance(method, Namespace) else method
    if isinstance(method, str):
        return {"class_path": method}
    return dict(method) if isinstance(method, Mapping) else {}


def _short(method: Mapping[str, Any]) -> str:
    return str(method["class_path"]).rpartition(".")[2]
