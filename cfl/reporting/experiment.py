"""The experiment of a run: the part of its configuration on which results depend, and its hash."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfl.reporting.former_names import MOVED, with_former_classes
from cfl.runtime.class_paths import named_class, own_parameter

DECIDES_RESULTS = ("seed_everything", "model", "data", "methods", "schedule", "federated")
_PRECISIONS = {"32": None, "32-true": None, "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
"""Lightning's other spellings of a precision -> the spelling in experiments; None is float32."""
ONLY_WHERE_OR_HOW_FAST = (
    ("data", "root"),
    ("schedule", "cohort_width"),
    ("model", "engine"),
    ("model", "buffer"),
    ("federated", "client_state_memory_mb"),
)
MAY_CHANGE: Mapping[str, str] = {
    "run": "",
    "checkpoint": "",
    "progress": "",
    "local_models": "",
    "measures": "a name keeps its class and options",
    "trainer": "except precision and clipping",
    "engine": "except a reduced matmul_precision",
    "targets": "unless they may end the run",
    "privacy": "unless its budget may end the run",
    "buffer": "where no method replays",
    "data.root": "",
    "schedule.cohort_width": "",
    "federated.client_state_memory_mb": "",
    "federated.on_bad_update": "to skip",
}
"""Sections and keys that may change when a run is resumed -> under which condition (empty: always).

``skip`` may replace ``stop``: under ``stop`` no client has been left out so far, so the results up to now are the same
with both.
"""
_ALLOWED_CHANGES = {"federated.on_bad_update": "skip"}
"""Keys of an experiment -> the value to which they may change when a run is resumed."""
_EXACT = "highest"
"""torch's default precision of float32 products."""


def matmul_precision_of(config: Mapping[str, Any]) -> str:
    """Return a configuration's ``engine.matmul_precision``, the precision of float32 products in local steps.

    All other options of ``engine`` change results by rounding at most.
    """
    precision: str = (config.get("engine") or {}).get("matmul_precision", _EXACT)
    return precision


