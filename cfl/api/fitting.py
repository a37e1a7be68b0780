"""Runs ``cfl fit`` from Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback

from cfl.api.parts import require_callbacks
from cfl.api.run import Run, load
from cfl.cli.main import trained
from cfl.reporting.csv_file import RunFolderError
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import SUMMARY


def fit(*settings: str | Path | Mapping[str, Any], callbacks: Sequence[Callback] = ()) -> Run:
    """Train as ``cfl fit`` does, and return the finished run.

    ::

        run = cfl.fit("methods/fot.yaml", {"model.optimizer.lr": 0.1, "schedule": {"rounds_per_task": 5}})

    Args:
        settings: configuration files, as after ``--config``, and mappings of options with dotted or nested keys, as on
            the command line. They override the default configuration, and later ones override earlier ones.
        callbacks: further callbacks of the Trainer. They are not part of the experiment, so that a checkpoint can be
            resumed with others.

    Raises:
        ConfigError: a setting or a callback does not work. This is found before anything is trained.
        cfl.runtime.errors.NotUnderstood: a key is no option, or a value has the wrong type.
        RunFolderError: a callback ended the run early.
        KeyboardInterrupt: SIGINT or SIGTERM ended the run between two rounds; ``{"ckpt_path": "last"}`` continues it.
    """
    require_callbacks(callbacks)
    words: list[str] = []
    for given in settings:
        words += _as_options(given) if isinstance(given, Mapping) else ["--config", str(given)]
    try:
        folder, own = trained(["fit", *words], callbacks)
    except SystemExit as exit:
        raise KeyboardInterrupt(f"the run was interrupted (exit status {exit.code})") from None
    if not (folder / SUMMARY).exists():
        going_on = "{'ckpt_path': 'last'} continues it"
        raise RunFolderError(f"{folder}: a callback ended the run before its last round; {going_on}")
    return load(folder, allow=own)


_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that YAML refuses, or takes for the end of a line."""
_TEXT_OR_NOT_FINITE = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_IN_YAML = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
_WHOLE = ("methods", "measures", "federated.codecs")
"""Options whose own values are mappings, with names that the user gives."""


def _as_options(settings: Mapping[str, Any]) -> Iterator[str]:
    """Words of a command line."""
    for key, value in _flat(settings):
        try:
            yield f"--{key}={value if isinstance(value, str | Path) else _as_yaml(value)}"
        except TypeError:
            valid = "a number, a text, a list or a mapping of these, as in a configuration file"
            raise ConfigError(key, value, valid) from None


def _as_yaml(value: Any) -> str:
    """JSON that YAML reads as the same value: characters beyond 16 bits have another escape there, so they stay.

    Infinity and NaN have other names there.
    """
    text = json.dumps(value, default=_plain, ensure_ascii=False)
    text = _TEXT_OR_NOT_FINITE.sub(lambda found: _IN_YAML.get(found[0], found[0]), text)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value; a class with its options stays one value."""
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value and "class_path" not in value and name not in _WHOLE:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """A path as a text, and a number of numpy as Python's."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)
