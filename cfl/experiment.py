"""What makes two runs the same experiment: the part of a configuration on which results depend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DECIDES_RESULTS = ("seed_everything", "model", "data", "methods", "schedule", "federated")
_TRAINER_DECIDES = ("precision", "gradient_clip_val", "gradient_clip_algorithm")
_ONLY_WHERE_OR_HOW_FAST = (
    ("data", "root"),
    ("schedule", "cohort_width"),
    ("model", "engine"),
    ("federated", "client_state_memory_mb"),
)


def experiment_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that decides results.

    Left out are folders, logging, checkpoints, devices and the cohort width, which changes speed only.

    Args:
        config: a subcommand's configuration as plain dictionaries, lists and values.
    """
    experiment = {key: json.loads(json.dumps(config.get(key))) for key in _DECIDES_RESULTS}
    trainer = config.get("trainer") or {}
    experiment["trainer"] = {key: trainer.get(key) for key in _TRAINER_DECIDES}
    for section, key in _ONLY_WHERE_OR_HOW_FAST:
        if isinstance(experiment[section], dict):
            experiment[section].pop(key, None)
    return experiment


def config_hash(experiment: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that differ between different experiments."""
    text = json.dumps(experiment, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as ``{"a.b.c": value}``."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    return {
        key: leaf for name, part in tree.items() for key, leaf in flatten(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Lines ``key: ours, theirs`` for every key in which two experiments differ."""
    left, right = flatten(ours), flatten(theirs)
    absent = "(absent)"
    return [
        f"{key}: {left.get(key, absent)!r}, in the checkpoint {right.get(key, absent)!r}"
        for key in sorted({*left, *right})
        if left.get(key, absent) != right.get(key, absent)
    ]


def _class_name(node: Any) -> str:
    path = node.get("class_path", "") if isinstance(node, Mapping) else str(node or "")
    return path.rpartition(".")[2].lower()


def benchmark_name(config: Mapping[str, Any]) -> str:
    """A name from the stream's and the sources' classes, e.g. ``permuted-digits``, where the user gave none."""
    stream = config["data"]["stream"]
    arguments = stream.get("init_args") or {}
    sources = arguments.get("sources") or [arguments.get("source")]
    return "-".join([_class_name(stream), *(_class_name(source) for source in sources)])


def method_name(methods: Mapping[str, Any]) -> str:
    """The methods' names in their order, joined by ``+``; ``fedavg`` when there is none."""
    return "+".join(methods) or "fedavg"