def trainer_decides(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's options on which results depend, spelled alike if they mean the same.

    float32 and no clipping are None, by whatever value they were chosen, and so is clipping by the norm.
    """
    precision, limit = trainer.get("precision"), trainer.get("gradient_clip_val") or None
    by = trainer.get("gradient_clip_algorithm")
    return {
        "precision": _PRECISIONS.get(str(precision), precision),
        "gradient_clip_val": float(limit) if isinstance(limit, int) else limit,
        "gradient_clip_algorithm": None if by == "norm" or limit is None else by,
    }


def may_end_run(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a configuration's ``targets`` and ``privacy``, each only if it may end the run.

    Targets that cannot end the run only determine what is recorded, and so does ``privacy`` without a budget. Numbers
    become floats, and accuracies ascend, so that 85 and 85.0 in any order give the same experiment.
    """
    found: dict[str, dict[str, Any]] = {}
    targets, privacy = config.get("targets") or {}, config.get("privacy")
    if targets.get("accuracies") and targets.get("stop"):
        found["targets"] = {**targets, "accuracies": sorted(float(accuracy) for accuracy in targets["accuracies"])}
    if isinstance(privacy, Mapping) and (budget := privacy.get("budget")) is not None:
        found["privacy"] = {**privacy, "budget": float(budget) if isinstance(budget, int) else budget}
    return found


def experiment_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that decides results.

    It leaves out folders, logging, checkpoints, devices and the cohort width, which changes speed only. These are
    nearly all options that may change when a run is resumed (:data:`MAY_CHANGE`). ``targets`` and ``privacy`` are
    included only if they may end the run, ``buffer`` only if a method replays from it, the order of ``methods`` only
    if there are several, and the precision of products only if it is reduced.

    Args:
        config: a subcommand's configuration as plain dictionaries, lists and values.
    """
    experiment = {key: json.loads(json.dumps(config.get(key))) for key in DECIDES_RESULTS}
    experiment["trainer"] = trainer_decides(config.get("trainer") or {})
    experiment |= may_end_run(config)
    if (precision := matmul_precision_of(config)) != _EXACT:
        experiment["matmul_precision"] = precision
    methods = config.get("methods") or {}
    if len(methods) > 1:  # methods are applied one after another, so their order matters
        experiment["methods_order"] = list(methods)
    named = [class_of(method) for method in methods.values()]
    if any(hasattr(method, "replays_logits") for method in named):  # cfl.methods.capabilities.Replay
        experiment["buffer"] = json.loads(json.dumps(config.get("buffer") or {}))
    for section, key in ONLY_WHERE_OR_HOW_FAST:
        if isinstance(experiment[section], dict):
            experiment[section].pop(key, None)
    former: dict[str, Any] = with_former_classes(experiment)
    return former


def config_hash(experiment: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that differ between different experiments."""
    text = json.dumps(experiment, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def setting_hash(experiment: Mapping[str, Any]) -> str:
    """Return :func:`config_hash` without the seed: equal for experiments that differ in their seed alone."""
    return config_hash({key: value for key, value in experiment.items() if key != "seed_everything"})


def with_defaults(older: Any, newer: Any, classes: Mapping[str, type], owner: type | None = None) -> Any:
    """Add to an experiment the options that only a newer one has, at the defaults of their classes' signatures.

    A run from before an option existed is thus recognised as a run with the option at its default.

    Args:
        older: an experiment, or a part of one.
        newer: an experiment with all current options; its values are not used.
        classes: for keys whose options belong to a class that the experiment does not name: key -> class.
        owner: the class whose options ``older`` holds, if any.

    Returns:
        A copy. An option without a default, or of an unknown class, stays absent.
    """
    if isinstance(older, list) and isinstance(newer, list) and len(older) == len(newer):
        return [with_defaults(left, right, {}) for left, right in zip(older, newer, strict=True)]
    if not isinstance(older, Mapping) or not isinstance(newer, Mapping):
        return older
    named = class_of(newer) if older.get("class_path") == newer.get("class_path") else None
    result = dict(older)
    for key, value in newer.items():
        if key in older or (key == "init_args" and named is not None):
            inner = named if key == "init_args" else classes.get(key)
            result[key] = with_defaults(older.get(key, {}), value, {}, inner)
        elif owner is not None:
            result |= _default(owner, key)
    return result


def class_of(node: Any) -> type | None:
    """Return the class that a part of a configuration names, by its former or current path; None if unknown.

    Modules of other packages are not imported for this (:func:`cfl.runtime.class_paths.named_class`).
    """
    path = str(node.get("class_path", "")) if isinstance(node, Mapping) else ""
    return named_class(MOVED.get(path, path))


def _default(owner: type, option: str) -> dict[str, Any]:
    """Return ``{option: default}`` as a configuration holds it, empty if there is no such default.

    If the default of a new option changes what a class did before, the class has ``before_options``: option -> the
    value that means the former behaviour.
    """
    for base in owner.__mro__:
        before = vars(base).get("before_options", {})
        if option in before:
            return {option: before[option]}
        parameter = own_parameter(base, option)
        if parameter is None:
            continue
        if parameter.default is inspect.Parameter.empty:
            return {}
        try:
            return {option: json.loads(json.dumps(parameter.default))}
        except TypeError:  # a default that no configuration can hold
            return {}
    return {}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as ``{"a.b.c": value}``."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    return {
        key: leaf for name, part in tree.items() for key, leaf in flatten(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a line ``key: ours, in the checkpoint theirs`` for every key in which two experiments differ."""
    left, right = flatten(ours), flatten(theirs)
    found = []
    for key in sorted({*left, *right}):
        mine, other = left.get(key, "(absent)"), right.get(key, "(absent)")
        if mine == other:
            continue
        if all(isinstance(value, list) and any(isinstance(part, Mapping) for part in value) for value in (mine, other)):
            of_each = [{f"{key}.{place}": part for place, part in enumerate(value)} for value in (mine, other)]
            found += differences(*of_each)
        else:
            found.append(f"{key}: {mine!r}, in the checkpoint {other!r}")
    return found


def differences_on_resuming(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return :func:`differences` without the changes that are allowed when a run is resumed.

    Args:
        ours: the experiment of the resumed run.
        theirs: the experiment of the checkpoint.
    """
    if isinstance(theirs.get("trainer"), Mapping):  # of an earlier version, as it was spelled
        theirs = {**theirs, "trainer": trainer_decides(theirs["trainer"])}
    now, before = flatten(ours), flatten(theirs)
    changed = {key: value for key, value in _ALLOWED_CHANGES.items() if now.get(key) == value and key in before}
    return differences(now, {**before, **changed})


def class_name(node: Any) -> str:
    """The class of a configuration's entry, or of a dotted path, without its module and in lower case."""
    path = node.get("class_path", "") if isinstance(node, Mapping) else str(node or "")
    return path.rpartition(".")[2].lower()


def benchmark_name(config: Mapping[str, Any]) -> str:
    """Return the default name of a benchmark, from its stream's class and data sets, e.g. ``permuted-digits``.

    For a source that can read many data sets, the file, folder or set is used instead of the source's class.
    """
    stream = config["data"]["stream"]
    arguments = stream.get("init_args") or {}
    sources = arguments.get("sources") or [arguments.get("source")]
    return "-".join([class_name(stream), *map(_data_set, sources)])


def _data_set(source: Any) -> str:
    naming_option = getattr(class_of(source), "naming_option", None) if isinstance(source, Mapping) else None
    told = (source.get("init_args") or {}).get(naming_option) if naming_option else None
    if isinstance(told, Mapping):
        return class_name(told)
    return data_set_name(class_name(source), told)


def data_set_name(kind: str, told: Any) -> str:
    """The name of a data set.

    Args:
        kind: the class of its source, in lower case.
        told: the file, folder or set that the source reads; None for a source of one data set.
    """
    name = Path(str(told)).name.removesuffix(".npz").removesuffix(".csv") if told else ""
    return re.sub(r"[^\w.]+", "-", name).strip("-.") or kind


def method_name(methods: Mapping[str, Any]) -> str:
    """The methods' names in their order, joined by ``+``; ``fedavg`` when there is none."""
    return "+".join(methods) or "fedavg"
