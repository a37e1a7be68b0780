"""Former names of classes and options. Configurations may have them; experiments and their hashes contain them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cfl.runtime.class_paths import PACKAGE

MOVED = {
    "cfl.gaussian.GaussianMechanism": "cfl.methods.components.gaussian_mechanism.GaussianMechanism",
    "cfl.parallel.ClientParallel": "cfl.training.strategy.ClientParallel",
}
"""Former class paths, from before a module moved -> current class paths.

Experiments and their hashes contain the former paths, so that kept results and checkpoints stay valid.
"""
RENAMED: Mapping[str, Mapping[str, str]] = {"ImageFolder": {"folder": "path"}}
"""Short names of classes of this project -> former names of options -> current names.

As with :data:`MOVED`, configurations may have either name, and experiments contain the former one.
"""
REMOVED: Mapping[str, Mapping[str, Any]] = {
    "EWC": {"fisher_clients": "all", "scope": "client"},
    "GPM": {"memory_clients": "all"},
    "RGO": {"memory_clients": "all"},
    "SCAFFOLD": {"at_task_switch": "keep"},
}
"""Short names of classes of this project -> options that they no longer have -> the values that mean what they do.

Configurations may have these values, which are left out. The parser refuses others. Experiments contain them.
"""
_FORMER = {now: former for former, now in MOVED.items()}
_MOVED_PATHS = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, MOVED))})(?![\w.])")


def with_moved_classes(text: str) -> str:
    """Replace former class paths by current ones in a configuration's text or a word of a command line."""
    return _MOVED_PATHS.sub(lambda found: MOVED[found[1]], text)


def with_former_classes(tree: Any) -> Any:
    """Return a configuration or a part of it with former class paths and names of options, to compute its hash."""
    return _with_former_paths(_with_options(tree, _former_options))


def _with_former_paths(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _with_former_paths(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_with_former_paths(value) for value in tree]
    return _FORMER.get(tree, tree) if isinstance(tree, str) else tree


def with_renamed_options(tree: Any) -> Any:
    """Return a configuration or a part of it with current names of options, without those that have been removed."""
    return _with_options(tree, _current_options)


def _former_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    former = {now: before for before, now in RENAMED.get(name, {}).items()}
    return {**REMOVED.get(name, {}), **{former.get(option, option): value for option, value in options.items()}}


def _current_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    now, removed = RENAMED.get(name, {}), REMOVED.get(name, {}).items()
    return {now.get(option, option): value for option, value in options.items() if (option, value) not in removed}


def _with_options(tree: Any, change: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Change the options of each class of this project, by the class's short name."""
    if isinstance(tree, list):
        return [_with_options(value, change) for value in tree]
    if not isinstance(tree, Mapping):
        return tree
    found = {key: _with_options(value, change) for key, value in tree.items()}
    module, _, name = str(tree.get("class_path", "")).rpartition(".")
    options = found.get("init_args")
    if module.partition(".")[0] in ("", PACKAGE) and isinstance(options, dict):
        found["init_args"] = change(name, options)
    return found
