"""The settings of a run under flat keys, as on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cfl.reporting.experiment import (
    DECIDES_RESULTS,
    ONLY_WHERE_OR_HOW_FAST,
    matmul_precision_of,
    may_end_run,
    trainer_decides,
)
from cfl.runtime.class_paths import short_path

_SECTIONS = (*(section for section in DECIDES_RESULTS if section != "seed_everything"), "buffer")
_NO_CAUSE = tuple(f"{section}.{key}." for section, key in ONLY_WHERE_OR_HOW_FAST)


def settings_of(config: Mapping[str, Any], epsilons: bool = False) -> dict[str, Any]:
    """Return the settings that decide a run's results, without the seed, as ``{"methods.fot.threshold": 0.96}``.

    Keys are those of the command line: ``init_args`` is left out, and the value of a class's own key is its name as
    :func:`cfl.runtime.class_paths.short_path` shows it, ``{"data.partition": "Shards", "data.partition.per_client":
    2}``. Unlike :func:`cfl.reporting.experiment.experiment_of` this function imports no method, since a comparison
    needs no training code. It therefore includes ``buffer`` even if no method replays from it. ``measures`` decide
    results of their own. ``privacy`` without a budget decides epsilons only, and is left out of a run that has none.

    Args:
        config: a resolved configuration as plain dictionaries, lists and values.
        epsilons: whether the run has epsilons.
    """
    flat: dict[str, Any] = {}
    for section, options in [*((key, config[key]) for key in _SECTIONS if key in config), *may_end_run(config).items()]:
        _flatten(section, options, flat)
    if epsilons and isinstance(privacy := config.get("privacy"), Mapping):
        _flatten("privacy", {key: value for key, value in privacy.items() if key != "budget"}, flat)
    if measures := config.get("measures"):
        _flatten("measures", measures, flat)
    trainer = config.get("trainer")
    if isinstance(trainer, Mapping):
        flat |= {f"trainer.{key}": value for key, value in trainer_decides(trainer).items()}
    flat["engine.matmul_precision"] = matmul_precision_of(config)
    return {key: value for key, value in flat.items() if not f"{key}.".startswith(_NO_CAUSE)}


def _flatten(key: str, node: Any, into: dict[str, Any]) -> None:
    if isinstance(node, Mapping) and "class_path" in node:
        into[key] = short_path(str(node["class_path"]))
        node = node.get("init_args") or {}
    elif not isinstance(node, Mapping) or not node:
        into[key] = node
        return
    for name, part in node.items():
        _flatten(f"{key}.{name}", part, into)


def differing(several: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the keys in which settings differ -> their values as text, in order of appearance.

    A key is compared only among the settings that have it. A run from before an option existed thus does not differ
    from a newer one, and options that only one of two classes has are not counted as differences.

    Args:
        several: settings as :func:`settings_of` returns them.
    """
    found: dict[str, dict[str, None]] = {}
    for settings in several:
        for key, value in settings.items():
            found.setdefault(key, {})[shown(value)] = None
    return {key: list(values) for key, values in found.items() if len(values) > 1}


def shown(value: Any) -> str:
    """A setting's value as it is written in YAML, on one line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a name for each key: its last part, such as ``threshold``, or the whole key if that is ambiguous."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
